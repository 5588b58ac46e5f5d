"""The data types of suspending and resuming: the request, and the result that the command line renders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from migrator.job_protocol import JobVerdict
from migrator.results import PhaseTime


@dataclass(frozen=True)
class JobOptions:
    """One request of an operator."""

    job: str
    user_id: int | None = None  # whose job it is; None: must be clear
    timeout_s: float | None = None
    lease_s: float = 30.0
    on: Mapping[int, str] = field(default_factory=dict)  # resume, rollback: the nodes of ranks that go elsewhere
    lost: frozenset[str] = frozenset()  # rollback: nodes that the operator declares dead
    reason: str = ""  # rollback: what happened, for the history
    replayed_output: str = ""  # rollback: "suppress", "mark" or "pass"; empty: as `migrator run` was told
    changed_files: str = "restore"  # rollback: or "keep", "refuse"
    down_for_s: float = 0.0  # rollback: for how long the job has not run by now, if that is known
    copies: int | None = None  # snapshot: of each image, on other nodes; None: as before, or as the cluster file says
    record: str = ""  # the id that the coordinator journals; empty: a new one
    uids: frozenset[str] = frozenset()  # suspend: the ranks that the job must have; empty: those that it has now
    confirm_s: float = 60.0  # how long the daemons have to carry out a COMMIT before it is reported as not confirmed


@dataclass(frozen=True)
class RankPlace:
    rank: int
    uid: str
    node: str  # of its image, or where it runs
    came_from: str = ""  # resume: the node that had its image
    copies: tuple[str, ...] = ()  # snapshot: the nodes with the copies of its image


@dataclass(frozen=True)
class ChangedFile:
    """A file that a rank had open for writing at the snapshot, and that has changed since."""

    rank: int
    path: str
    change: str  # grown, deleted, renamed, replaced, shortened, overwritten
    action: str  # cut-back, restored, kept, empty
    beside: str  # name, in its directory, of what was at its place or cut off
    text: str  # in words


@dataclass(frozen=True)
class BadImage:
    """An image of a rank from which it was not restored."""

    rank: int
    node: str
    image: str  # the move by which the node has it
    reason: str

    @property
    def text(self) -> str:
        return f"rank {self.rank}: the image on {self.node} {self._what}: {self.reason}"

    @property
    def _what(self) -> str:
        return "cannot be used"


@dataclass(frozen=True)
class UnreadableImage(BadImage):
    """It cannot be read, or is not what was stored."""


@dataclass(frozen=True)
class UnsentImage(BadImage):
    """It did not reach the target."""

    target: str

    @property
    def _what(self) -> str:
        return f"did not reach {self.target}"


@dataclass(frozen=True)
class JobResult:
    """How it ended: the object that `migrator job suspend --json` and `resume --json` print."""

    record: str
    job: str
    user_id: int
    coordinator: str
    outcome: JobVerdict
    ranks: list[RankPlace]
    seconds: float
    bytes: int = 0  # stored and sent
    copied_bytes: int = 0  # snapshot: of these, sent to the nodes that keep copies
    found_bytes: int = 0  # snapshot: of the copies, not sent, because those nodes had them in other images
    pause_s: float = 0.0  # snapshot
    phases: list[PhaseTime] = field(default_factory=list)
    parts: list[PhaseTime] = field(default_factory=list)  # the parts of phases: the longest of all ranks, and all bytes
    reason: str = ""
    state: str = ""  # what the job is doing now, in words
    error_code: str = ""
    remedy: str = ""
    exit_code: int = 0
    warnings: list[str] = field(default_factory=list)
    changed_files: list[ChangedFile] = field(default_factory=list)  # rollback
    unreadable_images: list[UnreadableImage] = field(default_factory=list)  # rollback: copies were used instead
    unsent_images: list[UnsentImage] = field(default_factory=list)  # rollback: copies were tried instead
    unsigned_on: list[str] = field(default_factory=list)  # snapshot: nodes whose copies will be refused at a rollback

    @property
    def bad_images(self) -> list[BadImage]:
        return [*self.unreadable_images, *self.unsent_images]

    def to_json(self) -> dict[str, Any]:
        return {
            "record": self.record,
            "job": self.job,
            "user_id": self.user_id,
            "coordinator": self.coordinator,
            "outcome": self.outcome.value,
            "ranks": [
                {
                    "rank": one.rank,
                    "uid": one.uid,
                    "node": one.node,
                    "from": one.came_from,
                    "copy": one.copies[0] if one.copies else "",
                    "copies": list(one.copies),
                }
                for one in self.ranks
            ],
            "seconds": round(self.seconds, 4),
            "pause_s": round(self.pause_s, 4),
            "bytes": self.bytes,
            "copied_bytes": self.copied_bytes,
            "found_bytes": self.found_bytes,
            "phases": [phase.to_json() for phase in self.phases],
            "parts": [part.to_json() for part in self.parts],
            "warnings": self.warnings,
            "changed_files": [asdict(one) for one in self.changed_files],
            "unreadable_images": [asdict(one) for one in self.unreadable_images],
            "unsent_images": [asdict(one) for one in self.unsent_images],
            "unsigned_on": self.unsigned_on,
            "reason": self.reason,
            "state": self.state,
            "error": self.error_code,
            "remedy": self.remedy,
        }
