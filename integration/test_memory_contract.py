"""What each way in which a rank's memory gets out of it and back promises: every page is as it was, at every moment at which
something fails or is killed the rank goes on with it, and a retry succeeds.

A new way is added to HOST or DEVICE, and to nothing else. What is special about one is in a file of its own: test_precopy.py,
test_hold.py, test_offload.py, test_shared_device_memory.py, test_job_twins.py, test_job_device_memory.py.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.configuring import configured
from integration.gpu_nodes import GpuCluster
from integration.harness import PATIENCE_S, SHORT_LEASE, Asked, Cluster, Job, until
from integration.job_commands import ask, reaching
from integration.offloads import LARGE, LARGE_MIB, MIB, SOURCE, TARGET, UNDONE
from integration.test_moves import uninterrupted
from snapshotd.runtime.faults import Point
from tests.cli import chrome_trace
from tests.kernel import needs_page_scans

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900), needs_page_scans]

#: Of layouts.py.
HOST_BYTES = 60 << 20


@dataclass(frozen=True)
class Way:
    name: str
    taken: Callable[[dict[str, int]], bool]  # whether memory took this way, by the bytes of the parts
    settings: Mapping[str, Any] = field(default_factory=dict)  # of both daemons
    options: tuple[str, ...] = ()  # of `migrator move`
    job_options: tuple[str, ...] = ()  # of `migrator run`
    arguments: tuple[str, ...] = ()  # of the job
    is_snapshot: bool = False
    gpu_mib: int = 0  # memory of the source's GPU, if there must not be more

    def __str__(self) -> str:
        return self.name


HOST = (
    Way("criu", lambda of: of["criu-restore"] > HOST_BYTES > of["place-memory"], {"send_beside_criu": False}),
    Way("beside-criu", lambda of: of["beside"] > 0 and of["place-memory"] > HOST_BYTES),
    Way("precopy", lambda of: of["precopied"] > HOST_BYTES < of["place-memory"], options=("--precopy-limit", "100")),
    Way("twin", lambda of: of["save-host"] > HOST_BYTES, is_snapshot=True),
    Way("into-image", lambda of: "save-host" not in of, {"snapshot_copy_on_write": False}, is_snapshot=True),
)
_BIG = LARGE_MIB * MIB
_SHARED: dict[str, Any] = {"job_options": ("--device-memory", "shared"), "arguments": ("--shared", "2")}
SHARED = (
    Way("shared-held", lambda of: "close-shared" in of and of["offload"] == of["refill"] >= _BIG, **_SHARED),
    Way(
        "shared-files",
        lambda of: "close-shared" in of and of["offload"] == of["refill"] >= _BIG,
        {"hold_device_memory": False},
        **_SHARED,
    ),
    Way(
        "shared-on-gpu",
        lambda of: "close-shared" in of and of["give-back"] == of["save"] >= _BIG,
        **_SHARED,
        is_snapshot=True,
    ),
)
DEVICE = (
    Way("held", lambda of: of["offload"] == of["refill"] >= _BIG),
    Way("files", lambda of: of["offload"] == of["refill"] >= _BIG, {"hold_device_memory": False}),
    Way(
        "driver", lambda of: "offload" not in of and of["checkpoint"] >= _BIG, job_options=("--device-memory", "driver")
    ),
    Way("copy-on-gpu", lambda of: of["give-back"] == of["save"] >= _BIG, is_snapshot=True),
    Way("copy-in-host", lambda of: of["copy-out"] == of["save"] >= _BIG, is_snapshot=True, gpu_mib=200),
    *SHARED,
)
_REFILLED = {"held", "files", "shared-held", "shared-files"}
#: Where a move, or a snapshot, fails or loses a daemon. Host memory gets nowhere before the freeze, but for the third way.
_MOVES = [(SOURCE, Point.FREEZE), (SOURCE, Point.DUMPING), (SOURCE, Point.STREAM), (TARGET, Point.RESTORED)]
_SNAPSHOTS = [(SOURCE, Point.FREEZE), (SOURCE, Point.DUMPING), (SOURCE, Point.CONTINUE)]
_ON_GPU = [(SOURCE, Point.OFFLOADED), (SOURCE, Point.CHECKPOINTED)]
_MORE = {
    "beside-criu": [(TARGET, Point.PLACING)],
    "precopy": [(SOURCE, Point.PRECOPIED_ROUND), (TARGET, Point.PLACING)],
    "twin": [(SOURCE, Point.TWINNED), (SOURCE, Point.COPYING), (SOURCE, Point.COPIED)],
    "copy-on-gpu": [(SOURCE, Point.TAKEN_BACK), (SOURCE, Point.SAVING), (SOURCE, Point.SAVED)],
    "copy-in-host": [(SOURCE, Point.SAVING), (SOURCE, Point.SAVED)],
    "shared-on-gpu": [(SOURCE, Point.TAKEN_BACK), (SOURCE, Point.SAVED)],
}


def cases(arriving: Point) -> list[Any]:
    """All ways at all points; `arriving` is that of a target to which memory is being sent."""
    return [
        pytest.param(way, node, point, id=f"{way}-{point}")
        for way in (*HOST, *DEVICE)
        for node, point in (
            *(_SNAPSHOTS if way.is_snapshot else (*_MOVES, (TARGET, arriving))),
            *(_ON_GPU if way in DEVICE else ()),
            *([(TARGET, Point.CUDA_RESTORED)] if way in DEVICE and not way.is_snapshot else ()),
            *([(TARGET, Point.REFILLED)] if way.name in _REFILLED else ()),
            *([(TARGET, Point.ACTIVATED)] if way.name in _REFILLED and arriving is Point.RECEIVING else ()),
            *([(SOURCE, Point.SHARED_CLOSED)] if way in SHARED else ()),
            *_MORE.get(way.name, ()),
        )
    ]


class Trip:
    """A rank, and its memory on one way."""

    def __init__(self, way: Way, nodes: Cluster, gpus: GpuCluster | None) -> None:
        self.way, self.nodes, self.gpus = way, nodes, gpus
        self.end = nodes.folder / "end-of-contract"
        self.end.unlink(missing_ok=True)
        self.trace = nodes.folder / "trace-of-contract.json"
        self.at = SOURCE
        self.job = self._start()
        self.job.await_lines(5)

    def _start(self) -> Job:
        options: dict[str, Any] = {"options": self.way.job_options}
        if self.gpus is None:
            return self.nodes.workload(SOURCE, "layouts.py", "--end-file", str(self.end), "--pace-s", "0.05", **options)
        if self.way.gpu_mib:
            self.gpus.nodes[SOURCE].change(memory_mib=self.way.gpu_mib)
        return self.gpus.job(SOURCE, *LARGE, "--threads", "1", *self.way.arguments, pace_s=0.05, **options)

    @property
    def to(self) -> str:
        return TARGET if self.at == SOURCE else SOURCE

    def attempt(self, *more: str, expect: int = 0) -> dict[str, Any]:
        if self.way.is_snapshot:
            return ask(self.nodes, "snapshot", self.job.name, expect=expect)
        return self.nodes.move(self.job, self.to, expect=expect, more=(*self.way.options, *more))

    def succeeds(self) -> None:
        """On the way that it is meant to take. Memory that a child shares at that moment takes another one, so that is tried
        again."""
        for _ in range(4):
            if self._succeeds():
                return
        assert self._succeeds()

    def _succeeds(self) -> bool:
        self.trace.unlink(missing_ok=True)
        answer = self.attempt("--trace", str(self.trace))
        self.at = self.at if self.way.is_snapshot else self.to
        beside = chrome_trace.read(self.trace).named("send large memory") if self.trace.exists() else []
        assert answer["warnings"] == [], answer
        parts = {part["name"]: part["bytes"] for part in answer["parts"]}
        more = {"precopied": answer.get("precopied_bytes", 0), "beside": len(beside)}
        taken = self.way.taken(Counter({**parts, **more}))
        assert taken or self.way in HOST, (answer, beside)
        self.job.await_progress(3)
        return taken

    def comes_back(self) -> None:
        """From the last snapshot, after the rank was killed. A move has brought it back already."""
        if self.way.is_snapshot:
            self.kill()
            ask(self.nodes, "rollback", self.job.name)
            self.job.await_progress(3)

    def kill(self) -> None:
        (pid,) = [pid for pid in self.nodes.processes_of(self._marker) if self._is_first(pid)]
        os.kill(pid, signal.SIGKILL)

    @property
    def _marker(self) -> str:
        return self.end.name if self.gpus is None else f"{self.job.name}.end"

    def _is_first(self, pid: int) -> bool:
        """Not a child that the rank has begun a moment ago, and that may have ended."""
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
        return parent not in self.nodes.processes_of(self._marker)

    def killed_at(self, node: str, point: Point) -> AbstractContextManager[Asked]:
        """It is asked for; the block begins when that node's daemon has died at the point."""
        asked: tuple[str, ...] = ("job", "snapshot", self.job.name)
        if not self.way.is_snapshot:
            asked = ("move", "--job", self.job.name, "--rank", "0", "--to", self.to, *self.way.options)
        return reaching(self.nodes, node, point, "kill", *asked, *SHORT_LEASE)

    def ends_well(self) -> None:
        """Each step once, with the same results as in an undisturbed run, and nothing is left."""
        if self.gpus is not None:
            self.gpus.ends_well(self.job)
            return
        steps = self.job.end_soon(self.end)
        assert self.job.finish() == 0, self.job.text()[-500:]
        assert self.job.text() == uninterrupted("layouts.py", "--steps", str(steps), "--pace-s", "0")
        until("nothing to be left", lambda: not self.nodes.leftovers())


