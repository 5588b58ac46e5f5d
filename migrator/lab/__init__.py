"""A cluster of namespaced nodes on one machine: `Lab`.

In which order to read: lab.py (the lab itself), layout.py (where everything is), inside.py (what runs inside a node),
network.py (the switch and its cables), processes.py (how all of it is found and ended), site.py (lock, record, way in);
then files.py, readiness.py with probe.py, and ranks.py (`migrator lab run`).
"""

from migrator.lab.lab import Lab

__all__ = ["Lab"]
