"""The fake NCCL behaves as NCCL does. The shim's tests depend on it, so it is tested like the product.

Ranks are real processes (``nccl_rank``), which assert what they must see. The tests start them and check their exit
statuses. A rank that hangs is killed when the test's limit is reached, and its last output is shown.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.fakes.nccl_build import OLD, build

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

# What torch 2.11 imports.
IMPORTED_BY_TORCH = {
    *(
        "ncclAllGather",
        "ncclAllReduce",
        "ncclAlltoAll",
        "ncclBcast",
        "ncclBroadcast",
        "ncclReduce",
        "ncclReduceScatter",
    ),
    *("ncclSend", "ncclRecv", "ncclCommAbort", "ncclCommCount", "ncclCommDeregister", "ncclCommDestroy"),
    *("ncclCommFinalize", "ncclCommGetAsyncError", "ncclCommInitAll", "ncclCommInitRank", "ncclCommInitRankConfig"),
    *("ncclCommInitRankScalable", "ncclCommRegister", "ncclCommShrink", "ncclCommSplit", "ncclCommUserRank"),
    *("ncclCommWindowRegister", "ncclCommWindowDeregister", "ncclDevCommCreate", "ncclDevCommDestroy"),
    *("ncclGetErrorString", "ncclGetLastError", "ncclGetUniqueId", "ncclGetVersion", "ncclGroupStart", "ncclGroupEnd"),
    *("ncclGroupSimulateEnd", "ncclMemAlloc", "ncclMemFree", "ncclRedOpCreatePreMulSum", "ncclRedOpDestroy"),
}
NEWER_THAN_2_18 = {
    *("ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister", "ncclGroupSimulateEnd"),
    *("ncclCommInitRankScalable", "ncclCommShrink", "ncclCommWindowRegister", "ncclCommWindowDeregister"),
    *("ncclAlltoAll", "ncclGather", "ncclScatter", "ncclDevCommCreate", "ncclDevCommDestroy"),
}

Environment = Mapping[str, str]


@pytest.fixture(scope="module")
def library() -> Path:
    return build() / "libnccl.so.2"


@pytest.fixture(scope="module")
def old_library() -> Path:
    return build(OLD) / "libnccl.so.2"


class Ranks:
    """The processes of one test. Processes left at its end are killed."""

    def __init__(self, library: Path, meeting: Path) -> None:
        self.library = library
        self.meeting = meeting
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, scenario: str, nranks: int, environment: Environment) -> None:
        program = [sys.executable, "-m", "tests.fakes.nccl_rank", str(self.library), str(self.meeting), scenario]
        for rank in range(nranks):
            with self.output(rank).open("w") as output:
                process = subprocess.Popen(
                    [*program, str(rank), str(nranks)],
                    cwd=REPOSITORY,
                    env={**os.environ, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def output(self, rank: int) -> Path:
        return self.meeting / f"output-{rank}"

    def wait(self, *, though_some_fail: bool = False) -> list[tuple[int, str]]:
        """Returns the exit status and output of each rank. When one fails, the others, which may wait for it, are killed."""
        while None in (ends := [process.poll() for process in self.processes]):  # polls all: any may have failed
            if not though_some_fail and any(ends):
                self.kill()
            time.sleep(0.005)
        return [(process.returncode, self.output(rank).read_text()) for rank, process in enumerate(self.processes)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def ranks(library: Path, tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(library, tmp_path)
    yield started
    started.kill()


def all_right(ranks: Ranks, scenario: str, nranks: int, **environment: str) -> None:
    ranks.start(scenario, nranks, {"FAKE_NCCL_ADDR": "127.0.0.1", **environment})
    ends = ranks.wait()
    assert [status for status, _ in ends] == [0] * nranks, "\n".join(said for _, said in ends)


@pytest.mark.parametrize("nranks", [1, 2, 3, 8])
@pytest.mark.parametrize("scenario", ["operations.reductions", "operations.moves"])
def test_results_are_exact(ranks: Ranks, scenario: str, nranks: int) -> None:
    all_right(ranks, scenario, nranks)


@pytest.mark.parametrize(
    ("scenario", "nranks"),
    [
        ("operations.scaled_sums", 3),
        ("operations.point_to_point", 2),
        ("operations.point_to_point", 5),
        ("operations.large_both_ways", 3),
        ("operations.waits_for_all", 3),
        ("operations.streams", 2),
        ("operations.streams", 4),
        ("making.splits", 2),
        ("making.splits", 5),
        ("making.shrinks", 2),
        ("making.shrinks", 4),
        ("making.non_blocking", 2),
        ("making.non_blocking", 3),
        ("ending.leaves_nothing", 2),
        ("ending.leaves_nothing", 4),
        ("ending.destroy_waits", 3),
        ("ending.finalize_is_collective", 3),
        ("ending.abort_while_a_peer_hangs", 2),
        ("operations.mismatch", 2),
        ("operations.mismatch", 3),
        ("making.all_in_one_process", 1),
        ("operations.groups", 3),
        ("making.attachments", 2),
        ("making.configs", 2),
        ("making.stale_identity", 1),
        ("making.wrong_init", 2),
    ],
)
def test_scenario_passes_on_all_ranks(ranks: Ranks, scenario: str, nranks: int) -> None:
    all_right(ranks, scenario, nranks)


def test_waiting_destroy_can_be_aborted(ranks: Ranks) -> None:
    all_right(ranks, "ending.abort_while_a_peer_hangs", 2, ABORT_DURING_DESTROY="1")


def test_default_address_is_that_of_the_host(ranks: Ranks) -> None:
    all_right(ranks, "operations.moves", 2, FAKE_NCCL_ADDR="")


def test_ranks_communicate_over_ipv6(ranks: Ranks) -> None:
    all_right(ranks, "operations.moves", 2, FAKE_NCCL_ADDR="::1")


@pytest.mark.parametrize(
    ("fault", "point", "result"),
    [
        ("init:1:1:fail", "init", "SYSTEM_ERROR"),
        ("init:1:1:fail-remote", "init", "REMOTE_ERROR"),
        ("allreduce:1:2:fail-internal", "call", "INTERNAL_ERROR"),
        ("allreduce:*:2:fail-cuda", "call", "UNHANDLED_CUDA_ERROR"),
        ("allreduce.run:1:2:fail", "run", "SYSTEM_ERROR"),
        ("allreduce.run:1:2:fail-remote", "run", "REMOTE_ERROR"),
        ("split:1:1:fail", "split", "SYSTEM_ERROR"),
        ("finalize:1:1:fail", "finalize", "SYSTEM_ERROR"),
        ("destroy:1:1:fail-usage", "destroy", "INVALID_USAGE"),
        ("abort:1:1:fail", "abort", "SYSTEM_ERROR"),
        ("getuniqueid:*:1:fail", "id", "SYSTEM_ERROR"),
    ],
)
def test_injected_failure_is_reported_and_the_next_try_succeeds(
    ranks: Ranks, fault: str, point: str, result: str
) -> None:
    all_right(ranks, "faults.survives_failure", 2, FAKE_NCCL_FAULT=fault, POINT=point, RESULT=result)


def test_injected_failure_of_one_rank_of_a_process_ends_the_others(ranks: Ranks) -> None:
    all_right(ranks, "faults.one_of_many_fails", 1, FAKE_NCCL_FAULT="init:1:1:fail")


@pytest.mark.parametrize("point", ["init", "allreduce", "allreduce.run", "destroy"])
def test_injected_hang_ends_when_its_entry_is_removed(ranks: Ranks, tmp_path: Path, point: str) -> None:
    all_right(ranks, "faults.hangs_until_called_off", 2, FAKE_NCCL_FAULT_FILE=str(tmp_path / "faults"), POINT=point)


@pytest.mark.parametrize("point", ["allreduce", "allreduce.run"])
def test_injected_hang_ends_on_abort(ranks: Ranks, point: str) -> None:
    all_right(ranks, "faults.hangs_until_aborted", 2, FAKE_NCCL_FAULT=f"{point}:1:*:hang", POINT=point)


@pytest.mark.parametrize("point", ["allreduce", "allreduce.run"])
def test_injected_crash_is_seen_by_the_other_ranks(ranks: Ranks, point: str) -> None:
    environment = {"FAKE_NCCL_ADDR": "127.0.0.1", "FAKE_NCCL_FAULT": f"{point}:1:1:crash"}
    ranks.start("faults.sees_a_crash", 3, environment)
    statuses = [status for status, _ in ranks.wait(though_some_fail=True)]
    assert statuses == [0, -signal.SIGKILL, 0]


def test_fault_that_cannot_be_parsed_aborts_the_process(ranks: Ranks) -> None:
    ranks.start("making.attachments", 1, {"FAKE_NCCL_FAULT": "destroy:1:explode"})
    ((status, said),) = ranks.wait()
    assert status == -signal.SIGABRT
    assert "'destroy:1:explode' is not point:rank:count:action" in said


def test_own_exports_are_called_through_the_preloaded_library(ranks: Ranks, library: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    preload = str(library.parent / "libnote_calls.so")
    all_right(ranks, "making.reenters", 1, LD_PRELOAD=preload, NOTE_CALLS=str(notes))
    calls = [line.split() for line in notes.read_text().splitlines()]
    handles = (tmp_path / "handles").read_text().split()
    names = [name for name, _ in calls]
    assert names.count("ncclGetUniqueId") == 1
    assert names.count("ncclCommInitRank") == 2
    assert [handle for name, handle in calls if name == "ncclBroadcast"] == handles
    assert {handle for name, handle in calls if name == "ncclCommGetAsyncError"} == set(handles)


def exported(library: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" T (\w+)$", listed, re.MULTILINE))


def test_exports_are_nccls_and_nothing_else(library: Path, old_library: Path) -> None:
    symbols = exported(library)
    assert symbols >= IMPORTED_BY_TORCH
    assert all(re.fullmatch(r"nccl[A-Z]\w+", symbol) for symbol in symbols)
    assert symbols - exported(old_library) == NEWER_THAN_2_18


def test_older_version_works_without_the_newer_symbols(old_library: Path, tmp_path: Path) -> None:
    old = Ranks(old_library, tmp_path)
    try:
        all_right(old, "operations.reductions", 2)
    finally:
        old.kill()


def test_version_is_that_of_the_build_or_of_the_environment(library: Path, old_library: Path, tmp_path: Path) -> None:
    for path, environment, expected in (
        (library, {}, "22809"),
        (old_library, {}, "21805"),
        (library, {"FAKE_NCCL_VERSION": "21903"}, "21903"),
    ):
        asked = Ranks(path, tmp_path)
        try:
            all_right(asked, "making.version", 1, EXPECTED_VERSION=expected, **environment)
        finally:
            asked.kill()


def unrandomised() -> list[str]:
    """A command prefix that disables address randomisation, if allowed: it may conflict with ThreadSanitizer's memory."""
    prefix = ["setarch", "-R"]
    return prefix if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0 else []


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_ranks_are_clean_under_sanitizers(sanitizer: str) -> None:
    """Leaks are looked for with two ranks only: on arm64 that takes seconds for each rank, and more would find no others."""
    folder = build(sanitizer=sanitizer)
    for nranks in (2, 5, 8):
        command = [*unrandomised(), str(folder / "check_ranks"), str(nranks)]
        leaks = {} if nranks == 2 else {"ASAN_OPTIONS": "detect_leaks=0"}
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **leaks})
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "Sanitizer" not in ran.stderr