@pytest.fixture
def trip(way: Way, request: pytest.FixtureRequest) -> Iterator[Trip]:
    gpus: GpuCluster | None = request.getfixturevalue("lab") if way in DEVICE else None
    nodes: Cluster = gpus.cluster if gpus is not None else request.getfixturevalue("nodes")
    with configured(nodes, (SOURCE, TARGET) if way.settings else (), way.settings):
        yield Trip(way, nodes, gpus)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [*HOST, *DEVICE], ids=str)
def test_memory_comes_there_and_back_as_it_was(trip: Trip) -> None:
    for _ in range(2):
        trip.succeeds()
        trip.comes_back()
    trip.ends_well()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("way", "node", "point"),
    # A failed connection is replaced by another one. That the rank goes on is tried again. Without its rounds a move goes on.
    [case for case in cases(Point.SEAL) if case.values[2] not in (Point.CONTINUE, Point.PRECOPIED_ROUND)],
)
def test_failure_leaves_the_memory_where_it_was_and_a_retry_succeeds(trip: Trip, node: str, point: Point) -> None:
    trip.nodes.fault(node, point, "fail")
    assert "fault injected" in trip.attempt(expect=UNDONE)["reason"]
    trip.job.await_progress(3)
    trip.succeeds()
    trip.comes_back()
    trip.ends_well()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("way", "node", "point"), cases(Point.RECEIVING))
def test_killed_daemon_leaves_the_memory_where_it_was_and_a_retry_succeeds(trip: Trip, node: str, point: Point) -> None:
    with trip.killed_at(node, point) as asked:
        until("the daemon to die", lambda: trip.nodes.lab.daemon_pid(node) is None)
        trip.nodes.lab.start_daemon(node, timeout_s=PATIENCE_S)
    assert asked.code in ({0, UNDONE} if point in {Point.RESTORED, Point.ACTIVATED} else {UNDONE}), (
        f"{asked.answer} {asked.errors}\n{trip.nodes.logs()}"
    )
    trip.at = trip.to if asked.code == 0 else trip.at
    trip.job.await_progress(3)
    trip.succeeds()
    trip.comes_back()
    trip.ends_well()
