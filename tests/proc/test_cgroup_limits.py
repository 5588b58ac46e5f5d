"""Limits of cgroups: read through all groups above a process, and set on a real group, which then has them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import Refused
from snapshotd.moves.target.limits import set_limits
from snapshotd.proc import cgroup, cgroup_limits
from snapshotd.proc.cgroup import Cgroup

#: Controllers that version 2 has even where the others belong to version 1, with a limit of each.
CANDIDATES = {"pids": ("pids.max", "77", "70"), "hugetlb": ("hugetlb.2MB.max", "8388608", "4194304")}


@pytest.fixture
def limited() -> Iterator[tuple[Path, str, str, str]]:
    """A group of the kernel whose children may have limits; the name of one, a value, and a tighter one."""
    root = cgroup.mount_point()
    if os.geteuid() != 0:
        pytest.skip("no cgroup can be made without root")
    found = [name for name in (root / "cgroup.controllers").read_text().split() if name in CANDIDATES]
    if not found:
        pytest.skip(f"cgroup v2 of this machine has none of the controllers {', '.join(CANDIDATES)}")
    name, loose, tight = CANDIDATES[found[0]]
    before = (root / "cgroup.subtree_control").read_text().split()
    (root / "cgroup.subtree_control").write_text(f"+{found[0]}")
    top = Cgroup(root / f"test-limits-{os.getpid()}").create()
    yield top.path, name, loose, tight
    top.remove()
    if found[0] not in before:
        with contextlib.suppress(OSError):  # in use by somebody else by now
            (root / "cgroup.subtree_control").write_text(f"-{found[0]}")


def test_tightest_limit_of_all_groups_above_is_read(limited: tuple[Path, str, str, str]) -> None:
    top, name, loose, tight = limited
    (top / "cgroup.subtree_control").write_text(f"+{name.partition('.')[0]}")
    job, rank = Cgroup(top / "job").create(), Cgroup(top / "job" / "rank").create()
    assert cgroup_limits.read(rank.path, cgroup.mount_point()) == {}
    (top / name).write_text(tight)
    (job.path / name).write_text(loose)
    assert cgroup_limits.read(rank.path, cgroup.mount_point()) == {name: tight}


def test_moved_rank_has_the_limits_of_its_job(limited: tuple[Path, str, str, str]) -> None:
    top, name, _, tight = limited
    source, guest = Cgroup(top / "job").create(), Cgroup(top / "ranks" / "guest").create()
    (top / "cgroup.subtree_control").write_text(f"+{name.partition('.')[0]}")
    (source.path / name).write_text(tight)
    assert not (guest.path / name).exists()
    set_limits(guest, cgroup_limits.read(source.path, cgroup.mount_point()))
    assert (guest.path / name).read_text().strip() == tight
    assert cgroup_limits.read(guest.path, cgroup.mount_point()) == {name: tight}  # and so they move on


def test_node_without_the_controller_is_refused(limited: tuple[Path, str, str, str]) -> None:
    top, name, _, tight = limited
    guest = Cgroup(top / "ranks" / "guest").create()
    assert cgroup_limits.available(guest.path.parent) == set()
    with pytest.raises(Refused, match="cgroup-limits"):
        set_limits(guest, {name: tight})
    set_limits(guest, {})


@pytest.mark.parametrize(
    ("limits", "wrong"),
    [
        ({"memory.max": "1000", "cpu.max": "50000 100000"}, []),
        ({"memory.max": "max"}, ["memory.max"]),
        ({"memory.max": "9223372036854771712"}, ["memory.max"]),
        ({"cpu.max": "50000 0"}, ["cpu.max"]),
        ({"cgroup.procs": "1", "../x/memory.max": "5"}, ["../x/memory.max", "cgroup.procs"]),
        ({"memory.max": "5\n6"}, ["memory.max"]),
        ({"pids.max": "5"}, ["pids.max"]),
    ],
)
def test_malformed_limits_and_missing_controllers_are_named(limits: dict[str, str], wrong: list[str]) -> None:
    assert cgroup_limits.unenforceable(limits, {"memory", "cpu"}) == wrong


def test_cpu_limits_are_compared_as_shares(tmp_path: Path) -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (group / "cpu.max").write_text("200000 200000\n")
    assert cgroup_limits.read(group, tmp_path) == {"cpu.max": "200000 200000"}
    (group / "cpu.max").write_text("max 100000\n")
    assert cgroup_limits.read(group, tmp_path) == {"cpu.max": "150000 100000"}
