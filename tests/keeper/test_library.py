"""The library of a new rank, as its keeper names it and the daemon judges it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shim.keeper import frames, library
from shim.keeper.frames import Frame, FrameError
from snapshotd.inprocess import abi
from snapshotd.keepers.hello import Preloaded, parse_hello, protocol_problem
from snapshotd.keepers.listener import version_problem
from tests.keeper.nodes import REPOSITORY, Node

PROGRAM = """
import sys
import shim.keeper.start
from pathlib import Path
from shim.keeper.library import Library
preload = Library(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
sys.exit(shim.keeper.start.run(
    ["sh", "-c", "echo it runs"], "job", 0, sys.argv[1], preload=preload, allow_unprotected=sys.argv[5] == "allow"))
"""
BUILT = library.wanted({})

pytestmark = pytest.mark.skipif(not BUILT.exists(), reason="the shim is not built: run `make setup`")


async def run_rank(node: Node, build: str, version: int, allow: str = "") -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(node.socket), str(BUILT), build, str(version), allow),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    node.keep(process)
    out, err = await asyncio.wait_for(process.communicate(), 90)
    return process.returncode, out.decode(), err.decode()


def test_what_the_file_says_is_what_the_tools_say() -> None:
    notes = subprocess.run(["readelf", "--notes", BUILT], check=True, capture_output=True, text=True).stdout
    found = library.usable(BUILT, {})
    assert found.build in notes
    assert found.abi == abi.ABI_VERSION


def test_the_copy_that_upgrades_leave_alone_is_preferred(tmp_path: Path) -> None:
    """An upgrade replaces the file of the library; a rank must keep a file that stays."""
    shipped = Path(shutil.copy(BUILT, tmp_path))
    build = library.read(shipped).build
    assert library.usable(shipped, {}).path == shipped
    kept = tmp_path / "elsewhere" / build
    kept.mkdir(parents=True)
    (tmp_path / library.KEPT).symlink_to("elsewhere")
    (kept / shipped.name).write_bytes(b"\x7fELF, damaged")
    assert library.usable(shipped, {}).path == shipped
    shutil.copy(BUILT, kept)
    assert library.usable(shipped, {}) == library.Library(kept / shipped.name, build, abi.ABI_VERSION)


@pytest.mark.parametrize(
    ("spoken", "reason"),
    [(frames.PROTOCOL, ""), (None, ""), (frames.PROTOCOL + 1, f"speaks version {frames.PROTOCOL + 1}")],
    ids=["own", "before numbers", "newer"],
)
def test_a_new_rank_needs_a_keeper_of_a_known_protocol(spoken: int | None, reason: str) -> None:
    fields = {"t": "hello", "role": "home", "relay_key": "0" * 32, "protocol": spoken}
    hello = parse_hello(Frame({name: value for name, value in fields.items() if value is not None}, b""), 0)
    assert reason in version_problem(hello)
    assert (version_problem(hello) == "") == (reason == "")
    running = replace(hello, uid="job-0-0a0b0c0d")
    assert version_problem(running) == "", "a rank that runs keeps its keeper"
    assert protocol_problem(hello.protocol) == version_problem(hello)


async def test_a_known_build_is_welcome(node: Node) -> None:
    found = library.read(BUILT)
    code, out, err = await run_rank(node, found.build, found.abi)
    assert (code, out) == (0, "it runs\n"), err
    assert "cannot be moved" not in err
    assert node.hellos[0][0].library == Preloaded(found.build, found.abi)


@pytest.mark.parametrize(
    ("build", "version", "reason"),
    [("ab" * 20, abi.ABI_VERSION, "is not known here"), (None, abi.ABI_VERSION + 1, "snapshotd here has version")],
    ids=["build", "interface"],
)
async def test_a_library_of_another_version_is_refused_or_warned_about(
    node: Node, build: str | None, version: int, reason: str
) -> None:
    build = build or library.read(BUILT).build
    code, out, err = await run_rank(node, build, version)
    assert (code, out) == (125, "")
    assert reason in err
    assert "install the package of this node's snapshotd" in err
    assert node.hellos == [], "it was never registered"
    code, out, err = await run_rank(node, build, version, "allow")
    assert (code, out) == (0, "it runs\n")
    assert "warning: this rank cannot be moved, because its library" in err


def test_a_malformed_library_is_refused_and_none_is_accepted() -> None:
    base = {"t": "hello", "role": "home", "relay_key": "0" * 32}
    assert parse_hello(Frame(base, b""), 0).library is None
    for wrong in ("x", {"build": "xyz", "abi": 1}, {"build": "ab" * 65, "abi": 1}, {"build": "ab", "abi": -1}, {}):
        with pytest.raises(FrameError, match="library of the hello"):
            parse_hello(Frame({**base, "library": wrong}, b""), 0)
