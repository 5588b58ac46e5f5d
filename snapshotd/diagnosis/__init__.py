"""What would make a move from or to this node fail, for `migrator doctor`: its own parts, and the way to other nodes.

Differences between nodes are for the operator's side to find (migrator/doctor): one daemon does not know the others' facts.
"""
