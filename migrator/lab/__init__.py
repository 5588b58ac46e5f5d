"""A cluster of namespaced nodes on one machine: `Lab`.

Reading order: lab.py (the lab itself), layout.py (paths and addresses), inside.py (what runs inside a node), network.py (the
switch and its links), processes.py (finding and ending processes), site.py (lock, record, entering a node), files.py,
readiness.py with probe.py, ranks.py (`migrator lab run`).
"""

from migrator.lab.lab import Lab

__all__ = ["Lab"]
