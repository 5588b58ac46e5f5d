"""Ranks that use NCCL: checks of the shims' reports, of linked libraries and of the environment."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.inprocess import ncclctl
from snapshotd.preflight import NcclReports
from snapshotd.preflight.elf import needed_libraries
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.nccl_checks import communicators, environment, static
from snapshotd.preflight.nccl_host import host_id
from snapshotd.preflight.reports import read_nccl_reports
from snapshotd.preflight.resource_checks import shared_memory
from snapshotd.proc import maps, tree
from tests.preflight.conftest import Starter

NAMED = """
import threading, time
def named(name):
    libc.prctl(15, name, 0, 0, 0)
    print(end="", flush=True)
    ready.set(); threading.Event().wait()
ready = threading.Event()
def start(name):
    threading.Thread(target=named, args=(name,), daemon=True).start(); ready.wait()
"""


def report(**changes: object) -> ncclctl.Report:
    comm = {"id": "00000000000000aa", "nranks": 2, "rank": 0, "state": "live", "in_progress": False, "refused": []}
    result = {"version": 22809, "instance": 1, "gate": "open", "comms": [comm | changes], "nccl_threads": 2}
    return ncclctl.parse(json.dumps(result))


def inspected(pids: list[int]) -> Inspection:
    return Inspection(pids, pids[0], ())


def test_complete_communicator_passes(rank: Starter) -> None:
    child = rank()
    check = communicators(inspected(child.pids), NcclReports(((child.pid, report()),)))
    assert (check.verdict, check.reason) == (Check.PASS, "1 communicators, in 1 processes")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"refused": ["its collectives are captured in a CUDA graph"]}, "captured in a CUDA graph"),
        ({"state": "detached"}, "an earlier move has taken it down"),
        ({"state": "lost"}, "could not be built again"),
        ({"in_progress": True}, "still in progress"),
    ],
)
def test_communicator_that_cannot_be_torn_down_is_refused_by_name(
    rank: Starter, changes: dict[str, object], expected: str
) -> None:
    child = rank()
    check = communicators(inspected(child.pids), NcclReports(((child.pid, report(**changes)),)))
    assert check.verdict == Check.REFUSE
    assert f"process {child.pid}, communicator 00000000000000aa: " in check.reason
    assert expected in check.reason


def test_process_without_a_report_is_refused(rank: Starter) -> None:
    check = communicators(inspected(rank().pids), NcclReports(problem="it is stopped", remedy="continue it"))
    assert (check.verdict, check.reason, check.remedy) == (Check.REFUSE, "it is stopped", "continue it")


def test_nccl_threads_without_the_library_are_refused(rank: Starter) -> None:
    assert static(inspected(rank(NAMED + "start(b'pt_data_worker')").pids)).verdict == Check.PASS
    check = static(inspected(rank(NAMED + "start(b'NCCL Progress 1')").pids))
    assert check.verdict == Check.REFUSE
    assert "NCCL Progress 1" in check.reason


def library(compiler: str, path: Path, *options: str) -> Path:
    subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-x", "none", "-o", path, *options], check=True)
    return path


def test_torch_with_static_nccl_is_warned_about(rank: Starter, tmp_path: Path, compiler: str) -> None:
    torch = library(compiler, tmp_path / "libtorch_cuda.so")
    check = static(inspected(rank(f"ctypes.CDLL('{torch}')").pids))
    assert check.verdict == Check.WARN
    assert str(torch) in check.reason


def test_torch_that_links_nccl_passes(rank: Starter, tmp_path: Path, compiler: str) -> None:
    nccl = library(compiler, tmp_path / "libnccl.so.2", "-Wl,-soname,libnccl.so.2")
    torch = library(compiler, tmp_path / "libtorch_cuda.so", "-Wl,--no-as-needed", str(nccl), f"-Wl,-rpath,{tmp_path}")
    child = rank(f"ctypes.CDLL('{torch}')")
    (mapping,) = [one for one in maps.read(child.pids[0]) if one.path == str(torch) and one.offset == 0]
    assert "libnccl.so.2" in needed_libraries(child.pids[0], mapping)
    assert static(inspected(child.pids)).verdict == Check.PASS
    assert ncclctl.uses_nccl(child.pids) == child.pids
    assert ncclctl.uses_nccl([os.getpid()]) == []
    assert ncclctl.reports(child.pids) == []  # no shim in it


def test_crafted_torch_library_takes_no_time(rank: Starter, tmp_path: Path) -> None:
    """An attack: a dynamic section with a hundred thousand names, each as long as the rest of the file."""
    entries = struct.pack("<QQ", 5, 0x1000) + struct.pack("<QQ", 1, 0) * 100_000
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    size = 0x1000 + (8 << 20) + len(entries)
    headers = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    headers += struct.pack("<IIQQQQQQ", 2, 4, size - len(entries), 0, 0, len(entries), len(entries), 8)
    torch = tmp_path / "libtorch_cuda.so"
    torch.write_bytes((header + headers).ljust(0x1000, b"\0") + b"x" * (8 << 20) + entries)
    child = rank(f"import mmap; mapped = mmap.mmap(os.open('{torch}', os.O_RDONLY), 0, prot=mmap.PROT_READ)")
    began = time.process_time()
    assert static(inspected(child.pids)).verdict == Check.WARN
    assert time.process_time() - began < 5


def test_nccl_that_bypasses_the_shim_is_refused(rank: Starter, tmp_path: Path, compiler: str) -> None:
    nccl = library(compiler, tmp_path / "libnccl.so.2")
    child = rank(NAMED + f"ctypes.CDLL('{nccl}'); start(b'NCCL Service 0')")
    check = communicators(inspected(child.pids), NcclReports())
    assert check.verdict == Check.REFUSE
    assert "NCCL Service 0" in check.reason


def test_presets_are_listed(rank: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_RAS_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_HOST_ENABLE"):
        monkeypatch.setenv(name, "0")
    child = rank()
    check = environment(inspected(child.pids), NcclReports(((child.pid, report()),)))
    assert (check.verdict, check.reason.split(", ")[0]) == (Check.PASS, "NCCL_RAS_ENABLE=0")
    monkeypatch.setenv("NCCL_RAS_ENABLE", "1")
    child = rank()
    newer, older = report(), replace(report(), version=22707)
    assert environment(inspected(child.pids), NcclReports(((child.pid, newer),))).verdict == Check.PASS
    check = environment(inspected(child.pids), NcclReports(((child.pid, older),)))
    assert check.verdict == Check.WARN
    assert "NCCL_RAS_ENABLE=1" in check.reason
    assert "NCCL_NVLS" not in check.remedy


def test_performance_features_of_nccl_that_are_on_pass(rank: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("NCCL_CUMEM_HOST_ENABLE", raising=False)
    child = rank()
    check = environment(inspected(child.pids), NcclReports(((child.pid, report()),)))
    assert check.verdict == Check.PASS
    assert check.reason == "NCCL_RAS_ENABLE=0, NCCL_NVLS_ENABLE=1, NCCL_CUMEM_HOST_ENABLE=not set"


def test_shared_memory_of_communicators_passes(rank: Starter) -> None:
    path = f"/dev/shm/nccl-test-{os.getpid()}"
    share = f"import mmap; f = open('{path}', 'a+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)"
    child, other = rank(share), rank(share)
    try:
        seen = Inspection(child.pids, child.pid, ("/dev/shm",))
        assert shared_memory(seen).verdict == Check.REFUSE
        seen = Inspection(child.pids, child.pid, ("/dev/shm",), nccl=NcclReports(((child.pid, report()),)))
        assert shared_memory(seen).verdict == Check.PASS
        assert other.process.poll() is None
    finally:
        os.unlink(path)


def test_nccl_past_the_shim_is_recognised_by_stacks(rank: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads have no name. One for each unused unique id is the shim's own, and so are those that outlive the last
    communicator."""
    child = rank()
    one = ncclctl.Report("", False, 0, (), threads=3, ids_unused=1)
    found = [(tree.Process.of(child.pid), one)]
    monkeypatch.setattr(ncclctl, "all_reports", lambda pids: found)
    seen = read_nccl_reports(child.pids)
    assert (seen.past, seen.pids) == (((child.pid, 2),), frozenset())
    check = communicators(inspected(child.pids), seen)
    assert check.verdict == Check.REFUSE
    assert f"process {child.pid}: 2 threads" in check.reason
    assert "ctypes.CDLL" in check.remedy
    for known in (replace(one, threads=1), replace(one, ended=report().comms)):
        found[0] = (found[0][0], known)
        assert communicators(inspected(child.pids), read_nccl_reports(child.pids)).verdict == Check.PASS
    found[0] = (found[0][0], report())
    assert read_nccl_reports(child.pids).past == ()


def test_host_id_that_a_staying_rank_shares_is_refused(rank: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the move NCCL would take both for ranks of one host. Ranks with different values on one GPU are all right."""

    def verdict(mine: str, others: str) -> Check:
        started = []
        for value in (mine, others):
            monkeypatch.setenv("NCCL_HOSTID", value)
            if not value:
                monkeypatch.delenv("NCCL_HOSTID")
            started.append(rank())
        moving, staying = started
        nccl = NcclReports(((moving.pid, report()),), neighbours=tuple((7, pid) for pid in staying.pids))
        return host_id(inspected(moving.pids), nccl)

    check = verdict("node-1", "node-1")
    assert check.verdict == Check.REFUSE
    assert "NCCL_HOSTID=node-1 is set for this rank and for ranks that stay on this node: 7" in check.reason
    assert verdict("rank-0", "rank-1").verdict == Check.PASS
    assert verdict("", "node-1").verdict == Check.PASS
    assert verdict("node-1", "").verdict == Check.PASS
