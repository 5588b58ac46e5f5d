"""Processes with the same open and mapped files as a CUDA process, in a private /dev, and what the driver says about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight import DriverReport
from snapshotd.proc import tree
from tests.preflight.ranks import Child, Starter

MIB = 1 << 20
GIB = 1 << 30

#: A keeper with its own mount namespace and /dev, like a guest keeper; the rank is its child.
KEEPER = """
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
assert libc.mount(b"none", b"/dev", b"tmpfs", 0, None) == 0
for folder in ("nvidia-caps", "dri", "infiniband"):
    os.mkdir("/dev/" + folder)
CUDA = ("nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-caps/nvidia-cap1")
for name in (*CUDA, "nvidia-modeset", "dri/card0", "kfd"):
    with open("/dev/" + name, "wb") as file:
        file.truncate(64 << 20)
os.mknod("/dev/infiniband/uverbs0", 0o20600, os.makedev(1, 11))
import mmap
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def at(address, name, size):
    handle = os.open(name, os.O_RDWR)
    assert libc.mmap(address, size, 3, 0x100011, handle, 0) == address
    os.close(handle)
def gpu():
    global held
    held = [os.open("/dev/" + name, os.O_RDWR) for name in CUDA * 3]
    held += [socket.socketpair(), os.pipe(), libc.eventfd(0, 0), mmap.mmap(held[1], 48 << 20)]
    held[-1].write(bytes(48 << 20))
    at(0x204a00000, "/dev/nvidia-uvm", 2 << 20)
def beside(feature):
    ready = os.pipe()
    if (child := os.fork()) == 0:
        feature(); os.write(ready[1], b"x"); wait(); os._exit(0)
    os.close(ready[1])
    assert os.read(ready[0], 1)
    return child
def rank():
    os.setsid()
    FEATURE
pids = [beside(rank)]
"""


@dataclass
class FakeShim:
    """Reports the configured values for every process."""

    managed: int = 0
    exports: int = 0
    imports: int = 0
    moving_exports: int = 0
    moving_imports: int = 0
    server: int = 0
    opened_from: tuple[int, ...] = ()
    shared_outside: bool = False
    visible: str | None = None
    bytes: int = 0  # of device memory that it backs
    blocks: int = 0
    missing: bool = False
    obstacles: list[str] = field(default_factory=list)
    asked: list[tree.Process] = field(default_factory=list)

    def problems(self, pid: int) -> list[str]:
        return self.obstacles

    def find(self, process: tree.Process) -> FakeShim | None:
        self.asked.append(process)
        return None if self.missing else self

    def state(self) -> FakeShim:
        return self

    def device_memory(self) -> FakeShim:
        return self


def gpu_rank(rank: Starter, feature: str = "gpu()") -> Child:
    return rank(KEEPER.replace("FEATURE", feature.replace("\n", "\n    ")))


def inspect(child: Child, gpu: DriverReport | None, *, holds: bool = False) -> tuple[pb.RankFacts, dict[str, Check]]:
    return child.inspect(keeper_pid=child.pid, keeper_is_guest=True, gpu=gpu, holds=holds)


def card(index: int = 0, *processes: pb.GpuProcess, used: int = 3 * MIB, mig: bool = False) -> pb.Gpu:
    return pb.Gpu(
        uuid=f"GPU-{index}a1b2c3d-0000",
        index=index,
        name="NVIDIA H200",
        compute_capability="9.0",
        memory_bytes=141 * GIB,
        memory_free_bytes=141 * GIB - used,
        mig=mig,
        processes=processes,
    )


def seen(
    child: Child, *cards: pb.Gpu, driver: str = "580.159.04", cuda_pids: tuple[int, ...] | None = None
) -> DriverReport:
    pids = tuple(child.pids) if cuda_pids is None else cuda_pids
    return DriverReport(driver, cards or (card(0, pb.GpuProcess(pid=child.pids[0], memory_bytes=30 * MIB)),), pids)
