"""The target node's side of a move."""
