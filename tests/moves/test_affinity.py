"""CPUs of a moved rank: the same numbers, or those near its new GPU if it was bound to those near the old one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from snapshotd.moves import affinity
from snapshotd.proc import gpu_cpus

EVERYWHERE = set(range(16))
NEAR_THERE, NEAR_HERE = set(range(8)), set(range(8, 16))


@pytest.mark.parametrize(
    ("had", "gets"),
    [
        (set(range(8)), set(range(8, 16))),  # the whole socket
        ({0, 3}, {8, 11}),  # a part of it
        ({9}, {9}),  # bound, but not to the GPU's socket
        ({7, 8}, {7, 8}),
    ],
)
def test_threads_that_were_near_the_gpu_are_near_the_new_one(had: set[int], gets: set[int]) -> None:
    assert affinity.translated(had, EVERYWHERE, NEAR_THERE, NEAR_HERE) == gets


def test_smaller_socket_is_shared() -> None:
    assert affinity.translated({0, 1, 2}, EVERYWHERE, NEAR_THERE, {4, 5}) == {4, 5}
    assert affinity.translated(NEAR_THERE, EVERYWHERE, NEAR_THERE, {4, 5}) == {4, 5}


def test_numbers_stay_where_nothing_is_known_or_the_source_has_one_socket() -> None:
    assert affinity.translated({1}, EVERYWHERE, set(), NEAR_HERE) == {1}
    assert affinity.translated({1}, EVERYWHERE, NEAR_THERE, set()) == {1}
    assert affinity.translated({1}, EVERYWHERE, EVERYWHERE, NEAR_HERE) == {1}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_affinity_is_read_and_restored() -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    child = subprocess.Popen(["sleep", "600"])
    try:
        os.sched_setaffinity(child.pid, {first})
        had = affinity.read([child.pid])
        assert list(had.values()) == [[first]]
        os.sched_setaffinity(child.pid, {first, *others})
        affinity.restore([child.pid], had, {first, *others}, set(), set())
        assert os.sched_getaffinity(child.pid) == {first}
        affinity.restore([child.pid], had, {first, *others}, {first}, set(others))
        assert os.sched_getaffinity(child.pid) == set(others)
        affinity.restore([child.pid], had, {first, *others}, {first}, {1 << 15})  # not for this daemon
        assert os.sched_getaffinity(child.pid) == set(others)
        unbound = {thread: [first, *others] for thread in had}
        affinity.restore([child.pid], unbound, {first, *others}, {first, *others}, {first})
        assert os.sched_getaffinity(child.pid) == set(others)
        # More CPUs than any kernel has, from a node that wants to keep this one busy: they count as not known.
        many = {thread: [first, 9000] for thread in had}
        affinity.restore([child.pid], many, set(range(20_000)), set(range(10_000)), set(others))
        assert os.sched_getaffinity(child.pid) == {first}
    finally:
        child.kill()
        child.wait()


# ---------------------------------------------------------------- CPUs near a GPU


@pytest.fixture
def node(tmp_path: Path) -> tuple[Path, Path]:
    gpus, pci = tmp_path / "gpus", tmp_path / "pci"
    for number, cpus in enumerate(("0-3,8-11", "4-7")):
        address = f"0000:{number}A:00.0"
        (gpus / address).mkdir(parents=True)
        (gpus / address / "information").write_text(
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 45\nGPU UUID: \t GPU-{number}\nBus Location: \t {address}\n"
        )
        (pci / address.lower()).mkdir(parents=True)
        (pci / address.lower() / "local_cpulist").write_text(f"{cpus}\n")
    return gpus, pci


def test_cpus_near_a_gpu_are_those_of_its_pci_device(node: tuple[Path, Path]) -> None:
    assert gpu_cpus.near(["GPU-1"], *node) == {4, 5, 6, 7}
    assert gpu_cpus.near(["GPU-0", "GPU-1"], *node) == set(range(12))
    assert gpu_cpus.near([], *node) == set()


def test_cpus_that_are_not_known_in_full_are_none(node: tuple[Path, Path], tmp_path: Path) -> None:
    gpus, pci = node
    assert gpu_cpus.near(["GPU-0", "GPU-9"], gpus, pci) == set()
    assert gpu_cpus.near(["GPU-0"], tmp_path / "missing", pci) == set()
    (pci / "0000:0a:00.0" / "local_cpulist").write_text("\n")
    assert gpu_cpus.near(["GPU-0"], gpus, pci) == set()
    (pci / "0000:0a:00.0" / "local_cpulist").write_text("0-99999999\n")
    assert gpu_cpus.near(["GPU-0"], gpus, pci) == set()
