"""Defines the typed record of one move: how it began, what was marked since, and how it ended.

The journal (snapshotd/moves/journal.py) keeps the record of an unfinished move in memory; each mark adds fields to it. Field
names on disk are part of the format: a daemon must be able to read the journal of an older one, so a field that is renamed
here keeps its old name on disk (`msgspec.field(name=…)`), and the types accept what was written then.

No I/O here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar

import msgspec
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.changed_file import ChangedFile
from snapshotd.moves.record_parts import (
    ClusterNode,
    GateProcess,
    JobPart,
    JournalledProcess,
    Member,
    NcclProcess,
    OffloadedMemory,
    PeerSocket,
    SocketOptions,
    SocketTimers,
    StripedProcess,
)
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.proc.credentials import Identity
from snapshotd.proc.tree import Process

T = TypeVar("T")


class Begin(msgspec.Struct, frozen=True):
    """What a daemon must know about a move for as long as it may have to be settled."""

    move: str
    role: str  # "source" | "target" | "peer" | "gate" | "job": the coordinator of a suspension or resumption
    rank_uid: str
    job: str
    rank: int
    source_node: str
    source_endpoint: str
    target_node: str
    target_endpoint: str
    nonce: str  # hex
    boot_id: str
    begun_unix_s: float
    lease_s: float = 0.0
    user_id: int = -1  # whose job it is: a job is named by user and name; -1: an older version did not journal it
    # A rank that is suspended (role "source") or resumed ("target") with its job: whose record decides. Empty: a move alone
    coordinator: str = ""
    coordinator_node: str = ""
    coordinator_endpoint: str = ""
    # "snapshot": of a rank that goes on (source), or of a job; "copy": of a snapshot's image (target); "rollback": of a job;
    # "job": gates that are closed for a job record, whose coordinator is the source
    kind: str = ""

    def same_request(self, other: Begin) -> bool:
        """Whether two Begins ask for the same move. Time, boot id, lease and nonce may differ; a target makes a new nonce."""
        same_user = self.user_id == other.user_id or -1 in (self.user_id, other.user_id)
        return same_user and _without_circumstances(self) == _without_circumstances(other)

    def is_of_job(self, user_id: int, job: str) -> bool:
        """Whether it moves a rank of this job. A move that an older version began may be of any user's job of that name."""
        return self.job == job and self.user_id in (-1, user_id)


def _without_circumstances(begin: Begin) -> Begin:
    return msgspec.structs.replace(begin, begun_unix_s=0.0, nonce="", boot_id="", lease_s=0.0, user_id=-1)


