"""The target's part of preflight: whether this node can run the rank that the facts describe.

Nothing is changed and nothing is reserved (Prepare does that). The facts come from another node: paths in them are
examined but never opened for writing, and invalid ones are refused.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from snapshotd.api import protocol
from snapshotd.api.snapshotd_pb2 import Check, NodeInfo, RankFacts
from snapshotd.api.version import version_pair
from snapshotd.files.user_look import UserLook
from snapshotd.preflight import target_files
from snapshotd.preflight.arriving import Arriving, arriving, stays_bytes
from snapshotd.preflight.node import KERNEL_ONLY_FLAGS
from snapshotd.preflight.process_checks import criu_check, kernel_check
from snapshotd.preflight.target_files import Changes, MayReplace, user_of
from snapshotd.preflight.target_gpu import CONDITIONS, GpuOffer
from snapshotd.preflight.verdict import guarded, listed, passed, refused, warned
from snapshotd.proc import cgroup, cgroup_limits
from snapshotd.proc import priorities as process_priorities
from snapshotd.proc.priorities import Priorities
from snapshotd.proc.room import RESERVE_BYTES

#: Has a file for each RDMA device that programs may use.
RDMA_FOLDER = Path("/dev/infiniband")


@dataclass(frozen=True)
class Offer:
    """The facts about a rank, and this node."""

    facts: RankFacts
    node: NodeInfo
    carry_paths: Sequence[str]
    may_replace: MayReplace
    restore_factor: float
    gpu: GpuOffer
    look: UserLook
    allow_root: bool = False
    memory_id: str = ""
    holds: bool = False
    changed_files: str = ""
    disk_bytes: int = 0

    @property
    def arriving(self) -> Arriving:
        return arriving(self.facts, holds=self.holds)

    @property
    def changes(self) -> Changes:
        """Which files the restore puts back, or leaves as they are."""
        if self.changed_files in ("", "refuse"):
            return Changes.NONE
        return Changes.HERE if self.facts.source_node == self.node.name else Changes.SHARED


def examine(
    facts: RankFacts,
    node: NodeInfo,
    *,
    carry_paths: Sequence[str],
    may_replace: MayReplace = lambda path, seen: False,
    restore_factor: float = 1.1,
    gpu_wish: str = "",
    allow_root: bool = False,
    memory_id: str = "",
    resumes: bool = False,
    holds: bool = False,
    changed_files: str = "",
    disk_bytes: int = 0,
) -> list[Check]:
    """Verdicts about moving this rank here; never raises. Blocking (it examines files): run it in a thread.

    `node` is this node as GetNode returns it. `may_replace` tells whether a file was left behind by an earlier move.
    `restore_factor` is the peak memory of a restore for each byte of the rank, including the image. `gpu_wish` is the
    requested GPU, in the form that snapshotd/cuda/pairing.py accepts. A rank without a GPU gets only one GPU check.
    `allow_root` is the node's policy for ranks of root. `memory_id` is this node's; the source may share it.
    `resumes`: the rank is suspended, and has no process. `holds`: memory on the GPU is filled while it arrives.
    `changed_files`: as in PrepareRequest; then files that were open for writing may have changed. `disk_bytes`: room on a
    disk, for an image that has none in memory.
    """
    wanted = TARGET_CHECKS | (GPU_CHECKS if facts.HasField("gpu") else {})
    gpu = GpuOffer(facts, node, gpu_wish, resumes)
    with UserLook(user_of(facts)) as look:
        policies = (allow_root, memory_id, holds, changed_files, disk_bytes)
        offer = Offer(facts, node, carry_paths, may_replace, restore_factor, gpu, look, *policies)
        return [guarded(name, check, offer) for name, check in wanted.items()]


def target_node(offer: Offer) -> Check:
    if offer.facts.source_node == offer.node.name:
        return refused(
            "target-node",
            f"the rank is already on {offer.node.name}",
            "choose another node (`migrator nodes` lists them)",
        )
    return passed("target-node", f"{offer.facts.source_node} → {offer.node.name}")


def daemon_version(offer: Offer) -> Check:
    facts, node = offer.facts, offer.node
    there, here = f"snapshotd {facts.daemon_version} on the source", f"snapshotd {node.version} on {node.name}"
    return protocol.check(there, facts.protocol, here, node.protocol)


def architecture(offer: Offer) -> Check:
    if offer.facts.architecture != offer.node.architecture:
        return refused(
            "architecture",
            f"the source is {offer.facts.architecture}, {offer.node.name} is {offer.node.architecture}",
            "choose a node with the same architecture",
        )
    return passed("architecture", offer.node.architecture)


def cpu_features(offer: Offer) -> Check:
    """A program detects the CPU's features once, at start: the target must have all of them."""
    missing = sorted(set(offer.facts.cpu_features) - set(offer.node.cpu_features) - KERNEL_ONLY_FLAGS)
    if missing:
        return refused(
            "cpu-features",
            f"the CPU of {offer.node.name} lacks features that the source's has: {listed(missing, 12)}",
            "choose a node with the same or a newer CPU",
        )
    return passed("cpu-features", f"all {len(offer.facts.cpu_features)} of the source's")


