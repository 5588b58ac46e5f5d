"""Not DeepSpeed, but a launcher with its process structure on one node."""
