"""Chooses the buddies of each rank: the nodes that keep copies of its snapshot, and the nodes that only vote. Pure.

A buddy is another node than the rank's, and every copy has a node of its own. Of the nodes that answer, those come first that
are in another rack than the image and the copies before. Else they are the next nodes of the job, in the order of the ranks,
so that every node of a job keeps about as much as the others; then nodes outside of the job, one after the other. A node
that only votes is in another rack than those that keep images, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snapshotd.api.errors import Refused, Where

Labels = Mapping[str, Mapping[str, str]]

#: Number of nodes that may replace a witness which the coordinator cannot reach.
STAND_INS = 3


def choose(
    of_ranks: Sequence[str], usable: Sequence[str], labels: Labels | None = None, copies: int = 1
) -> list[list[str]]:
    """The buddies of the ranks, whose nodes are `of_ranks`, for so many copies. `usable`: all nodes that answer. Raises
    Refused if they are too few."""
    ring = list(dict.fromkeys(of_ranks))
    others = [node for node in usable if node not in ring]
    if len(ring) + len(others) <= copies:
        raise _too_few(sorted({*ring, *others}), copies)
    found = {node: _of_node(node, ring, others, labels or {}, copies) for node in ring}
    return [found[node] for node in of_ranks]


def _of_node(node: str, ring: Sequence[str], others: Sequence[str], labels: Labels, copies: int) -> list[str]:
    place = ring.index(node)
    turn = place % len(others) if others else 0  # each node of the job begins with another one
    candidates = [*ring[place + 1 :], *ring[:place], *others[turn:], *others[:turn]]
    chosen = [node]
    for _ in range(copies):
        best = max(candidates, key=lambda one: sum(_apart(one, other, labels) for other in chosen))  # the first of them
        candidates.remove(best)
        chosen.append(best)
    return chosen[1:]


def _apart(one: str, other: str, labels: Labels) -> bool:
    """Whether two nodes are known to be in different racks."""
    racks = [labels.get(node, {}).get("rack", "") for node in (one, other)]
    return all(racks) and racks[0] != racks[1]


def _too_few(answering: Sequence[str], copies: int) -> Refused:
    remedy = "add a node to the cluster (`migrator cluster add`), or start the daemons of the others"
    if copies == 1:
        text = f"{answering[0]} is the only node that answers: a snapshot must also lie on another one"
        return Refused(text, remedy=remedy, where=Where.UNTOUCHED)
    most = len(answering) - 1
    return Refused(
        f"{copies} copies of each rank's image, on other nodes than the image, need {copies + 1} nodes, and"
        f" {len(answering)} answer{'s' if most == 0 else ''}: {', '.join(answering)}"
        + (f". --copies {most} is possible now" if most else ""),
        remedy=remedy,
        where=Where.UNTOUCHED,
    )


def witnesses(keepers: Sequence[str], usable: Sequence[str], copies: int, labels: Labels | None = None) -> list[str]:
    """Nodes that keep no image, and have a vote on which node coordinates the job. With them a majority is left when as many
    nodes are lost as there are copies, if the cluster has nodes enough: without one, two nodes that keep images could not
    do without an operator. A witness that would make the number of voters even is left out: it would not let them bear one
    loss more.

    `keepers`: the coordinator first. Those witnesses come first that are in another rack than the coordinator, then those in
    another one than most of the other voters: a rack that is lost should not take the majority with it."""
    others = [node for node in usable if node not in keepers]
    count = min(len(others), max(0, 2 * copies + 1 - len(keepers)))
    if count and (len(keepers) + count) % 2 == 0:
        count -= 1
    return _voters(keepers, others, count, labels or {})


def stand_ins(voters: Sequence[str], usable: Sequence[str], labels: Labels | None = None) -> list[str]:
    """Nodes that may replace a witness of these voters which the coordinator cannot reach."""
    others = [node for node in usable if node not in voters]
    return _voters(voters, others, min(len(others), STAND_INS), labels or {})


def _voters(known: Sequence[str], others: list[str], count: int, labels: Labels) -> list[str]:
    """Moves `count` nodes out of `others`, the best first, and returns them."""
    coordinator, *voters = known
    chosen: list[str] = []
    for _ in range(count):
        best = max(others, key=lambda one: _apart_from_voters(one, coordinator, [*voters, *chosen], labels))
        others.remove(best)
        chosen.append(best)
    return chosen


def _apart_from_voters(one: str, coordinator: str, voters: Sequence[str], labels: Labels) -> tuple[bool, int]:
    return _apart(one, coordinator, labels), sum(_apart(one, voter, labels) for voter in voters)
