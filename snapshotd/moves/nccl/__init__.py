"""The NCCL communicators of a moving rank, on every node that has a member."""
