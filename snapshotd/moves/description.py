"""Defines the description of an image: what the target needs beside criu's own files to restore a rank.

The source sends it as meta.json, after all other files. Daemons of other versions read its keys: a field that is renamed
here keeps its name in the file, and a new one has a default, except the rank's identity.
"""

from __future__ import annotations

import msgspec

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Where
from snapshotd.keepers.stdio_state import StdioState
from snapshotd.moves import record
from snapshotd.moves.record_parts import ClusterNode, OffloadedMemory, SocketOptions
from snapshotd.moves.tree_facts import TreeFacts
from snapshotd.proc.credentials import Identity

FILE = "meta.json"
#: The stdio state may have 48 MiB; the rest is small, except the facts about very many files.
MAX_BYTES = 128 << 20


class ImageDescription(msgspec.Struct, frozen=True, kw_only=True):
    # the tree; pids are those of the rank's own pid namespace
    root: int
    command: str
    started_unix_s: float
    moves: int
    user_id: int  # of its keeper
    identity: Identity  # of its root process; no default
    limits: dict[str, str] = {}  # of its cgroups, as snapshotd/proc/cgroup_limits.py reads them
    stopped_before: list[int]
    affinity: dict[int, list[int]]  # CPUs of each thread, which criu does not carry
    cpus: list[int]  # all CPUs of the source
    gpus: list[str] = []  # UUIDs of the GPUs that the rank uses there
    gpu_cpus: list[int] = []  # the CPUs near them; empty: not known
    carried: list[pb.FileFact]
    other_names: dict[str, str]  # of files whose own name was removed
    new_files: list[pb.FileFact] = []  # mapped since preflight: the target has not compared them yet
    #: Processes whose image leaves out pages (snapshotd/criu/below.py): how often pages were sent before; 0: its parent's.
    below: dict[int, int] = {}
    kept: str = (
        ""  # of a snapshot: the move for which its node keeps descriptors of files (snapshotd/moves/kept_files.py)
    )
    tree: TreeFacts | None = None  # None: from a daemon that does not know it yet; a target refuses that

    # its keeper
    stdio: StdioState
    relay_key: str
    relay_keys: list[str] = []  # for its home node (snapshotd/keepers/relay_keys.py); empty: `relay_key`
    home_node: str
    home_endpoint: str
    home_boot_id: str = ""
    incarnation: str = ""  # of its job, and the coordinator that may end it
    coordinator_node: str = ""
    coordinator_endpoint: str = ""
    tethered: bool = False

    # its connections
    rewires: list[pb.Rewire]
    nodes: list[ClusterNode]
    former: list[tuple[str, str]]  # former and present address of each listener
    socket_options: SocketOptions = msgspec.field(name="sockets")

    # its device memory and communicators
    cuda_pids: list[int] = msgspec.field(name="cuda")
    checkpoint_bytes: int = msgspec.field(name="device_bytes")  # device memory that the CUDA driver carries
    nccl_instances: list[tuple[int, int]] = msgspec.field(name="nccl")  # pid, number of its NCCL library copy
    offloaded: list[OffloadedMemory] = msgspec.field(default_factory=list, name="device")
    by_device_channel: bool = msgspec.field(default=False, name="device_beside")  # stripes do not come with the image

    def encode(self) -> bytes:
        return record.encode(self)


def decode(content: bytes) -> ImageDescription:
    """Raises Damaged. Blocking: it may have many megabytes."""
    try:
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
        return record.decode(content, ImageDescription)
    except ValueError as error:
        raise Damaged(f"the description of the image cannot be read: {error}", where=Where.SOURCE_FROZEN) from error
