"""What nodes report about the ranks of a protected job."""

from __future__ import annotations

from migrator.find_rank import Found
from snapshotd.api import snapshotd_pb2 as pb

SUSPENDED, AWAY = pb.Rank.SUSPENDED, pb.Rank.AWAY


def rank(number: int, node: str, place: pb.Rank.Place.ValueType = pb.Rank.HERE, failed: int | None = None) -> Found:
    return Found(node, pb.Rank(uid=f"job-{number}", job="job", rank=number, place=place, failed=failed))
