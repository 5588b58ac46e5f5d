"""What a process tree has mapped: each file is looked at once, and every process is described as it is alone."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.files import paths
from snapshotd.moves import tree_facts
from snapshotd.moves.tree_facts import File, TreeFacts
from snapshotd.proc import maps


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[int]:
    """A child that has mapped what this process has, and two files of its own: one with a new file in its place."""
    (tmp_path / "old").write_bytes(b"o" * 4096)
    (tmp_path / "new").write_bytes(b"n" * 8192)
    waiting, ready = os.pipe()
    if (child := os.fork()) == 0:
        kept = []
        for name in ("old", "new"):
            with (tmp_path / name).open("r+b") as file:
                kept.append(mmap.mmap(file.fileno(), 4096))
        (tmp_path / "old").unlink()
        (tmp_path / "old").write_bytes(b"another")
        os.write(ready, b"!")
        signal.pause()
        os._exit(len(kept))
    assert os.read(waiting, 1) == b"!"
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(waiting)
    os.close(ready)


def mapped(facts: TreeFacts, number: int) -> list[tuple[int, int, int, str, File]]:
    found = facts.processes[number].mapped_files
    return [(one.start, one.end, one.offset, one.rights, facts.files[one.file]) for one in found]


@pytest.mark.root
def test_files_that_forked_processes_have_mapped_are_described_for_each_of_them(forked: int, tmp_path: Path) -> None:
    both = tree_facts.gather([os.getpid(), forked])
    assert mapped(both, 0) == mapped(tree_facts.gather([os.getpid()]), 0)
    assert mapped(both, 1) == mapped(tree_facts.gather([forked]), 0)
    own = {file.link: file for *_, file in mapped(both, 1) if file.link.startswith(str(tmp_path))}
    assert own[f"{tmp_path}/old{maps.DELETED}"].size == 4096
    assert own[f"{tmp_path}/new"].size == 8192
    assert own[f"{tmp_path}/new"].born_ns == paths.born_ns(f"{tmp_path}/new") > 0


def test_time_of_birth_of_open_files_is_described(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        file.write("later")
        file.flush()
        found = {one.link: one for one in tree_facts.gather([os.getpid()]).files}
    assert found[str(tmp_path / "log")].born_ns == paths.born_ns(str(tmp_path / "log")) > 0