def target_kernel(offer: Offer) -> Check:
    check = kernel_check("target-kernel")
    if check.verdict == Check.PASS and offer.facts.kernel != offer.node.kernel:
        return warned(
            "target-kernel",
            f"the kernel is Linux {offer.facts.kernel} on the source and {offer.node.kernel} on {offer.node.name}",
            "this usually works; to be sure, run the same kernel on all nodes",
        )
    return check


def target_criu(offer: Offer) -> Check:
    there, here = offer.facts.criu_version, offer.node.criu_version
    check = criu_check("target-criu", here)
    if check.verdict == Check.PASS and version_pair(there) != version_pair(here):
        return refused(
            "target-criu",
            f"CRIU is {there} on the source and {here} on {offer.node.name}",
            "install the same CRIU version on both nodes",
        )
    return check


def users(offer: Offer) -> Check:
    unknown = []
    for user_id in offer.facts.user_ids:
        try:
            pwd.getpwuid(user_id)
        except (KeyError, OverflowError):
            unknown.append(str(user_id))
    if unknown:
        return warned(
            "users",
            f"{offer.node.name} has no user with the id {listed(unknown)}",
            "the rank keeps its numeric id; add the user if the program looks up its own name",
        )
    return passed("users", f"{len(offer.facts.user_ids)} known")


def root_rank(offer: Offer) -> Check:
    """A node that sends a rank could make up its user, so a node receives ranks of root only if its operator allows it."""
    if 0 in offer.facts.user_ids and not offer.allow_root:
        return refused("root-rank", f"the rank runs as root, which {offer.node.name} does not allow", ROOT_REMEDY)
    return passed("root-rank", "as root, which is allowed" if 0 in offer.facts.user_ids else "not root")


ROOT_REMEDY = (
    "run the job as a user, or set `allow_root_ranks = true` in snapshotd.toml on every node that may receive it"
)


def files(offer: Offer) -> Check:
    return target_files.files("files", offer.facts, offer.look, offer.changes)


def carried_files(offer: Offer) -> Check:
    paths, may_replace = offer.carry_paths, offer.may_replace
    return target_files.carried_files("carried-files", offer.facts, paths, may_replace, offer.look, offer.changes)


def closed_room(offer: Offer) -> Check:
    """The carry path itself is an administrator's directory: it is safe to look at."""
    for root, wanted in offer.facts.closed_bytes.items():
        if root not in {path.rstrip("/") for path in offer.carry_paths}:
            continue  # such files stay behind
        storage = os.statvfs(root)
        free = storage.f_bavail * storage.f_frsize
        if free < wanted:
            return refused(
                "closed-room",
                f"the rank's closed files below {root} have {_mib(wanted)}, {offer.node.name} has {_mib(free)} free there",
                f"free space below {root} on {offer.node.name}, or choose another node",
            )
    return passed("closed-room", f"{_mib(sum(offer.facts.closed_bytes.values()))} needed")


def directories(offer: Offer) -> Check:
    return target_files.directories("directories", offer.facts, offer.carry_paths, offer.look)


def memory(offer: Offer) -> Check:
    comes = offer.arriving
    restored = int(comes.image_bytes * offer.restore_factor)
    wanted = restored + comes.stripes_bytes + offer.facts.carried_bytes + RESERVE_BYTES
    shared = ""
    if offer.memory_id and offer.facts.memory_id == offer.memory_id and offer.facts.gpu.device_bytes:
        source_bytes = stays_bytes(offer.facts) + RESERVE_BYTES
        wanted += source_bytes
        shared = f", including {_mib(source_bytes)} on the source, which shares the memory of this machine"
    free = offer.node.memory_available_bytes
    if free < wanted:
        return refused(
            "memory",
            f"the restore needs {_mib(wanted)} of memory{shared}; {offer.node.name} has {_mib(free)} free",
            f"free memory on {offer.node.name}, or choose another node",
        )
    return passed("memory", f"{_mib(free)} free, {_mib(wanted)} needed")


