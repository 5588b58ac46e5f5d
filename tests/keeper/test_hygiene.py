"""Tests of libsnapshim.so in real programs: io_uring is refused, and nothing else is different."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shim.keeper.child import rank_environment
from shim.keeper.library import DRIVER_LIBRARY, NAMES, OFFLOAD_LIBRARY, SHARED_LIBRARY
from tests.keeper.nodes import REPOSITORY, Node, python
from tests.shim.build import LIB, make_shim

GETPID, CLOSE = (39, 3) if os.uname().machine == "x86_64" else (172, 57)
PROGRAM = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
params = ctypes.create_string_buffer(256)
answer = libc.syscall(ctypes.c_long(425), ctypes.c_long(4), params)
print(answer, errno.errorcode.get(ctypes.get_errno()))
print(libc.syscall(ctypes.c_long({GETPID})) == os.getpid())
print(libc.syscall(ctypes.c_long({CLOSE}), ctypes.c_long(-1)), errno.errorcode.get(ctypes.get_errno()))
"""


@pytest.fixture(scope="module")
def built() -> Path:
    make_shim("all")
    return LIB


@pytest.fixture(params=NAMES)
def library(built: Path, request: pytest.FixtureRequest) -> Path:
    return built / str(request.param)


def test_what_is_tested_in_c_passes_under_address_sanitizer() -> None:
    make_shim("check")


def test_io_uring_is_refused_and_other_calls_work(library: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-1 ENOSYS", "True", "-1 EBADF"]
    assert done.stderr == ""


@pytest.mark.parametrize("argv", [("true",), ("sh", "-c", "echo $((6*7)) | cat"), ("ls", "/"), ("env", "-i", "true")])
def test_output_of_programs_is_unchanged(library: Path, argv: tuple[str, ...]) -> None:
    plain = subprocess.run(argv, capture_output=True, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    preloaded = subprocess.run(argv, capture_output=True, check=True, env=environment)
    assert (preloaded.stdout, preloaded.stderr) == (plain.stdout, plain.stderr)


def test_only_what_the_abi_names_is_exported(library: Path) -> None:
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    header = (REPOSITORY / "shim" / "lib" / "abi.h").read_text()
    lists = ["Interposed as well"]
    if library.name != DRIVER_LIBRARY:
        lists.append("And by libsnapshim-offload.so and libsnapshim-shared.so")
    if library.name == SHARED_LIBRARY:
        lists.append("And by libsnapshim-shared.so alone")
    texts = [header.partition(title)[2].partition(":")[2].partition("*/")[0] for title in lists]
    interposed = " ".join(texts).replace("*", " ").split()
    named = ["snapshim_abi_version", "snapshim_mailbox", "syscall", *interposed]
    exported = [line.split()[2] for line in symbols.splitlines()]
    nccl = set(re.findall(r"\bnccl[A-Z]\w+", (REPOSITORY / "shim" / "lib" / "nccl" / "symbols.h").read_text()))
    assert sorted(name for name in exported if "nccl" not in name) == sorted(named)
    assert {name.removeprefix("p") for name in exported if "nccl" in name} == nccl


def test_rank_gets_the_launchers_environment_plus_the_preload(tmp_path: Path) -> None:
    driver, offload = tmp_path / DRIVER_LIBRARY, tmp_path / OFFLOAD_LIBRARY
    once = rank_environment({"A": "b", "LD_PRELOAD": "x.so y.so"}, driver)
    assert once == {"A": "b", "LD_PRELOAD": f"{driver}:x.so y.so"}
    assert rank_environment(once, driver) == once
    assert rank_environment({"A": "b"}, None) == {"A": "b"}
    replaced = rank_environment(once, offload)
    assert replaced["LD_PRELOAD"] == f"{offload}:x.so:y.so", "the one in the place of the other"
    assert rank_environment(replaced, offload) == replaced
    assert rank_environment(replaced, driver)["LD_PRELOAD"] == f"{driver}:x.so:y.so"
    shared = tmp_path / SHARED_LIBRARY
    assert rank_environment(replaced, shared)["LD_PRELOAD"] == f"{shared}:x.so:y.so"


async def test_rank_has_the_library_preloaded(node: Node) -> None:
    if not (REPOSITORY / "shim" / "lib" / "libsnapshim.so").exists():
        pytest.skip("the shim is not built: run `make setup`")
    keeper = await node.launch(*python(PROGRAM))
    output, errors = await keeper.communicate()
    assert output.splitlines()[0] == b"-1 ENOSYS", errors
