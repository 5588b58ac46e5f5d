"""`migrator doctor`: what would make a move fail, on each node and between nodes, before a move is tried."""
