"""Moves ranks of running jobs at random while faults of all kinds are injected at random (`make chaos`).

After every round the cluster must settle by itself, or with `migrator recover` as a person would run it. At any time three
invariants hold: no step of a rank runs twice or is skipped (jobs.py), a rank never has two copies that run (watch.py), and a
rank ends only where a round ends it on purpose.

Everything is drawn from the seed: the jobs, the ranks, the nodes, the faults and the parts of a move at which they occur. How
long the steps of a move take is not in its hand, so the same seed gives the same rounds, not the same microseconds.
"""
