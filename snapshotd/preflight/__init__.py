"""Say no early: what cannot be moved is refused before anything is frozen, with the reason and the remedy.

Two sides: `inspect_rank` looks at the running rank on its source and gathers the facts, `examine` holds these facts
against the target. A check has a name, never raises (one whose own code fails refuses) and changes nothing. After the
freeze, `recheck`, `list_carried` and `sync_files` look again at what a moment of running can have changed. All of it
blocks: call it in a thread.

===================  ===================================================================================================
on the source
===================  ===================================================================================================
rank-alive           the rank's process is there
keeper               a keeper stands for the rank: it was started with `migrator run`
kernel               cgroup v2 with freeze and kill, pidfd_getfd, time namespaces, map_files
criu                 CRIU 4.2 or newer
process-tree         every process of the rank's cgroup descends from the rank: no daemonised ones; zombies are fine
session              the rank leads its session, and nobody in its tree sits in somebody else's
tracing              no debugger, strace or profiler is attached
stopped              warns of processes that a signal has stopped
namespaces           the rank lives in the node's own namespaces, or in those of its guest keeper
root-directory       no process has changed its root directory
security-label       warns of an AppArmor or SELinux profile that the target must have too
open-files           every open or mapped file has a name that leads to it
deleted-files        unlinked files travel in the image, node-local ones with another name beside it under that name
node-local-files     files under carry_paths travel along; warns where the rank works in such a directory
file-locks           locks travel; not those on files that both nodes may share
gpu-descriptors      no GPU is open but by processes that hold CUDA, whose checkpoint closes it
devices              no device but null, zero, full, random, urandom and terminals
terminals            a terminal's other end is the keeper's or inside the rank
io-uring             no io_uring, which CRIU cannot dump
kernel-objects       eventfd, epoll, timerfd, signalfd, inotify and pidfds of the rank are fine; perf, BPF … are not
pipes                no pipe or FIFO leads to a process outside, the keeper's excepted
unix-sockets         unix sockets connect processes of the rank among themselves
other-sockets        netlink is fine; vsock, packet and other kinds are not
shared-memory        no memory is shared with a process outside
sysv-memory          no System V shared memory
huge-pages           warns of reserved huge pages, which the target must have too
async-io             warns of kernel AIO contexts
gpu-driver           of a GPU rank: NVIDIA driver 570 or newer
gpu-mig              … whole GPUs, no parts of one
gpu-mps              … no multi-process service
gpu-managed-memory   … no managed memory, which the driver cannot checkpoint
gpu-ipc              … no device memory shared with other processes
gpu-rdma             … no RDMA device, with which device memory may be registered
gpu-profiler         … no nsys, ncu, compute-sanitizer or cuda-gdb in the process
gpu-parking          … the shim can hold every thread while the driver works
gpu-device-memory    … who moves what it has on the GPU: the driver's checkpoint, or the shim
gpu-parked-room      … room here for what the shim moves, where it does
gpu-host-memory      … enough host memory, and room in the job's limits, for what is on the GPU
nccl-static          NCCL is a library of its own, where the shim can stand before it
nccl                 every communicator can be taken down: no CUDA graph, window or device communicator; none half made
nccl-environment     of an NCCL rank: warns where what `migrator run` presets was set otherwise
facts                what the target needs to know could be gathered
===================  ===================================================================================================

===================  ===================================================================================================
on the target
===================  ===================================================================================================
target-node          the target is not the source
daemon-version       both daemons have the same major and minor version
architecture         same processor architecture
cpu-features         the target's CPU can do all that the source's can
target-kernel        the kernel features of the source's check; warns where the release differs
target-criu          CRIU 4.2 or newer, and of the source's major and minor version
users                warns of user ids that have no name here
files                files that are not carried are present and identical; those the rank writes to are present
carried-files        the paths of carried files are free, identical, or hold what this product left there
directories          working and open directories are here, or can be made under carry_paths
memory               enough free memory to restore the rank and to live on
image-room           enough room in the image store
gpu-present          enough GPUs here, and where the rank would go; or that it needs none
gpu-driver           of a GPU rank: the same driver version as on the source
gpu-mig              … a GPU that is not partitioned
gpu-chip             … a GPU of the same chip, and one for each other GPU of the source
gpu-free             … that nobody uses (or that was asked for) and no other move has reserved
gpu-memory           … with enough free memory
===================  ===================================================================================================

===================  ===================================================================================================
after the freeze
===================  ===================================================================================================
new-files            warns of files opened since preflight, refuses mapped ones; the source's quick checks run again
===================  ===================================================================================================
"""

from snapshotd.preflight.after_freeze import Carried, list_carried, recheck, sync_files
from snapshotd.preflight.gpu import GpuLook, uses_cuda
from snapshotd.preflight.inside import parked_room
from snapshotd.preflight.nccl import NcclLook, look_at
from snapshotd.preflight.node import architecture, cpu_features, kernel_release, memory_available_bytes
from snapshotd.preflight.source import inspect_rank
from snapshotd.preflight.target import examine
from snapshotd.preflight.verdict import refusals

__all__ = [
    "Carried",
    "GpuLook",
    "NcclLook",
    "architecture",
    "cpu_features",
    "examine",
    "inspect_rank",
    "kernel_release",
    "list_carried",
    "look_at",
    "memory_available_bytes",
    "parked_room",
    "recheck",
    "refusals",
    "sync_files",
    "uses_cuda",
]