def limits(offer: Offer) -> Check:
    """The limits of the job's cgroups move with the rank: otherwise a user would be rid of them by a move."""
    wanted = dict(offer.facts.limits)
    impossible = cgroup_limits.unenforceable(wanted, cgroup_limits.available(cgroup.for_guests())) if wanted else []
    if impossible:
        return refused(
            "cgroup-limits",
            f"{offer.node.name} cannot set these limits of the rank's cgroups: {listed(impossible)}",
            f"on {offer.node.name}, enable their controllers for the slice of snapshotd.service; see operations",
        )
    return passed("cgroup-limits", ", ".join(f"{name} {value}" for name, value in sorted(wanted.items())) or "none")


def priorities(offer: Offer) -> Check:
    """A restore sets them as root, so a user would get them by a move without an administrator's grant."""
    if not offer.facts.HasField("priorities"):
        return passed("priorities", "those of root")
    held, node = offer.facts.priorities, offer.node.name
    has = Priorities(held.nice, held.realtime, dict(held.limits))
    if beyond := process_priorities.beyond(has, process_priorities.granted()):
        return refused("priorities", f"the rank has more than {node} grants: {', '.join(beyond)}", PRIORITIES_REMEDY)
    if held.oom_score_adj < 0:
        return warned(
            "priorities",
            f"the rank's OOM score adjustment is {held.oom_score_adj}; on {node} it will be 0",
            "have an administrator set it again after the move (choom), if the rank should be spared",
        )
    return passed("priorities", f"nice {has.nice}" + (f", real-time {has.realtime}" if has.realtime else ""))


PRIORITIES_REMEDY = (
    "lower them on the source (as root: renice, chrt --other, prlimit), or grant them on the target: LimitNICE=,"
    " LimitRTPRIO=, LimitMEMLOCK=, LimitNOFILE=, LimitNPROC= … of snapshotd.service"
)


def image_room(offer: Offer) -> Check:
    wanted = offer.arriving.all_bytes + offer.facts.carried_bytes
    free = max(0, offer.node.image_capacity_bytes - offer.node.image_held_bytes)
    if free < wanted <= offer.disk_bytes:
        return passed("image-room", f"{_mib(free)} free in memory, {_mib(wanted)} needed: the image goes to the disk")
    if free < wanted:
        return refused(
            "image-room",
            f"the image needs up to {_mib(wanted)}, the image store of {offer.node.name} has {_mib(free)} free",
            f"wait for other moves to end, or enlarge the tmpfs that holds image_dir on {offer.node.name}",
        )
    return passed("image-room", f"{_mib(free)} free, {_mib(wanted)} needed")


def target_rdma(offer: Offer) -> Check:
    """NCCL chooses its network by itself, and a member without an RDMA device would choose another one than the others."""
    used, node = list(offer.facts.nccl_rdma), offer.node.name
    if not used:
        return passed("target-rdma", "NCCL has no RDMA device open")
    found = sorted(path.name for path in RDMA_FOLDER.glob("uverbs*"))
    if not found:
        return refused(
            "target-rdma",
            f"NCCL in the rank uses RDMA devices ({listed(used)}), and {node} has none: its communicators could not be built"
            " there",
            "choose a node with InfiniBand or RoCE, or start the job with NCCL_IB_DISABLE=1",
        )
    return passed("target-rdma", f"{len(found)} devices")


def gpu_check(name: str, offer: Offer) -> Check:
    return offer.gpu.check(name)


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes >> 20)} MiB"


#: name -> check, in the order of the output. Every name is described in the package's docstring.
TARGET_CHECKS: dict[str, Callable[[Offer], Check]] = {
    "target-node": target_node,
    "daemon-version": daemon_version,
    "architecture": architecture,
    "cpu-features": cpu_features,
    "target-kernel": target_kernel,
    "target-criu": target_criu,
    "users": users,
    "root-rank": root_rank,
    "priorities": priorities,
    "files": files,
    "carried-files": carried_files,
    "closed-room": closed_room,
    "directories": directories,
    "memory": memory,
    "image-room": image_room,
    "cgroup-limits": limits,
    "target-rdma": target_rdma,
    "gpu-present": partial(gpu_check, "gpu-present"),
}

#: Additional checks for ranks that use a GPU.
GPU_CHECKS: dict[str, Callable[[Offer], Check]] = {
    name: partial(gpu_check, name) for name in CONDITIONS if name not in TARGET_CHECKS
}
