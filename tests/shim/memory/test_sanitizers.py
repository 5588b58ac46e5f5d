"""The same under AddressSanitizer and ThreadSanitizer: the memory part and the job are instrumented, CUDA's stand-in is not.

The shim's other parts are left out: they run before a sanitizer has come up, and start threads that it would not know.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.cuda_fake import SOURCES, GpuNode
from tests.shim.jobs import REPOSITORY
from tests.shim.memory.jobs import PROGRAMS, DeviceJob, refused

SHIM = REPOSITORY / "shim" / "lib"


def _compile(sanitizer: str, *arguments: str | Path) -> None:
    flags = ("-std=c11", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-pthread", "-fPIC")
    command = ["cc", *flags, "-Wall", "-Wextra", "-Werror", f"-I{SHIM}", *arguments]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


def _move_device_memory(node: GpuNode, folder: Path) -> None:
    """ThreadSanitizer wants that part of the address space for itself: a stand-in whose GPUs have theirs elsewhere."""
    sources = shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("build"))
    library = Path("build", "libcuda.so.1")
    places = "-DFIRST_ADDRESS=0x7f0000000000ULL -DEND_ADDRESS=0x7f8000000000ULL"
    subprocess.run(["make", "-s", "-C", sources, library, f"CFLAGS=-O2 -g {places}"], check=True)
    (node.folder / library.name).unlink()
    (node.folder / library.name).symlink_to(sources / library)


@pytest.fixture(params=["address,undefined", "thread"])
def job(request: pytest.FixtureRequest, node: GpuNode, tmp_path: Path) -> Iterator[DeviceJob]:
    if request.param == "thread":
        _move_device_memory(node, tmp_path / "cuda")
    shim = tmp_path / "libsnapshim-offload.so"
    parts = [
        SHIM / "core" / name
        for name in ("lockless.c", "loaded.c", "mailbox.c", "maps.c", "memory_calls.c", "sharing.c")
    ]
    sources = [*sorted((SHIM / "memory").glob("*.c")), *parts, PROGRAMS / "control.c"]
    _compile(request.param, "-shared", "-fvisibility=hidden", "-o", shim, *sources, "-ldl")
    libraries = (shim, node.folder / "libcudart.so.13", node.folder / "libcuda.so.1")
    _compile(request.param, "-o", tmp_path / "job", PROGRAMS / "job.c", *libraries, f"-Wl,-rpath,{tmp_path}")
    # Some kernels place the program where ThreadSanitizer wants its shadow, unless places are not random.
    setarch = shutil.which("setarch") or "setarch"
    # What is on the device is written by threads of the job that are parked later, which ThreadSanitizer does not see.
    options = {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"}
    environment = {**os.environ, **node.environment, **options}
    job = DeviceJob(None, setarch, "-R", tmp_path / "job", env=environment, folder=tmp_path / "stripes")
    yield job
    job.end()


@pytest.mark.sampled(1)
def test_moves_are_clean(job: DeviceJob, node: GpuNode) -> None:
    for line in ("grow 4", "segments"):
        assert job.do(line) == "done"
    for _ in range(2):
        job.offload()
        job.come_back()
    assert job.do("come") == "done"
    for _ in range(5):
        job.ready()  # while threads allocate and free
    assert job.do("stop") == "done"
    node.fault("copy", "fail:CUDA_ERROR_UNKNOWN")
    with refused(errno.EIO):
        job.offload()
    job.come_back()
    job.offload()
    node.fault("create", "fail:CUDA_ERROR_OUT_OF_MEMORY")
    with refused(errno.ENOMEM):
        job.fill()
    job.come_back()
    for line in ("lose 0", "lose 4", "shrink"):
        assert job.do(line) == "done"
    assert job.state().blocks == 0
    output, errors, status = job.finish()
    assert (output, status) == ("", 0), errors
    assert "Sanitizer" not in errors
    assert "runtime error" not in errors
