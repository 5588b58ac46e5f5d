"""How far the ranks of this node have come: the readings from which the autopilot recognises stalled ranks and stragglers.

Invariant: reading changes nothing in a rank and makes no rank wait. The memory of a rank is read by a child that can be
killed, and the readings of one user's ranks delay those of no other user. A rank's numbers are its user's to forge, so
nothing is concluded here: a node says what it read of its own ranks, and the autopilot compares
(migrator/autopilot/stragglers.py).

schedule.py and unchanged.py are pure. measures.py reads one rank. sampler.py does it for all, at the right times.
"""
