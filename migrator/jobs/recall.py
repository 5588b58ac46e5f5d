"""What the records of a job say about it to a protection that has just been started: it may have been ended in the middle of
a rollback, or together with a node."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from migrator.jobs.finding import JobEntry


@dataclass(frozen=True)
class Recalled:
    nodes: dict[str, str] = field(default_factory=dict)  # uid of a rank -> the node that had it at the last snapshot
    waits: str = ""  # the rollback after which the job was not resumed yet


def recall(entries: Sequence[JobEntry], known: Collection[str]) -> Recalled | None:
    """`entries`: the records of the job, the newest first. `known`: the uids of its ranks that nodes know. None: there is no
    record yet, or it is one of an earlier job with the same name."""
    waiting = [one for one in entries if one.record.kind == "rollback" and one.suspended]
    kept = [one for one in entries if one.is_snapshot] or waiting
    if not kept:
        return None
    nodes = {part.rank_uid: part.node for part in kept[0].record.participants}
    if known and not nodes.keys() & set(known):
        return None
    return Recalled(nodes, waiting[0].record.record if waiting else "")
