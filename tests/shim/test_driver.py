"""Tests that the CUDA driver's threads are not parked, and that what a process shares on the GPU is counted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.inprocess import shimctl
from snapshotd.proc import tree
from tests.shim.jobs import PROGRAMS, REPOSITORY, Job, compile_c, python, until

Start = Callable[..., Job]

SHARED = ("-shared", "-fPIC", "-pthread")


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1, libcudart.so.12, and libraries that use the latter, linked with it and not."""
    folder = tmp_path_factory.mktemp("cuda")
    compile_c(PROGRAMS / "cuda.c", folder / "libcuda.so.1", *SHARED, "-DDRIVER")
    runtime = compile_c(PROGRAMS / "cuda.c", folder / "libcudart.so.12", *SHARED, "-Wl,-soname,libcudart.so.12")
    compile_c(PROGRAMS / "cuda_user.c", folder / "named.so", *SHARED, str(runtime), f"-Wl,-rpath,{folder}")
    compile_c(PROGRAMS / "cuda_user.c", folder / "unnamed.so", *SHARED)
    empty = folder / "empty.c"
    empty.write_text("")
    linked = ["-Wl,--no-as-needed", str(folder / "unnamed.so"), str(runtime), f"-Wl,-rpath,{folder}"]
    compile_c(empty, folder / "root.so", *SHARED, *linked)
    return folder


JOB = """
import ctypes, os, sys, threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
folder = sys.argv[1]
os.write(1, b"ready\\n")
while line := sys.stdin.readline():
    exec(line)
    os.write(1, b"done\\n")
"""


@pytest.fixture
def job(start: Start, cuda: Path) -> Job:
    job = start(*python(JOB), cuda)
    assert job.hear() == "ready"
    return job


def _do(job: Job, line: str) -> None:
    job.say(line)
    assert job.hear() == "done"


def _driver_thread(job: Job) -> int:
    names = {int(tid): Path(f"/proc/{tid}/comm") for tid in os.listdir(f"/proc/{job.pid}/task")}
    return next((tid for tid, name in names.items() if name.read_text() == "some-driver\n"), 0)


@pytest.mark.parametrize("how", [1, 2])
def test_threads_of_the_driver_keep_running_with_all_signals_blocked(job: Job, how: int) -> None:
    _do(job, "driver = ctypes.CDLL(folder + '/libcuda.so.1'); driver.cuInit(0)")
    until(lambda: _driver_thread(job))
    tid = _driver_thread(job)
    status = dict(line.split(":\t") for line in Path(f"/proc/{tid}/status").read_text().splitlines() if ":\t" in line)
    assert int(status["SigBlk"], 16) == 0xFFFFFFFE7FFBFEFF, "all that can be, but libc's own two"
    assert shimctl.problems(job.pid) == []
    box = job.mailbox()
    box.park(10)
    switches = "voluntary_ctxt_switches"
    before = Path(f"/proc/{tid}/status").read_text().partition(switches)[2]
    until(lambda: Path(f"/proc/{tid}/status").read_text().partition(switches)[2] != before, "the driver works on")
    box.release(10)
    # If the thread id stayed exempt, a later thread with the same id would not be parked.
    assert tree.inner_pid(tid) in box.fields().exempt
    _do(job, f"driver.cuEnd({how})")
    assert set(box.fields().exempt) == {0}


@pytest.mark.parametrize(
    ("set_before", "visible"),
    [
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '1,2'", "1,2"),
        ("os.environ.pop('CUDA_VISIBLE_DEVICES', None)", ""),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = 'x' * 600", None),
    ],
)
def test_visible_devices_are_noted_when_the_driver_starts(job: Job, set_before: str, visible: str | None) -> None:
    """As a program sets them itself, and not as it changes them later, when CUDA does not read them any more."""
    until(lambda: job.mailbox().fields().owner == job.pid, "its control thread, without which nothing is known")
    assert job.mailbox().state().visible is None
    _do(job, f"{set_before}; driver = ctypes.CDLL(folder + '/libcuda.so.1'); driver.cuInit(0)")
    assert job.mailbox().state().visible == visible
    _do(job, "os.environ['CUDA_VISIBLE_DEVICES'] = '7'; driver.cuInit(0)")
    assert job.mailbox().state().visible == visible


def test_threads_with_names_of_the_driver_are_exempt(job: Job) -> None:
    name = "libc = ctypes.CDLL(None); name = lambda n: (libc.prctl(15, n), time.sleep(3600))"
    for text in ("cuda-EvtHandlr", "cuda00001234567", "cuda0000123456x", "cuda"):
        _do(job, f"{name}; threading.Thread(target=name, args=(b'{text}',), daemon=True).start()")
    names = [Path(f"/proc/{job.pid}/task/{tid}/comm") for tid in os.listdir(f"/proc/{job.pid}/task")]
    until(lambda: sum(name.read_text().startswith("cuda") for name in names) == 4)
    job.mailbox().park(10)
    assert job.mailbox().state().threads == 4, (
        "the main thread, the first one, and two that only look like the driver's"
    )


