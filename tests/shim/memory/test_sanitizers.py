"""Runs the memory part and the job under AddressSanitizer and ThreadSanitizer; CUDA's stand-in is not instrumented.

The shim's other parts are left out: they run before a sanitizer is initialised, and start threads that it does not see.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.inprocess import symbols
from tests.fakes import cuda_fake
from tests.fakes.cuda_fake import SOURCES, GpuNode
from tests.shim.build import build_once, sources
from tests.shim.jobs import REPOSITORY
from tests.shim.memory.jobs import PROGRAMS, DeviceJob, refused

SHIM = REPOSITORY / "shim" / "lib"

#: Addresses that ThreadSanitizer has shadow memory for, and that neither the program nor its libraries use.
ADDRESSES = {"x86_64": (0x7F0000000000, 0x7F8000000000), "aarch64": (0xAAAB10000000, 0xAAAF00000000)}


def _compile(sanitizer: str, *arguments: str | Path) -> None:
    flags = ("-std=c11", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-pthread", "-fPIC")
    command = ["cc", *flags, "-Wall", "-Wextra", "-Werror", f"-I{SHIM}", *arguments]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


def _build(sanitizer: str) -> Path:
    """Builds the library and the job. ThreadSanitizer needs the addresses of the stand-in's GPU memory, so a stand-in with
    other addresses is built for it."""

    def build(folder: Path) -> None:
        libraries = standard = cuda_fake.build()
        if sanitizer == "thread":
            libraries = shutil.copytree(SOURCES, folder / "cuda", ignore=shutil.ignore_patterns("build")) / "build"
            first, end = ADDRESSES[platform.machine()]
            addresses = f"-DFIRST_ADDRESS={first:#x}ULL -DEND_ADDRESS={end:#x}ULL"
            make = ["make", "-s", "-C", str(folder / "cuda"), "build/libcuda.so.1", f"CFLAGS=-O2 -g {addresses}"]
            subprocess.run(make, check=True)
        shim = folder / "libsnapshim-offload.so"
        names = ("lockless.c", "loaded.c", "mailbox.c", "maps.c", "memory_calls.c", "sharing.c")
        files = [
            *sorted((SHIM / "memory").glob("*.c")),
            *sorted((SHIM / "sharing").glob("*.c")),
            *(SHIM / "core" / name for name in names),
            PROGRAMS / "control.c",
        ]
        _compile(sanitizer, "-shared", "-Wl,--build-id=sha1", "-fvisibility=hidden", "-o", shim, *files, "-ldl")
        linked = (shim, standard / "libcudart.so.13", libraries / "libcuda.so.1", f"-Wl,-rpath,{folder}")
        _compile(sanitizer, "-o", folder / "job", PROGRAMS / "job.c", *linked)

    return build_once(
        f"memory.{sanitizer.partition(',')[0]}", [*sources(SHIM, SOURCES, PROGRAMS), Path(__file__)], build
    )


@pytest.fixture(params=["address,undefined", "thread"])
def job(request: pytest.FixtureRequest, node: GpuNode, tmp_path: Path) -> Iterator[DeviceJob]:
    built = _build(request.param)
    symbols.builds.learn(built / "libsnapshim-offload.so")
    if request.param == "thread":
        (node.folder / "libcuda.so.1").unlink()
        (node.folder / "libcuda.so.1").symlink_to(built / "cuda" / "build" / "libcuda.so.1")
    # With address randomisation, some kernels load the program where ThreadSanitizer needs its shadow memory.
    setarch = shutil.which("setarch") or "setarch"
    # Parking orders the job's writes to device memory before the copies, which ThreadSanitizer does not see.
    options = {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"}
    environment = {**os.environ, **node.environment, **options}
    job = DeviceJob(None, setarch, "-R", built / "job", env=environment, folder=tmp_path / "stripes")
    yield job
    job.end()


@pytest.mark.sampled(1)
def test_sanitizer_finds_no_error_during_moves(job: DeviceJob, node: GpuNode) -> None:
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
