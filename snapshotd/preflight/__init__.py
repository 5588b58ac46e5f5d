"""Refuses early what cannot be moved: before anything is frozen, with the reason and the remedy.

`inspect_rank` examines the running rank on its source and gathers facts; `examine` compares these facts with the target. A
check has a name, never raises (one whose own code fails refuses) and changes nothing. After the freeze, `recheck`,
`list_carried` and `sync_files` repeat what may have changed since. All functions block: call them in a thread.

The modules named *_checks.py contain the checks of the source, target*.py those of the target.

===================  ===================================================================================================
on the source
===================  ===================================================================================================
rank-alive           the rank's process exists
keeper               the rank has a keeper: it was started with `migrator run`
credentials          no set-uid or set-gid program, and no process of a user other than the keeper's (root may change)
kernel               cgroup v2 with freeze and kill, pidfd_getfd, time namespaces, map_files
criu                 CRIU 4.2 or newer
process-tree         every process in the rank's cgroup descends from the rank: no daemons; zombies are allowed
session              the rank leads its session, and no process of its tree is in a session outside the rank
tracing              no debugger, strace or profiler is attached
stopped              warns of processes that a signal has stopped
file-systems         nothing is on a FUSE file system that a user's process serves, which may never answer
namespaces           the rank is in the node's own namespaces, or in those of its guest keeper
root-directory       no process has changed its root directory
security-label       warns of an AppArmor or SELinux profile that the target must have too
open-files           every open or mapped file has a name that leads to it
deleted-files        unlinked files are moved in the image, node-local files with another name under that name
node-local-files     files under carry_paths are moved; warns if the rank's working directory is there
closed-files         files there that the rank has made and closed are moved too, up to carry_closed_bytes
file-locks           locks are moved; refuses exclusive locks on files that both nodes may share
gpu-descriptors      no GPU is open except in processes that hold CUDA, whose checkpoint closes it
devices              no device except null, zero, full, random, urandom and terminals
rdma                 no RDMA device but those of NCCL, which are closed when its communicators are taken down
terminals            a terminal's master is the keeper's or inside the rank
io-uring             no io_uring, which CRIU cannot dump
kernel-objects       eventfd, epoll, timerfd, signalfd, inotify and pidfds of the rank are allowed; perf, BPF … are not
pipes                no pipe or FIFO leads to a process outside the rank, except its keeper
unix-sockets         unix sockets connect processes of the rank with each other
other-sockets        netlink is allowed; vsock, packet and other kinds are not
shared-memory        no memory is shared with a process outside the rank
sysv-memory          no System V shared memory
huge-pages           warns of reserved huge pages, which the target must have too
async-io             warns of kernel AIO contexts
gpu-driver           for a GPU rank: NVIDIA driver 570 or newer
gpu-mig              … whole GPUs, no MIG partitions
gpu-mps              … no multi-process service
gpu-managed-memory   … no managed memory, which the driver cannot checkpoint
gpu-ipc              … no device memory shared with other processes
gpu-profiler         … no nsys, ncu, compute-sanitizer or cuda-gdb in the process
gpu-parking          … the shim can park every thread while the driver works
gpu-device-memory    … whether the driver's checkpoint or the shim moves its device memory
gpu-offload-room     … memory on the source for what the shim offloads, or for a window of it (hold_device_memory)
gpu-host-memory      … enough host memory, within the job's limits, for its device memory
nccl-static          NCCL is a shared library, so that the shim can interpose it
nccl                 every communicator can be torn down: no CUDA graph, window or device communicator, none incomplete
nccl-environment     for an NCCL rank: warns if variables that `migrator run` presets were set otherwise
nccl-host-id         … no other rank of its job on this node has the same NCCL_HOSTID
facts                the facts that the target needs could be gathered
job-coordinator      the job must be able to do without the source, if it coordinates the job's snapshots (a warning)
===================  ===================================================================================================

===================  ===================================================================================================
on the target
===================  ===================================================================================================
target-node          the target is not the source
daemon-version       both daemons and migrator have a common protocol (snapshotd/api/protocol.py)
architecture         the same processor architecture
cpu-features         the target's CPU has all features that the source's has
target-kernel        the kernel features of the check `kernel`; warns if the release differs
target-criu          CRIU 4.2 or newer, with the source's major and minor version
users                warns of user ids that have no name on the target
root-rank            the rank does not run as root, or allow_root_ranks is set
priorities           a user's rank has no priority and no resource limit that the target's administrator does not grant
files                files that are not moved are present, identical, and open to the rank's user; written ones only present
carried-files        the paths of files that are moved are free, identical, or were left behind by an earlier move
closed-room          the file systems of carry_paths have room for the closed files
directories          working and open directories exist, or can be created under carry_paths
memory               enough free memory to restore the rank and let it run
image-room           enough room in the image store
cgroup-limits        the limits of the rank's cgroups (v2) can be set on the target
target-rdma          the target has RDMA devices, if NCCL in the rank uses some
gpu-present          enough GPUs, and which the rank would use; or that it needs none
gpu-driver           for a GPU rank: the same driver version as on the source
gpu-mig              … a GPU that is not partitioned
gpu-chip             … a GPU with the same chip, and one for each other GPU of the source
gpu-free             … that no process uses (or that was requested) and no other move has reserved
gpu-memory           … with enough free memory
===================  ===================================================================================================

===================  ===================================================================================================
after the freeze
===================  ===================================================================================================
new-files            warns of files opened since preflight; the target refuses mapped ones that differ there
image-content        on the target: the image contains only what a rank's dump has, and what its source described
image-credentials    … its processes have the users, groups and capabilities that were shown and that the node allows
image-priorities     … and no priority or resource limit beyond what the check `priorities` allows
restored-files       … the restored processes have the very files open and mapped that the rank had
file-rights          … which their user may open on the target
===================  ===================================================================================================
"""

from snapshotd.preflight.after_freeze import Carried, Rechecked, list_carried, recheck, sync_files
from snapshotd.preflight.arriving import arriving
from snapshotd.preflight.file_checks import closed_files, failed
from snapshotd.preflight.gpu_shim_checks import offload_room
from snapshotd.preflight.reports import DriverReport, NcclReports, read_nccl_reports, uses_cuda
from snapshotd.preflight.source import inspect_rank
from snapshotd.preflight.target import ROOT_REMEDY, examine
from snapshotd.preflight.target_files import files as compare_files
from snapshotd.preflight.verdict import refusals, refused

__all__ = [
    "ROOT_REMEDY",
    "Carried",
    "DriverReport",
    "NcclReports",
    "Rechecked",
    "arriving",
    "closed_files",
    "compare_files",
    "examine",
    "failed",
    "inspect_rank",
    "list_carried",
    "offload_room",
    "read_nccl_reports",
    "recheck",
    "refusals",
    "refused",
    "sync_files",
    "uses_cuda",
]
