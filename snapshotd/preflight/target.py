"""The target's half of preflight: can this node take the rank those facts describe?

Nothing is changed here, nothing is reserved (Prepare does that). The facts come over the wire: every path in them is
only ever looked at, never opened for writing, and what makes no sense is refused.
"""

from __future__ import annotations

import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from snapshotd.api.snapshotd_pb2 import Check, NodeInfo, RankFacts
from snapshotd.preflight import target_files
from snapshotd.preflight.node import KERNEL_ONLY_FLAGS, version_pair
from snapshotd.preflight.processes import criu_check, kernel_check
from snapshotd.preflight.target_gpu import CONDITIONS, GpuOffer
from snapshotd.preflight.verdict import guarded, listed, passed, refused, warned

#: Kept free beside the rank, for the node's own life.
RESERVE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Offer:
    """The facts of a rank held against this node."""

    facts: RankFacts
    node: NodeInfo
    carry_paths: Sequence[str]
    may_replace: Callable[[str], bool]
    restore_factor: float
    gpu: GpuOffer


def examine(
    facts: RankFacts,
    node: NodeInfo,
    *,
    carry_paths: Sequence[str],
    may_replace: Callable[[str], bool] = lambda path: False,
    restore_factor: float = 1.1,
    gpu_wish: str = "",
) -> list[Check]:
    """Verdicts about taking this rank here; never raises. Blocking (files are looked at): for a thread.

    `node` is this node as GetNode answers it. `may_replace` says whether this product itself left a file behind.
    `restore_factor` is how much memory a restore takes at its peak for each byte of the rank, the image included.
    `gpu_wish` is the GPU asked for, as snapshotd/cuda/pairing.py takes it. Of a rank without GPU one check of them is made.
    """
    offer = Offer(facts, node, carry_paths, may_replace, restore_factor, GpuOffer(facts, node, gpu_wish))
    wanted = TARGET_CHECKS | (GPU_CHECKS if facts.HasField("gpu") else {})
    return [guarded(name, check, offer) for name, check in wanted.items()]


def target_node(offer: Offer) -> Check:
    if offer.facts.source_node == offer.node.name:
        return refused(
            "target-node", f"the rank is on {offer.node.name} already", "name another node (`migrator nodes`)"
        )
    return passed("target-node", f"{offer.facts.source_node} → {offer.node.name}")


def daemon_version(offer: Offer) -> Check:
    there, here = offer.facts.daemon_version, offer.node.version
    pair = version_pair(there)
    if there != here and (pair is None or pair != version_pair(here)):
        return refused(
            "daemon-version",
            f"snapshotd {there} on the source, {here} here",
            "install the same version on both nodes (ranks keep running while a daemon restarts)",
        )
    return passed("daemon-version", f"snapshotd {here}")


def architecture(offer: Offer) -> Check:
    if offer.facts.architecture != offer.node.architecture:
        return refused(
            "architecture",
            f"{offer.facts.architecture} on the source, {offer.node.architecture} here",
            "choose a node of the same architecture",
        )
    return passed("architecture", offer.node.architecture)


def cpu_features(offer: Offer) -> Check:
    """A program asks once what the CPU can do and never again: the target must be able to do all of it."""
    missing = sorted(set(offer.facts.cpu_features) - set(offer.node.cpu_features) - KERNEL_ONLY_FLAGS)
    if missing:
        return refused(
            "cpu-features",
            f"the source's CPU has, and this one lacks: {listed(missing, 12)}",
            "choose a node with the same or a newer CPU",
        )
    return passed("cpu-features", f"all {len(offer.facts.cpu_features)} of the source's")


def target_kernel(offer: Offer) -> Check:
    check = kernel_check("target-kernel")
    if check.verdict == Check.PASS and offer.facts.kernel != offer.node.kernel:
        return warned(
            "target-kernel",
            f"Linux {offer.facts.kernel} on the source, {offer.node.kernel} here",
            "usually fine; run the same kernel on all nodes to be sure",
        )
    return check


def target_criu(offer: Offer) -> Check:
    there, here = offer.facts.criu_version, offer.node.criu_version
    check = criu_check("target-criu", here)
    if check.verdict == Check.PASS and version_pair(there) != version_pair(here):
        return refused(
            "target-criu", f"CRIU {there} on the source, {here} here", "install the same CRIU version on both nodes"
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
            f"no user here has the id {listed(unknown)}",
            "the rank keeps its numeric id; add the user if it looks itself up",
        )
    return passed("users", f"{len(offer.facts.user_ids)} known")


def files(offer: Offer) -> Check:
    return target_files.files("files", offer.facts)


def carried_files(offer: Offer) -> Check:
    return target_files.carried_files("carried-files", offer.facts, offer.carry_paths, offer.may_replace)


def directories(offer: Offer) -> Check:
    return target_files.directories("directories", offer.facts, offer.carry_paths)


def memory(offer: Offer) -> Check:
    parked = min(offer.facts.gpu.offloaded_bytes, offer.facts.memory_bytes)  # in stripes, of which nothing is restored
    restored = int((offer.facts.memory_bytes - parked) * offer.restore_factor)
    wanted = restored + parked + offer.facts.carried_bytes + RESERVE_BYTES
    free = offer.node.memory_available_bytes
    if free < wanted:
        return refused(
            "memory",
            f"{_mib(wanted)} are needed to restore, {_mib(free)} are free",
            "free memory here, or choose another node",
        )
    return passed("memory", f"{_mib(free)} free, {_mib(wanted)} needed")


def image_room(offer: Offer) -> Check:
    wanted = offer.facts.memory_bytes + offer.facts.carried_bytes
    free = max(0, offer.node.image_capacity_bytes - offer.node.image_held_bytes)
    if free < wanted:
        return refused(
            "image-room",
            f"the image takes up to {_mib(wanted)}, the image store has room for {_mib(free)}",
            "wait for other moves to end, or enlarge the tmpfs that holds image_dir",
        )
    return passed("image-room", f"{_mib(free)} free, {_mib(wanted)} needed")


def gpu_check(name: str, offer: Offer) -> Check:
    return offer.gpu.check(name)


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes >> 20)} MiB"


#: name -> check, in the order a person reads them. Every name is described in the package's docstring.
TARGET_CHECKS: dict[str, Callable[[Offer], Check]] = {
    "target-node": target_node,
    "daemon-version": daemon_version,
    "architecture": architecture,
    "cpu-features": cpu_features,
    "target-kernel": target_kernel,
    "target-criu": target_criu,
    "users": users,
    "files": files,
    "carried-files": carried_files,
    "directories": directories,
    "memory": memory,
    "image-room": image_room,
    "gpu-present": partial(gpu_check, "gpu-present"),
}

#: More, for ranks that use a GPU.
GPU_CHECKS: dict[str, Callable[[Offer], Check]] = {
    name: partial(gpu_check, name) for name in CONDITIONS if name not in TARGET_CHECKS
}