def test_shared_gpu_memory_is_counted(job: Job) -> None:
    _do(
        job,
        "runtime = ctypes.CDLL(folder + '/named.so', os.RTLD_LOCAL | os.RTLD_NOW); assert runtime.use_runtime() == 0",
    )
    assert job.mailbox().state() == shimctl.ShimState(parked=False, threads=0, managed=1, exports=1, imports=1)
    _do(job, "assert [runtime.use_runtime() for _ in range(3)] == [0, 0, 0]")
    assert job.mailbox().state().managed == 4


def test_library_that_is_not_linked_with_the_runtime_finds_it(job: Job) -> None:
    _do(job, "ctypes.CDLL(folder + '/root.so', os.RTLD_LOCAL | os.RTLD_LAZY)")
    _do(job, "assert ctypes.CDLL(folder + '/unnamed.so', os.RTLD_LAZY).use_runtime() == 0")
    assert job.mailbox().state().exports == 1


def test_calls_to_a_driver_in_the_global_scope_are_counted(job: Job) -> None:
    _do(
        job,
        "ctypes.CDLL(folder + '/libcuda.so.1', os.RTLD_GLOBAL); ours = ctypes.CDLL(None); memory = ctypes.c_uint64()",
    )
    _do(job, "assert ours.cuMemAllocManaged(ctypes.byref(memory), ctypes.c_size_t(9), 1) == 0 and memory.value == 9")
    _do(job, "assert ours.cuMemAllocManaged(ctypes.byref(memory), ctypes.c_size_t(9), 2) == 1")
    _do(job, "class Handle(ctypes.Structure): _fields_ = [('b', ctypes.c_char * 64)]")
    _do(job, "handle = Handle(); assert ours.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(6)) == 0")
    _do(job, "assert ours.cuIpcOpenMemHandle_v2(ctypes.byref(memory), handle, 1) == 0 and memory.value == 7")
    assert job.mailbox().state() == shimctl.ShimState(parked=False, threads=0, managed=1, exports=1, imports=1)
    _do(job, "assert ours.cuIpcCloseMemHandle(ctypes.c_uint64(8)) == 1 and ours.cuIpcCloseMemHandle(memory) == 0")
    assert job.mailbox().state().imports == 0


def test_without_cuda_the_call_is_not_found(library: Path, cuda: Path) -> None:
    text = "import ctypes; c = ctypes.CDLL(None); print(c.cudaMallocManaged(0, 0, 0), c.cuMemAllocManaged(0, 0, 0))"
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(python(text), env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("302 500\n", "")


def test_forked_child_starts_with_zero_counts(job: Job) -> None:
    _do(job, "assert ctypes.CDLL(folder + '/named.so').use_runtime() == 0")
    _do(job, "child = os.fork() or (time.sleep(3600), os._exit(0))")
    (child,) = tree.children(job.pid)
    box = shimctl.find(tree.Process.of(child))
    assert box is not None
    until(lambda: box.state().managed == 0)
    os.kill(child, 9)
    assert job.mailbox().state().managed == 1


def _in_the_driver(job: Job, call: str) -> None:
    _do(job, "driver = ctypes.CDLL(folder + '/libcuda.so.1'); word = ctypes.c_int()")
    _do(job, f"threading.Thread(target=driver.{call}, args=(ctypes.byref(word),), daemon=True).start()")


def test_thread_that_seems_to_sleep_in_the_driver_is_parked_in_the_end(job: Job) -> None:
    _in_the_driver(job, "cuSleepForEver")
    box = job.mailbox()
    box.park(3, outside_driver=True)
    assert box.state().parked
    box.release(10)


def test_thread_that_runs_in_the_driver_is_not_parked(job: Job) -> None:
    _in_the_driver(job, "cuSpin")
    box = job.mailbox()
    with pytest.raises(shimctl.InDriver, match="do not leave the CUDA driver"):
        box.park(1, outside_driver=True)
    assert not box.state().parked
    _do(job, "word.value = 2")
    box.park(10, outside_driver=True)
    box.release(10)


def test_location_of_an_interrupted_thread_is_recognised(cuda: Path, tmp_path: Path) -> None:
    """A thread outside the driver counts as free, one inside it as running or sleeping there."""
    shim = REPOSITORY / "shim" / "lib"
    sources = [str(shim / "core" / name) for name in ("thread_location.c", "maps.c", "lockless.c", "hygiene.c")]
    flags = (f"-I{shim}", "-pthread", *sources, str(cuda / "libcuda.so.1"), f"-Wl,-rpath,{cuda}", "-ldl")
    program = compile_c(PROGRAMS / "places.c", tmp_path / "places", *flags)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "sleeps: free",
        "runs: free",
        "sleeps in the driver: sleeps there",
        "sleeps in our syscall() for the driver: sleeps there",
        "runs in the driver: driver",
        "runs in libc for the driver: driver",
    ]
