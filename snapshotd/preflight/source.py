"""The source's half of preflight: one look at a running rank, all checks over it, and the facts the target needs.

Nothing is paused or changed. The rank goes on meanwhile, so what is seen may be over a moment later: the few things
that would break a move are looked at again after the freeze (after_freeze.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from snapshotd.api.snapshotd_pb2 import Check, Rank, RankFacts
from snapshotd.inprocess import shimctl
from snapshotd.preflight import connections, contents, inside, processes, resources
from snapshotd.preflight import gpu as gpus
from snapshotd.preflight import nccl as nccls
from snapshotd.preflight.contents import image_bytes
from snapshotd.preflight.files import add_digests
from snapshotd.preflight.gpu import GpuLook, facts_of
from snapshotd.preflight.look import Look
from snapshotd.preflight.nccl import NcclLook
from snapshotd.preflight.node import architecture, cpu_features, kernel_release
from snapshotd.preflight.verdict import guarded, passed

#: How long preflight may read files whose content the target may have to compare.
DIGEST_SECONDS = 5.0

#: name -> check, in the order a person reads them. Every name is described in the package's docstring.
SOURCE_CHECKS: dict[str, Callable[[Look], Check]] = {
    "rank-alive": processes.rank_alive,
    "keeper": processes.keeper,
    "kernel": processes.kernel,
    "criu": processes.criu,
    "process-tree": processes.process_tree,
    "session": processes.session,
    "tracing": processes.tracing,
    "stopped": processes.stopped,
    "namespaces": processes.namespaces,
    "root-directory": processes.root_directory,
    "security-label": processes.security_label,
    "open-files": contents.open_files,
    "deleted-files": contents.deleted_files,
    "node-local-files": contents.node_local_files,
    "file-locks": processes.file_locks,
    "gpu-descriptors": gpus.descriptors,
    "devices": resources.devices,
    "terminals": resources.terminals,
    "io-uring": resources.io_uring,
    "kernel-objects": resources.kernel_objects,
    "pipes": resources.pipes,
    "unix-sockets": connections.unix_sockets,
    "other-sockets": connections.other_sockets,
    "shared-memory": resources.shared_memory,
    "sysv-memory": resources.sysv_memory,
    "huge-pages": resources.huge_pages,
    "async-io": resources.async_io,
    "nccl-static": nccls.static,
}


#: The same for ranks that use CUDA.
GPU_CHECKS: dict[str, Callable[[Look, GpuLook], Check]] = {
    "gpu-driver": gpus.driver,
    "gpu-mig": gpus.mig,
    "gpu-mps": gpus.mps,
    "gpu-managed-memory": lambda look, gpu: inside.managed_memory(look, gpu, shimctl),
    "gpu-ipc": lambda look, gpu: inside.ipc(look, gpu, shimctl),
    "gpu-rdma": gpus.rdma,
    "gpu-profiler": gpus.profiler,
    "gpu-parking": lambda look, gpu: inside.parking(look, gpu, shimctl),
    "gpu-device-memory": lambda look, gpu: inside.device_memory(look, gpu, shimctl),
    "gpu-host-memory": lambda look, gpu: gpus.host_memory(look, gpu, inside.parked_bytes(look, gpu, shimctl)),
}


#: The same over what the shims say of communicators.
NCCL_CHECKS: dict[str, Callable[[Look, NcclLook], Check]] = {
    "nccl": nccls.communicators,
    "nccl-environment": nccls.environment,
}


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
    gpu: GpuLook | None = None,
    nccl: NcclLook | None = None,
    digest_seconds: float = DIGEST_SECONDS,
) -> tuple[RankFacts, list[Check]]:
    """Facts and verdicts about a running rank; never raises. Blocking: for a thread, not for the loop.

    `pids` are all processes of the rank's cgroup as the daemon's pid namespace numbers them. `keeper_pid` 0 means that
    no keeper stands for it. `keeper_is_guest` says that this product made the keeper's pid and mount namespaces. `gpu` is
    what the driver said, None where none of these processes holds CUDA; `nccl` what the shims said of communicators.
    """
    facts = RankFacts(source_node=node, daemon_version=daemon_version, criu_version=criu_version)
    facts.rank.CopyFrom(rank)
    look = Look(pids, root_pid, carry_paths, keeper_pid, keeper_is_guest, criu_version, gpu, nccl)
    alive = guarded("rank-alive", processes.rank_alive, look)
    if alive.verdict == Check.REFUSE:
        return facts, [alive]
    checks = [guarded(name, check, look) for name, check in SOURCE_CHECKS.items()]
    if gpu is not None:
        checks += [guarded(name, check, look, gpu) for name, check in GPU_CHECKS.items()]
    if nccl is not None:
        checks += [guarded(name, check, look, nccl) for name, check in NCCL_CHECKS.items()]
    told = guarded("facts", _fill, facts, look, digest_seconds)
    return facts, [*checks, told]


def _fill(facts: RankFacts, look: Look, digest_seconds: float) -> Check:
    facts.architecture = architecture()
    facts.kernel = kernel_release()
    facts.cpu_features.extend(cpu_features())
    facts.files.extend(look.survey.facts)
    facts.directories.extend(look.survey.directories)
    facts.carried_bytes = look.survey.carried_bytes
    facts.memory_bytes = image_bytes(look)
    if look.gpu is not None:
        facts.gpu.CopyFrom(facts_of(look, look.gpu, inside.parked_bytes(look, look.gpu, shimctl)))
        facts.memory_bytes += facts.gpu.device_bytes  # in the image, or in stripes beside it, when CRIU comes
    facts.processes = len(look.tree.alive)
    facts.threads = sum(process.threads for process in look.tree.alive)
    facts.user_ids.extend(sorted({process.user_id for process in look.tree.alive}))
    add_digests(facts.files, f"/proc/{look.root_pid}/root", digest_seconds)
    return passed("facts", f"{len(facts.files)} files, {facts.threads} threads, {facts.memory_bytes >> 20} MiB")
