"""Chooses the buddy of each rank: the node that keeps a copy of its snapshot. Pure.

A buddy is another node than the rank's, if possible in another rack. By default it is the next node of the job, in the order
of the ranks, so that every node of a job keeps about as much as it has itself. A job on one node has a buddy outside of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snapshotd.api.errors import Refused, Where


def choose(
    of_ranks: Sequence[str], usable: Sequence[str], labels: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """The buddies of the ranks, whose nodes are `of_ranks`. `usable`: all nodes that answer. Raises Refused if there is only
    one node."""
    ring = list(dict.fromkeys(of_ranks))
    others = [node for node in usable if node not in ring]
    return [_next(node, ring, others, labels or {}) for node in of_ranks]


def _next(node: str, ring: Sequence[str], others: Sequence[str], labels: Mapping[str, Mapping[str, str]]) -> str:
    place = ring.index(node)
    candidates = [*ring[place + 1 :], *ring[:place], *others]
    if not candidates:
        raise Refused(
            f"{node} is the only node that answers: a snapshot must also lie on another one",
            remedy="add a node to the cluster (`migrator cluster add`), or start the daemons of the others",
            where=Where.UNTOUCHED,
        )

    def rack(of: str) -> str:
        return labels.get(of, {}).get("rack", "")

    apart = [other for other in candidates if rack(node) and rack(other) and rack(other) != rack(node)]
    return (apart or candidates)[0]
