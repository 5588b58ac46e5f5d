"""What a daemon does for a move: `source.py` on the node that is left, `target.py` on the node that is reached."""
