"""Talks to the library inside a rank's processes."""
