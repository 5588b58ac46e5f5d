"""Reads with which user and groups a rank runs, from what its source says about it."""

from __future__ import annotations

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Usage
from snapshotd.proc.credentials import Identity


def identity_of(facts: pb.RankFacts) -> Identity:
    """With which user and groups the rank runs. It has no default: proto3 would read a missing number as root's."""
    identity = Identity.of_proto(facts.identity)
    if not facts.HasField("identity") or not identity.is_valid():
        raise Usage(
            "the source does not say with which user and groups the rank runs",
            remedy="upgrade the daemon of the source and `migrator`, then retry",
        )
    return identity
