"""Defines the parts of a move's record that have fields of their own: processes, sockets, members, ranks of a job.

What snapshotd/moves/record.py says about names on disk is true of them as well. No I/O here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net.flows import Address, Holder, Pair
from snapshotd.net.options import Kept
from snapshotd.net.timers import Timers
from snapshotd.proc.tree import Process


class JournalledProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process on this node. Its start time distinguishes it from a later process with the same pid."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, process: Process) -> JournalledProcess:
        return cls(process.pid, process.start_ticks)

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)


class NcclProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process whose communicators were taken down."""

    pid: int
    start_ticks: int
    instance: int  # number of the NCCL library copy it was dumped with

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)


class StripedProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process whose device memory is to be offloaded into these stripe files."""

    pid: int
    start_ticks: int
    stripes: list[str]
    slot_bytes: int
    held: bool = False  # the files are rings: the holder keeps the memory itself
    taken_over: bool = False  # … and the target may have it as well, on the same GPU

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)


class OffloadedMemory(msgspec.Struct, frozen=True):
    """Device memory of one process that is in stripe files, not on a GPU."""

    pid: int  # in the rank's own pid namespace
    stripes: list[str]
    bytes: list[int]  # of each stripe
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes)


class ClusterNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of the cluster, as the driver named it."""

    name: str
    endpoint: str
    addresses: list[str]
    interfaces: list[str] = []  # of each address
    networks: dict[str, str] = {}  # of cluster.toml: name of a network -> the node's address there

    @classmethod
    def of(cls, node: pb.NodeAddresses) -> ClusterNode:
        return cls(node.name, node.endpoint, list(node.addresses), list(node.interfaces), dict(node.networks))

    def to_proto(self) -> pb.NodeAddresses:
        return pb.NodeAddresses(
            name=self.name,
            endpoint=self.endpoint,
            addresses=self.addresses,
            interfaces=self.interfaces,
            networks=self.networks,
        )

    def to_list(self) -> list[Any]:
        """As the registry of ranks stores it."""
        return [self.name, self.endpoint, self.addresses]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One member of a communicator: the process that has `rank` in it."""

    node: str
    rank_uid: str
    pid: int  # in the rank's own pid namespace
    rank: int

    def at(self, node: str) -> Member:
        return msgspec.structs.replace(self, node=node)


class GateProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process behind a closed gate."""

    rank_uid: str
    rank: int
    inner_pid: int
    pid: int
    start_ticks: int

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)


class SocketTimers(msgspec.Struct, frozen=True):
    """The time-outs of one connection, before they were switched off."""

    inode: int
    holders: list[tuple[int, int, int]]  # pid, start ticks, descriptor
    pid_inside: int
    fd: int
    user_timeout_ms: int
    keepalive: bool

    @property
    def descriptors(self) -> list[Holder]:
        return [Holder(*numbers) for numbers in self.holders]

    @property
    def timers(self) -> Timers:
        return Timers(self.user_timeout_ms, self.keepalive)


class SocketOptions(msgspec.Struct, frozen=True):
    """The options and time-outs of the rank's sockets that criu does not carry."""

    options: list[Kept] = []
    timers: list[SocketTimers] = []
    reset: list[
        tuple[int, int]
    ] = []  # inner pid and descriptor of connections whose reset the rank has not noticed yet
    reuse_address: list[int] = []  # inodes of connections with SO_REUSEADDR, which a criu that is killed resets


class ImageCopy(msgspec.Struct, frozen=True):
    """A copy of a rank's image, on the node of a buddy."""

    move: str
    node: str
    endpoint: str


class JobPart(msgspec.Struct, frozen=True):
    """One rank of a job that is suspended or resumed."""

    rank_uid: str
    rank: int
    move: str
    node: str
    endpoint: str
    image: str = ""  # of a resumption: the rank's move in the suspension, and the node that has its image
    image_node: str = ""
    image_endpoint: str = ""
    incarnation: str = ""  # of a snapshot: that of the rank's process
    copy: str = ""  # of a snapshot: the first buddy's copy of the image
    copy_node: str = ""
    copy_endpoint: str = ""
    home_node: str = ""  # of a resumption: the node of its home keeper
    home_endpoint: str = ""
    more_copies: tuple[ImageCopy, ...] = ()  # of a snapshot: those of further buddies
    made_on: str = ""  # of a snapshot: the node that has made the image, and signs it; empty: it does not sign

    @classmethod
    def of(cls, part: pb.Participant) -> JobPart:
        more = tuple(ImageCopy(one.move, one.node, one.endpoint) for one in part.more_copies)
        names = [name for name in cls.__struct_fields__ if name != "more_copies"]
        return cls(**{name: getattr(part, name) for name in names}, more_copies=more)

    def to_proto(self) -> pb.Participant:
        more = [pb.ImageCopy(**msgspec.structs.asdict(one)) for one in self.more_copies]
        return pb.Participant(**{**msgspec.structs.asdict(self), "more_copies": more})

    @property
    def copies(self) -> tuple[ImageCopy, ...]:
        """All copies of the image, that of the first buddy first."""
        first = ImageCopy(self.copy, self.copy_node, self.copy_endpoint)
        return (first, *self.more_copies) if self.copy else self.more_copies


class PeerSocket(msgspec.Struct, frozen=True):
    """The peer's socket of one connection of the rank. Pairs are (local, remote) as this socket has them."""

    inode: int
    holders: list[tuple[int, int, int]]  # pid, start ticks, descriptor
    own: tuple[str, str]  # as the socket names it; a forwarded one by a former address
    old: tuple[str, str]
    new: tuple[str, str]

    @property
    def descriptors(self) -> tuple[Holder, ...]:
        return tuple(Holder(*numbers) for numbers in self.holders)

    @property
    def pairs(self) -> list[Pair]:
        """Every pair of addresses that packets of this connection may have here."""
        return [parse_pair(texts) for texts in (self.own, self.old, self.new)]


def parse_pair(texts: tuple[str, str]) -> Pair:
    return Address.parse(texts[0]), Address.parse(texts[1])
