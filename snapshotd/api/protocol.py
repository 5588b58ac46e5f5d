"""Which versions of migrator and snapshotd understand each other.

The version of a release says nothing about the calls between programs. These have a number of their own, the protocol: the
steps of a move, the calls and messages of proto/snapshotd.proto, and the content of images and data channels. Every program
says which numbers it speaks before a move begins, and a move between programs without a common one is refused.

Invariant: programs with a common number understand each other. What the other side may ignore or lack (a new field, a call
that the driver can do without) leaves the number as it is. Anything else needs a new one; `OLDEST` stays as long as a
program still does its part for older ones. tests/api/test_protocol.py compares with what is recorded for the number.
"""

from __future__ import annotations

from snapshotd.api.snapshotd_pb2 import Check, Protocol

#: Version 0.1, and builds of 0.2 before its release, say no number.
NEWEST, OLDEST = 3, 2
#: Since this number, a target opens device memory again that the processes of a rank share. What is said about such a rank
#: names no older number, so that daemons which lack that refuse it.
SHARED_DEVICE_MEMORY = 3

REMEDY = "install the same version on all nodes and for migrator (ranks keep running while a daemon restarts)"


def own() -> Protocol:
    """The numbers that this program speaks."""
    return Protocol(newest=NEWEST, oldest=OLDEST)


def carries_shared_memory(said: Protocol) -> bool:
    """Whether it is about a rank that moves with device memory that its processes share."""
    return said.oldest >= SHARED_DEVICE_MEMORY


def common(one: Protocol, other: Protocol) -> int | None:
    """The newest number that both speak, or None. A program that says no number has none in common with any other."""
    newest = min(one.newest, other.newest)
    return newest if newest > 0 and newest >= max(one.oldest, other.oldest) else None


def described(one: Protocol) -> str:
    """For messages."""
    if not one.newest:
        return "a protocol without a number"
    return f"protocol {one.newest}" if one.oldest == one.newest else f"protocols {one.oldest} to {one.newest}"


def check(one: str, its: Protocol, other: str, others: Protocol) -> Check:
    """The preflight check of two programs, which are named for messages."""
    spoken = common(its, others)
    if spoken is not None:
        return Check(name="daemon-version", verdict=Check.PASS, reason=f"{other}, protocol {spoken}")
    reason = f"{one} speaks {described(its)}, and {other} speaks {described(others)}"
    return Check(name="daemon-version", verdict=Check.REFUSE, reason=reason, remedy=REMEDY)
