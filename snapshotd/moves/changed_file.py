"""Defines what a rollback reports about a file that a rank had open for writing at the snapshot and that has changed since,
and what the user may have done with it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from snapshotd.api import snapshotd_pb2 as pb


class Policy(StrEnum):
    """What is done with files that were deleted, renamed, replaced or shortened. Files that have only grown are cut back."""

    RESTORE = "restore"  # the file as it was; what is at its name now is kept beside it
    KEEP = "keep"  # what is at its name now
    REFUSE = "refuse"  # the job is not resumed


class Change(StrEnum):
    GROWN = "grown"
    DELETED = "deleted"
    RENAMED = "renamed"
    REPLACED = "replaced"
    SHORTENED = "shortened"
    OVERWRITTEN = "overwritten"

    @property
    def words(self) -> str:
        return {
            Change.GROWN: "has grown",
            Change.DELETED: "was deleted or renamed",
            Change.RENAMED: "was renamed",
            Change.REPLACED: "was replaced by another file",
            Change.SHORTENED: "has become shorter",
            Change.OVERWRITTEN: "was overwritten",
        }[self]


class Action(StrEnum):
    CUT_BACK = "cut-back"
    RESTORED = "restored"
    KEPT = "kept"
    EMPTY = "empty"


class ChangedFile(msgspec.Struct, frozen=True, array_like=True):
    """Journalled and reported."""

    path: str
    change: str  # a Change
    action: str  # an Action
    size: int  # at the snapshot
    beside: str = ""  # the name, in the same directory, of what was cut off or at its name
    now: str = ""  # where it is now, if it was renamed

    def to_proto(self) -> pb.ChangedFile:
        return pb.ChangedFile(
            path=self.path, change=self.change, action=self.action, beside=self.beside, text=self.words
        )

    @property
    def words(self) -> str:
        to = f" to {self.now}" if self.now else ""
        since = f"{self.path} {Change(self.change).words}{to} since the snapshot"
        match self.action:
            case Action.CUT_BACK:
                return f"{since}: cut back to {self.size} bytes; what was cut off is in {self.beside}"
            case Action.RESTORED:
                kept = f"; what was there is in {self.beside}" if self.beside else ""
                return f"{since}: restored with its {self.size} bytes{kept}"
            case Action.EMPTY:
                return f"{since}, and its data was not kept: an empty file was made"
            case _:
                return f"{since}: the rank got it as it is"
