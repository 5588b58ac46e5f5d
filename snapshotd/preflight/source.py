"""The source's part of preflight: one inspection of a running rank, all checks on it, and the facts that the target needs.

Nothing is paused or changed. The rank keeps running, so what is found may change a moment later: the few things that would
break a move are checked again after the freeze (after_freeze.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from snapshotd.api import protocol
from snapshotd.api.snapshotd_pb2 import Check, Rank, RankFacts
from snapshotd.inprocess import devmem, shimctl
from snapshotd.preflight import (
    file_checks,
    gpu_checks,
    gpu_shim_checks,
    nccl_checks,
    nccl_host,
    process_checks,
    rdma_checks,
    resource_checks,
    socket_checks,
)
from snapshotd.preflight.inspection import Inspection, examined
from snapshotd.preflight.node import program_cpu_features
from snapshotd.preflight.reports import DriverReport, NcclReports
from snapshotd.preflight.survey import add_digests
from snapshotd.preflight.verdict import passed, refusals
from snapshotd.proc import cgroup, cgroup_limits, host, oom_score, priorities, privileges
from snapshotd.proc.credentials import Identity
from snapshotd.transport.device import ring

#: How long preflight may spend on digests of files whose content the target may have to compare.
DIGEST_SECONDS = 5.0

#: name -> check, in the order of the output. Every name is described in the package's docstring.
SOURCE_CHECKS: dict[str, Callable[[Inspection], Check]] = {
    "rank-alive": process_checks.rank_alive,
    "keeper": process_checks.keeper,
    "credentials": process_checks.credentials,
    "kernel": process_checks.kernel,
    "criu": process_checks.criu,
    "process-tree": process_checks.process_tree,
    "session": process_checks.session,
    "tracing": process_checks.tracing,
    "stopped": process_checks.stopped,
    "file-systems": process_checks.file_systems,
    "namespaces": process_checks.namespaces,
    "root-directory": process_checks.root_directory,
    "security-label": process_checks.security_label,
    "open-files": file_checks.open_files,
    "deleted-files": file_checks.deleted_files,
    "node-local-files": file_checks.node_local_files,
    "file-locks": process_checks.file_locks,
    "gpu-descriptors": gpu_checks.descriptors,
    "devices": resource_checks.devices,
    "rdma": rdma_checks.rdma,
    "terminals": resource_checks.terminals,
    "io-uring": resource_checks.io_uring,
    "kernel-objects": resource_checks.kernel_objects,
    "pipes": resource_checks.pipes,
    "unix-sockets": socket_checks.unix_sockets,
    "other-sockets": socket_checks.other_sockets,
    "shared-memory": resource_checks.shared_memory,
    "sysv-memory": resource_checks.sysv_memory,
    "huge-pages": resource_checks.huge_pages,
    "async-io": resource_checks.async_io,
    "nccl-static": nccl_checks.static,
}


#: The same for ranks that use CUDA.
GPU_CHECKS: dict[str, Callable[[Inspection, DriverReport], Check]] = {
    "gpu-driver": gpu_checks.driver,
    "gpu-mig": lambda rank, gpu: gpu_checks.mig(rank, gpu, gpu_shim_checks.visible_devices(rank, gpu, shimctl)),
    "gpu-mps": gpu_checks.mps,
    "gpu-managed-memory": lambda rank, gpu: gpu_shim_checks.managed_memory(rank, gpu, shimctl),
    "gpu-ipc": lambda rank, gpu: gpu_shim_checks.ipc(rank, gpu, shimctl),
    "gpu-profiler": gpu_checks.profiler,
    "gpu-parking": lambda rank, gpu: gpu_shim_checks.parking(rank, gpu, shimctl),
    "gpu-device-memory": lambda rank, gpu: gpu_shim_checks.device_memory(rank, gpu, shimctl),
    "gpu-host-memory": lambda rank, gpu: gpu_checks.host_memory(
        rank,
        gpu,
        gpu_shim_checks.offloaded_bytes(rank, gpu, shimctl),
        ring.memory_bytes(gpu_shim_checks.held_stripes(rank, gpu, shimctl)),
    ),
}


#: The same for what the shims report about communicators.
NCCL_CHECKS: dict[str, Callable[[Inspection, NcclReports], Check]] = {
    "nccl": nccl_checks.communicators,
    "nccl-environment": nccl_checks.environment,
    "nccl-host-id": nccl_host.host_id,
}


def look_at_place(rank: Inspection) -> list[Check]:
    """The checks of where the processes are. If one refuses, the others must not run: they would look up the rank's paths as
    root, among mounts that a user has made."""
    served = examined("file-systems", SOURCE_CHECKS["file-systems"], rank)
    if served.verdict == Check.REFUSE:
        return [served]
    return [served, *(examined(name, SOURCE_CHECKS[name], rank) for name in ("namespaces", "root-directory"))]


def inspect_rank(
    pids: Sequence[int],
    root_pid: int,
    *,
    rank: Rank,
    node: str,
    daemon_version: str,
    criu_version: str,
    carry_paths: Sequence[str],
    keeper_pid: int,
    keeper_is_guest: bool,
    gpu: DriverReport | None = None,
    nccl: NcclReports | None = None,
    digest_seconds: float = DIGEST_SECONDS,
    holds: bool = False,
) -> tuple[RankFacts, list[Check]]:
    """Facts and verdicts about a running rank; never raises. Blocking: run it in a thread.

    `pids` are all processes of the rank's cgroup, numbered as in the daemon's pid namespace. `keeper_pid` 0 means that the
    rank has no keeper. `keeper_is_guest` means that this product made the keeper's pid and mount namespaces. `gpu` is the
    driver's report, None if none of these processes holds CUDA; `nccl` is what the shims report about communicators.
    `holds`: device memory that the shim can hand over stays on its GPU until it is sent.
    """
    facts = RankFacts(
        source_node=node, daemon_version=daemon_version, protocol=protocol.own(), criu_version=criu_version
    )
    facts.rank.CopyFrom(rank)
    where = (pids, root_pid, carry_paths, keeper_pid, keeper_is_guest)
    seen = Inspection(*where, criu_version, gpu, nccl, holds=holds)
    alive = examined("rank-alive", process_checks.rank_alive, seen)
    if alive.verdict == Check.REFUSE:
        return facts, [alive]
    place = look_at_place(seen)
    if refusals(place):
        return facts, [alive, *place]
    checks = [examined(name, check, seen) for name, check in SOURCE_CHECKS.items()]
    if gpu is not None:
        checks += [examined(name, check, seen, gpu) for name, check in GPU_CHECKS.items()]
    if nccl is not None:
        checks += [examined(name, check, seen, nccl) for name, check in NCCL_CHECKS.items()]
    gathered = examined("facts", _fill, seen, facts, digest_seconds)
    return facts, [*checks, gathered]


def _fill(seen: Inspection, filled: RankFacts, digest_seconds: float) -> Check:
    facts = RankFacts()  # a process that ends meanwhile makes this start again
    facts.architecture = host.architecture()
    facts.kernel = host.kernel()
    facts.cpu_features.extend(program_cpu_features())
    facts.files.extend(seen.survey.facts)
    facts.directories.extend(seen.survey.directories)
    facts.carried_bytes = seen.survey.carried_bytes
    facts.memory_bytes = file_checks.image_bytes(seen)
    if seen.gpu is not None:
        offloaded_bytes = gpu_shim_checks.offloaded_bytes(seen, seen.gpu, shimctl)
        visible = gpu_shim_checks.visible_devices(seen, seen.gpu, shimctl)
        facts.gpu.CopyFrom(gpu_checks.facts_of(seen, seen.gpu, visible, offloaded_bytes))
        facts.gpu.held_stripes = gpu_shim_checks.held_stripes(seen, seen.gpu, shimctl)
        facts.gpu.slot_bytes = devmem.SLOT_BYTES
        if gpu_shim_checks.shares(seen, seen.gpu, shimctl):
            facts.protocol.oldest = protocol.SHARED_DEVICE_MEMORY  # an older daemon could not open it again
        facts.memory_bytes += facts.gpu.device_bytes  # in the image or in stripes when CRIU starts
    facts.nccl_rdma.extend(rdma_checks.nccl_devices(seen))
    facts.processes = len(seen.tree.alive)
    facts.threads = sum(process.threads for process in seen.tree.alive)
    facts.identity.CopyFrom(Identity.of(seen.root_pid).to_proto())
    facts.limits.update(cgroup_limits.read(cgroup.of_process(seen.root_pid), cgroup.mount_point()))
    _add_priorities(facts, [process.pid for process in seen.tree.alive])
    facts.user_ids.extend(sorted({process.user_id for process in seen.tree.alive}))
    add_digests(facts.files, seen.survey.held, digest_seconds)
    filled.MergeFrom(facts)
    return passed("facts", f"{len(facts.files)} files, {facts.threads} threads, {facts.memory_bytes >> 20} MiB")


def _add_priorities(facts: RankFacts, pids: Sequence[int]) -> None:
    """Of the processes that are not root's, which could give themselves any."""
    users = [pid for pid in pids if not (0 in (who := privileges.read(pid)).all_user_ids or who.capabilities)]
    if not users:
        return
    has = priorities.highest(priorities.read(pid) for pid in users)
    facts.priorities.nice, facts.priorities.realtime = has.nice, has.realtime
    facts.priorities.limits.update(has.limits)
    facts.priorities.oom_score_adj = min(oom_score.read(pid) for pid in users)