class OutcomeRecord(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: str
    decided_by: str
    unix_s: float


class MoveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All fields that the marks of a move have journalled. The newest value of a field counts."""

    mark: Mark | None = None  # the last one; None: only begun
    marked_unix_s: float = msgspec.field(default=0.0, name="unix_s")

    # source, and target once it holds a copy
    pid: int = 0  # the rank's root process on this node
    start_ticks: int = 0
    cgroup: str = ""
    keeper_role: str = msgspec.field(default="", name="role")  # "home" | "guest"
    stopped_before: list[int] | None = None  # inner pids that a user had stopped before the freeze
    socket_options: SocketOptions = msgspec.field(default_factory=SocketOptions, name="sockets")
    cuda_processes: list[JournalledProcess] = msgspec.field(default_factory=list, name="cuda")
    nccl_processes: list[NcclProcess] = msgspec.field(default_factory=list, name="nccl")
    filtered: bool = False  # a packet filter blocks the rank's connections here

    # source
    nodes: list[ClusterNode] = []
    communicators: dict[str, list[Member]] | None = None  # None: none was taken down
    nccl_instances: list[tuple[int, int]] = []  # inner pid, number of its NCCL library copy
    attached: bool = False  # communicators were built again with the target's copy
    new_connections_held: bool = msgspec.field(default=False, name="newcomers")
    gpu_uses: dict[str, int] = {}  # bytes on each GPU, by UUID
    device_bytes: int = 0
    striped_processes: list[StripedProcess] = msgspec.field(default_factory=list, name="parked")
    offloaded: list[OffloadedMemory] = msgspec.field(default_factory=list, name="device")
    offloaded_bytes: int = msgspec.field(default=0, name="parked_bytes")
    handed_over_bytes: int = 0  # of these: what the target took over on the same GPU, and was not sent
    stdio: dict[str, Any] | None = (
        None  # the rank's stdio (StdioState); a dict, because older versions did not check it
    )
    rewires: list[pb.Rewire] = []
    linked: list[tuple[str, int, int]] = []  # files that criu may make links to: directory, device, inode
    sent_bytes: int = msgspec.field(default=0, name="bytes")
    carried: list[str] = []
    pause_s: float = 0.0
    predicted_s: float = 0.0  # the pause that the driver had predicted
    timing: pb.Timing | None = None  # what the pause consisted of
    failure: str = ""  # what the rank lacks after an undo, or why it was ended

    # target
    gpu_pairs: list[tuple[str, str]] = []  # UUID on the source, UUID here
    gpus_reserved: list[str] = []
    gpus_by_index: bool = False  # the driver restores the rank onto the same indices, and takes no pairs
    user_ids: list[int] = []  # of the rank's processes, as preflight was shown
    placed: list[str] = []  # by older versions: carried files that were made here; they are left as they are
    made: list[tuple[str, int, int]] = []  # carried files that were made here: path, device, inode
    rank_user: tuple[int, int, tuple[int, ...]] | None = None  # user, group and groups with which they are accessed
    ghosts: list[tuple[str, str]] = []  # unlinked files that criu makes: former name, name while it restores
    gates_opened: bool = False
    abandoned: bool = False  # communicators that are down stay down: a member has ended, say. Also of source and gate
    identity: Identity | None = None  # of the rank, as preflight was shown it; None: an older version began the move

    # peer
    socket_timers: list[SocketTimers] = msgspec.field(default_factory=list, name="timers")
    peer_sockets: list[PeerSocket] = msgspec.field(default_factory=list, name="ends")

    # gate
    gate_processes: list[GateProcess] = msgspec.field(default_factory=list, name="processes")

    # job
    participants: list[JobPart] = []
    suspension: str = ""  # the record of the suspension that this one resumes; empty: it is a suspension
    done: list[str] = []  # the moves of participants that have carried out COMMIT: they are not asked again
    gated: bool = False  # gates of the job are, or will be, closed for it; `gates_opened`: no more
    taken_back: str = ""  # why a resumption that was committed is ended: a copy died before it ran

    # source of a snapshot
    continued: bool = False  # the image is complete but for `late`, and the rank goes on
    late: list[tuple[str, int]] = []  # files of the image that are complete later, and their bytes

    # target of a resumption
    from_node: str = ""  # where the rank was when its image was made
    maker: str = ""  # after a rollback: that node, which has signed the image for `snapshot`; empty: none has
    ended_before: str = ""  # the last record by which copies of its job that ran were ended
    tethered: bool = False  # after a rollback: it must end if it is cut off from the coordinator
    replayed_output: str = ""  # after a rollback: what its home keeper does with output that is printed again
    file_policy: str = ""  # after a rollback: what is done with files that were deleted or replaced since the snapshot
    changed_files: list[ChangedFile] = []  # … and what was done
    settled_files: list[tuple[str, list[int]]] = []  # … and those that are as the rank expects them: path and identity

    # job: a rollback
    snapshot: str = ""  # whose images are the job
    ends: str = msgspec.field(default="", name="ends_incarnation")  # the incarnation that may not run any more
    lost_nodes: list[str] = []  # which an operator has declared dead
    lost_s: float | None = None  # the work since the snapshot that was lost; None: unknown
    down_for_s: float = 0.0  # for how long the job had not run when the rollback was decided

    # job: a snapshot
    handed_to: str = ""  # the node that coordinates it now
    adopted_from: str = ""  # the node that coordinated it before
    adopted_unix_s: float = 0.0  # since when this node coordinates it
    quorums: list[list[str]] = []  # the coordinator needs the promises of a majority of each (jobs/lease.py)
    let_go: bool = False  # given up, and a majority knows it: its promises are not needed any more
    fenced: str = ""  # taken over by a lease: this node, which coordinated it before, has ended its ranks

    # a snapshot, and the copies of its images
    asked_copies: int = 0  # of each image, for this job; 0: no number was asked for

    # an image of a snapshot
    successor_node: str = ""  # of its coordinator
    successor_endpoint: str = ""

    # source of a rank that was suspended
    resumed_node: str = ""  # where its image was last sent
    resumed_endpoint: str = ""
    dropped: str = ""  # why its image was dropped: the record that resumed the job, or an operator's reason

    @property
    def root(self) -> Process:
        return Process(self.pid, self.start_ticks)

    @property
    def cuda(self) -> list[Process]:
        return [one.process for one in self.cuda_processes]


class Fields(TypedDict, total=False):
    """The fields that a mark may add: those of MoveRecord except the mark itself. `tests/moves` compares the two."""

    pid: int
    start_ticks: int
    cgroup: str
    keeper_role: str
    stopped_before: list[int] | None
    socket_options: SocketOptions
    cuda_processes: list[JournalledProcess]
    nccl_processes: list[NcclProcess]
    filtered: bool
    nodes: list[ClusterNode]
    communicators: dict[str, list[Member]] | None
    nccl_instances: list[tuple[int, int]]
    attached: bool
    new_connections_held: bool
    gpu_uses: dict[str, int]
    device_bytes: int
    striped_processes: list[StripedProcess]
    offloaded: list[OffloadedMemory]
    offloaded_bytes: int
    handed_over_bytes: int
    stdio: dict[str, Any] | None
    rewires: list[pb.Rewire]
    linked: list[tuple[str, int, int]]
    sent_bytes: int
    carried: list[str]
    pause_s: float
    predicted_s: float
    timing: pb.Timing | None
    failure: str
    gpu_pairs: list[tuple[str, str]]
    gpus_reserved: list[str]
    gpus_by_index: bool
    user_ids: list[int]
    placed: list[str]
    made: list[tuple[str, int, int]]
    rank_user: tuple[int, int, tuple[int, ...]] | None
    ghosts: list[tuple[str, str]]
    gates_opened: bool
    abandoned: bool
    identity: Identity | None
    socket_timers: list[SocketTimers]
    peer_sockets: list[PeerSocket]
    gate_processes: list[GateProcess]
    participants: list[JobPart]
    suspension: str
    done: list[str]
    gated: bool
    taken_back: str
    continued: bool
    late: list[tuple[str, int]]
    from_node: str
    maker: str
    ended_before: str
    tethered: bool
    replayed_output: str
    file_policy: str
    changed_files: list[ChangedFile]
    settled_files: list[tuple[str, list[int]]]
    snapshot: str
    ends: str
    lost_nodes: list[str]
    lost_s: float | None
    down_for_s: float
    handed_to: str
    adopted_from: str
    adopted_unix_s: float
    quorums: list[list[str]]
    asked_copies: int
    let_go: bool
    fenced: str
    successor_node: str
    successor_endpoint: str
    resumed_node: str
    resumed_endpoint: str
    dropped: str


_NAMES_ON_DISK = {field.name: field.encode_name for field in msgspec.structs.fields(MoveRecord)}


def encode_fields(fields: Mapping[str, Any]) -> bytes:
    """One line of the journal, without its newline."""
    return encode({_NAMES_ON_DISK[name]: value for name, value in fields.items()})


def decode_record(merged: dict[str, Any]) -> MoveRecord:
    """Makes a record from fields that have their names on disk. Raises ValueError."""
    if isinstance(count := merged.get("rewires"), int):  # targets of older versions journalled their number
        merged = {**merged, "rewires": [], "filtered": bool(merged.get("filtered") or count)}
    return _convert(merged, MoveRecord)


def encode(value: Any) -> bytes:
    """Encodes as JSON. Does not use msgspec's encoder, which refuses file names that are not UTF-8 (surrogate escapes)."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=_encode_other)).encode()


def decode(content: bytes, wanted: type[T]) -> T:
    """Raises ValueError."""
    try:
        return _convert(json.loads(content), wanted)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _convert(value: Any, wanted: type[T]) -> T:
    return msgspec.convert(value, wanted, str_keys=True, dec_hook=_decode_message)


def _encode_other(value: Any) -> Any:
    """Protobuf messages are journalled in protobuf's own JSON form, subclasses of str as plain text."""
    if isinstance(value, Message):
        return MessageToDict(value, preserving_proto_field_name=True)
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"{type(value)} cannot be journalled")


def _decode_message(wanted: type, value: Any) -> Any:
    if not issubclass(wanted, Message):
        raise TypeError(f"{wanted} cannot be journalled")
    try:
        return ParseDict(value, wanted(), ignore_unknown_fields=True)
    except ParseError as error:
        raise ValueError(str(error)) from error
