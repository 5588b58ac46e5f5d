"""The source node's side of a move."""
