"""Brings all ranks of an NCCL job to a consistent point."""
