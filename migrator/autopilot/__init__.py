"""Watches the nodes, decides, moves ranks away from nodes in trouble, and keeps a record that can be verified.

Read in this order: model.py (what is known), policy.py (what is allowed), decide.py (what follows, pure), spares.py (where
to), store.py (what survives), database.py (how it gets to the disk), engine.py (the loop).
"""
