"""The page of the autopilot: a map of the cluster, running moves, a timeline of the record, and orders of operators.

Everybody who reaches it can read it. An action needs a token, and is recorded with the operator's name.
Reading order: view.py and tally.py (what is shown), feed.py (when it changes), access.py (who may act), actions.py (what
they can do), app.py (HTTP), serving.py (address and TLS).
"""
