"""The user and groups of a process, as the kernel reports them.

Invariant: an `Identity` is never filled in from a default and never from what a keeper or a rank says. A process whose real,
effective, saved and file-system ids differ (a set-uid or set-gid program) has none: it acts for more than one user.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.proc import status
from snapshotd.proc.status import Status

_NO_ID = (1 << 32) - 1  # system calls use it for "no change"
Id = Annotated[int, Meta(ge=0, lt=_NO_ID)]
MAX_GROUPS = 65536  # NGROUPS_MAX


class Mixed(Exception):
    """The ids of a process differ from each other. The message names them."""


class Identity(msgspec.Struct, frozen=True):
    """With which user, group and supplementary groups a process runs."""

    user_id: Id
    group_id: Id
    groups: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUPS)]

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Raises Mixed, or FileNotFoundError or ProcessLookupError if the process has ended."""
        found = status.read(pid)
        if problem := mixed(found):
            raise Mixed(problem)
        return cls(found.user_ids[0], found.group_ids[0], found.groups)

    @classmethod
    def of_proto(cls, found: pb.Identity) -> Identity:
        return cls(found.user_id, found.group_id, tuple(found.groups))

    def is_valid(self) -> bool:
        """Whether every number is an id; messages of other nodes can have any."""
        numbers = (self.user_id, self.group_id, *self.groups)
        return len(self.groups) <= MAX_GROUPS and all(0 <= number < _NO_ID for number in numbers)

    def to_proto(self) -> pb.Identity:
        return pb.Identity(user_id=self.user_id, group_id=self.group_id, groups=self.groups)

    def to_orders(self) -> dict[str, Any]:
        """As the guest keeper reads it."""
        return {"user_id": self.user_id, "group_id": self.group_id, "groups": list(self.groups)}

    def __str__(self) -> str:
        return f"user {self.user_id}, group {self.group_id}, supplementary groups {_listed(self.groups) or 'none'}"


def mixed(found: Status) -> str:
    """What differs among the ids of a process; empty if nothing does."""
    for kind, numbers in (("user", found.user_ids), ("group", found.group_ids)):
        if len(set(numbers)) != 1:
            return f"its real, effective, saved and file-system {kind} ids are {_listed(numbers)}"
    return ""


def foreign(found: Status, keeper: Status) -> str:
    """Why a process may not be the rank of this keeper; empty if it may.

    Root may start a rank that then becomes another user. Any other user's rank has that user's id, and a group of its
    keeper: only a set-uid or set-gid program gets others.
    """
    if problem := mixed(found):
        return problem
    if keeper.user_id == 0:
        return ""
    if found.user_id != keeper.user_id:
        return f"it belongs to user {found.user_id}"
    if found.group_ids[0] not in {*keeper.group_ids, *keeper.groups}:
        return f"it has group {found.group_ids[0]}, which its keeper has not"
    return ""


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
