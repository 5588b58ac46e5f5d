"""Sends memory of a rank while it runs: finds written pages, reads them, and knows in the end what the target has."""
