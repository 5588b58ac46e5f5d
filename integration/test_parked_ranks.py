"""Device memory that is parked: ranks whose shim backs it move between nodes with stand-in GPUs, and are undone.

The real daemons, CRIU, shim, helper and stripes; only the driver is not real. The same on a real GPU is integration/gpu.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from integration.gpu_nodes import STEPS, GpuCluster
from integration.harness import Asked, Job, cluster, until
from snapshotd.api.errors import SnapshotError
from snapshotd.inprocess import devmem, shimctl
from snapshotd.moves.device import gpu
from snapshotd.proc.tree import Process
from snapshotd.runtime.faults import Point
from tests.fakes.cuda_fake import GpuNode, gpus

pytestmark = pytest.mark.timeout(180)

SOURCE, OTHER, TARGET = "node-1", "node-2", "spare-1"
UNDONE, ENDED = 11, 21
MIB = 1 << 20
#: Enough on the device that it is worth parking, and not more: every step hashes all of it.
LARGE_MIB = 40
LARGE = ("--mib", str(LARGE_MIB), "--blocks", "4", "--api", "runtime")


@pytest.fixture(scope="module")
def made() -> Iterator[GpuCluster]:
    folder = Path(__file__).parent / ".work" / "parked-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder, "parked") as nodes:
        yield GpuCluster(nodes, folder / "nodes")


@pytest.fixture
def lab(made: GpuCluster) -> Iterator[GpuCluster]:
    yield made
    made.reset()


def start(lab: GpuCluster, *arguments: str, steps: int = 40, pace_s: float = 0.05) -> Job:
    return lab.job(SOURCE, *arguments, steps=steps, pace_s=pace_s)


def uninterrupted(folder: Path, *arguments: str, steps: int = 40) -> str:
    """What the job prints on a GPU of its own, without a move and without the shim."""
    alone = GpuNode(folder / "alone", gpus("alone"))
    command = [*STEPS, "--steps", str(steps), "--pace-s", "0", *arguments]
    done = subprocess.run(command, env={**os.environ, **alone.environment}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ends_well(lab: GpuCluster, job: Job, folder: Path, *arguments: str, steps: int = 40) -> None:
    assert job.finish(90) == 0, f"{job.text()[-500:]}\n{lab.cluster.logs()}"
    assert job.text() == uninterrupted(folder, *arguments, steps=steps)
    try:
        until("nothing of it is left", lambda: not lab.cluster.leftovers(), 20)
    except AssertionError as error:
        raise AssertionError(f"{lab.cluster.leftovers()}\n{lab.cluster.logs()}") from error


def gpu_uses(lab: GpuCluster, node: str) -> list[int]:
    """What a node shows of its GPUs may be a second old."""
    time.sleep(1.1)
    return [gpu["memory_bytes"] - gpu["memory_free_bytes"] for gpu in lab.shown(node)["gpus"]]


def left_on_the_gpu(lab: GpuCluster, node: str, used: int) -> int:
    """Of what its GPU held, once most of it is parked: that is what the stand-in's checkpoint will copy."""
    (left,) = gpu_uses(lab, node)
    assert left < used - 30 * MIB
    return left


def part(told: dict[str, Any], name: str) -> dict[str, Any]:
    found = [each for each in told["parts"] if each["name"] == name]
    assert len(found) == 1, told["parts"]
    return dict(found[0])


# ---------------------------------------------------------------- moves


@pytest.mark.timeout(300)  # six moves
@pytest.mark.parametrize(
    "arguments",
    [
        LARGE,
        ("--mib", "40", "--api", "segments"),
        ("--mib", "60", "--blocks", "6", "--mixed"),
        ("--mib", "40", "--api", "driver", "--threads", "2", "--children", "1"),
    ],
    ids=["runtime", "segments", "mixed", "driver"],
)
def test_there_and_back_three_times(lab: GpuCluster, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """It goes on until all is done: how many steps that are depends on how busy the machine is."""
    enough = lab.cluster.folder / "enough"
    enough.unlink(missing_ok=True)
    job = start(lab, *arguments, "--until", str(enough), steps=100_000, pace_s=0.1)
    at = SOURCE
    for to in (TARGET, SOURCE) * 3:
        job.await_progress(3)
        (used,) = gpu_uses(lab, at)
        with lab.cluster.moving(job, to, at, Point.PARKED_MEMORY) as asked:
            left = left_on_the_gpu(lab, at, used)
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        told = asked.answer
        assert told["warnings"] == []
        size = part(told, "park-out")["bytes"]
        assert size >= 32 * MIB
        assert left <= used - size
        assert part(told, "refill")["bytes"] == size
        assert abs(part(told, "checkpoint")["bytes"] - left) < MIB
        assert abs(told["device_bytes"] - used) < MIB
        assert told["longest_part"]["name"] in {each["name"] for each in told["parts"]} - {"prepare", "empty-cache"}
        job.await_progress(2)
        assert gpu_uses(lab, at) == [0]
        at = to
    enough.touch()
    job.finish(90)
    ends_well(lab, job, tmp_path, *arguments, steps=sum(line.startswith("step ") for line in job.lines()))


def test_what_is_zero_is_not_sent(lab: GpuCluster, tmp_path: Path) -> None:
    arguments = ("--mib", "8", "--zero-mib", "96", "--api", "runtime")
    job = start(lab, *arguments, steps=25)
    for to in (TARGET, SOURCE):
        job.await_progress(3)
        told = lab.cluster.move(job, to)
        moved = part(told, "park-out")["bytes"]
        assert moved == part(told, "refill")["bytes"] == 104 * MIB
        assert told["bytes"] < moved // 2, "the image is in it too"
        assert told["bytes"] == journalled_bytes(lab, told["move"])
    ends_well(lab, job, tmp_path, *arguments, steps=25)


def test_a_rank_that_begins_to_share_before_it_is_frozen_goes_on(lab: GpuCluster, tmp_path: Path) -> None:
    share = lab.cluster.folder / f"share-{time.monotonic_ns()}"
    arguments = (*LARGE, "--export-when", str(share))
    job = start(lab, *arguments)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.READY) as asked:  # preflight has seen nothing of it
        share.touch()
        job.await_lines(len(job.lines()) + 3)
    assert asked.code == UNDONE
    assert "has begun to share device memory" in asked.answer["reason"], asked.answer
    refused = lab.cluster.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET)
    assert "gpu-ipc" in refused.stdout
    ends_well(lab, job, tmp_path, *arguments)


def journalled_bytes(lab: GpuCluster, move: str) -> int:
    """What the source says it has sent, which does not count what its target made from nothing."""
    ended = json.loads(lab.cluster.migrator("history", "--json").stdout)["moves"]
    return next(int(each["bytes"]) for each in ended if each["move"] == move)


def test_nothing_of_the_job_runs_while_its_memory_is_out(lab: GpuCluster, tmp_path: Path) -> None:
    for node, point in ((SOURCE, Point.PARKED_MEMORY), (TARGET, Point.REFILLED)):
        job = start(lab, *LARGE, "--threads", "2", pace_s=0.01)
        job.await_lines(5)
        with lab.cluster.moving(job, TARGET, node, point) as asked:
            before = job.lines()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(1.0)
            assert job.lines() == before, f"it ran at {point}"
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        ends_well(lab, job, tmp_path, *LARGE, "--threads", "2")


def test_the_driver_keeps_what_the_launcher_did_not_ask_for(lab: GpuCluster, tmp_path: Path) -> None:
    job = lab.job(SOURCE, *LARGE, steps=40, pace_s=0.05, options=("--device-memory", "driver"))
    job.await_lines(5)
    told = lab.cluster.move(job, TARGET)
    assert not {"park-out", "refill"} & {each["name"] for each in told["parts"]}
    ends_well(lab, job, tmp_path, *LARGE)


def test_check_says_who_moves_it(lab: GpuCluster) -> None:
    job = start(lab, *LARGE, steps=1000)
    job.await_lines(3)
    done = lab.cluster.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert f"SNAPSHIM_DEVICE_MEMORY=offload: {LARGE_MIB} MiB in 4 blocks" in checks["gpu-device-memory"]["reason"]
    assert checks["gpu-parked-room"]["verdict"] == "pass"


# ---------------------------------------------------------------- another way than the best one


@contextlib.contextmanager
def only_grpc(lab: GpuCluster, node: str) -> Iterator[None]:
    """The network lets connections to the node's daemon through, and no others."""
    rule = "iifname != lo tcp flags & (syn | ack) == syn tcp dport != 7070 reject with tcp reset"
    table = f"table inet fence {{\n chain in {{\n type filter hook input priority 0;\n {rule}\n }}\n}}\n"

    def filtered(commands: str) -> None:
        script = f"from snapshotd.net import nft; nft.apply({commands!r})"
        assert lab.lab.spawn(node, [sys.executable, "-c", script]).wait(30) == 0

    filtered(table)
    try:
        yield
    finally:
        filtered("delete table inet fence")


def test_without_a_lane_it_follows_the_image(lab: GpuCluster, tmp_path: Path) -> None:
    job = start(lab, *LARGE)
    job.await_lines(5)
    with only_grpc(lab, TARGET):
        told = lab.cluster.move(job, TARGET)
    assert part(told, "park-out")["bytes"] == part(told, "refill")["bytes"] == LARGE_MIB * MIB
    assert "parked device memory follows the image" in told["warnings"][0]
    ends_well(lab, job, tmp_path, *LARGE)


def children(lab: GpuCluster, node: str, module: str) -> list[int]:
    """The processes that a node's daemon has started to run this module, or any."""
    found = []
    for task in Path(f"/proc/{lab.lab.daemon_pid(node)}/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not module or module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(pid))
    return found


@contextlib.contextmanager
def stopped_senders(lab: GpuCluster, job: Job, then: Point) -> Iterator[tuple[list[int], Asked]]:
    """A move that waits at `then` on its source, whose stripes are parked and have not left: who sends them is stopped."""
    lab.cluster.fault(SOURCE, Point.LOCKED, "wait")
    with lab.cluster.begin_move(job, TARGET) as process:
        try:
            until("it is locked", lambda: lab.cluster.fired(SOURCE))
            senders = children(lab, SOURCE, "snapshotd.transport.device.send")
            assert senders
            for pid in senders:
                os.kill(pid, signal.SIGSTOP)
            folder = lab.cluster.run_dir(SOURCE)
            lab.cluster.fault(SOURCE, then, "wait")
            (folder / f"{Point.LOCKED}.go").touch()
            until(f"it is at {then}", lambda: lab.cluster.fired(SOURCE))
            asked = Asked()
            yield senders, asked
            (folder / f"{then}.go").touch()
            out, asked.errors = process.communicate(timeout=90)
            asked.code, asked.answer = process.returncode, json.loads(out)
        finally:
            process.kill()


def test_a_lane_that_breaks_when_all_is_parked(lab: GpuCluster, tmp_path: Path) -> None:
    """The files follow the image, and nothing else of the lane is sent beside them."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    with stopped_senders(lab, job, Point.BEFORE_DUMP) as (senders, asked):
        os.kill(senders[0], signal.SIGKILL)
        until("the others end too", lambda: not set(senders) & set(children(lab, SOURCE, "")))
    assert asked.code == 0, f"{asked.answer}{asked.errors}{lab.cluster.logs()}"
    assert part(asked.answer, "refill")["bytes"] == LARGE_MIB * MIB
    ends_well(lab, job, tmp_path, *LARGE)


def test_a_thread_that_does_not_leave_the_driver(lab: GpuCluster, tmp_path: Path) -> None:
    """Nobody is parked in there before it is locked: the others are let go, and all are locked out first. Then those that
    allocate are parked in the middle of it; they are let go once more, and parked somewhere else."""
    arguments = (*LARGE, "--churn", "--threads", "3")
    job = start(lab, *arguments, pace_s=0.0, steps=150)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.BEFORE_FREEZE) as asked:
        lab.nodes[SOURCE].fault("create", f"slow:{(gpu.LOCK_S + 2) * 1000:.0f}")
        until("it is in the driver", lambda: not lab.nodes[SOURCE].faults())
    assert asked.code == 0, f"{asked.answer} {asked.errors}"
    said = said_of(lab, SOURCE, asked.answer["move"])
    for words in ("locked before they are parked", "let go to try again"):
        assert any(words in line for line in said), lab.cluster.logs()
    assert part(asked.answer, "refill")["bytes"] >= LARGE_MIB * MIB
    job.await_progress(3)
    lab.cluster.move(job, SOURCE)
    ends_well(lab, job, tmp_path, *arguments, steps=150)


def said_of(lab: GpuCluster, node: str, move: str) -> list[str]:
    """What a node's daemon has logged of this move."""
    return [line for line in lab.lab.daemon_log(node).read_text(errors="replace").splitlines() if f" {move} " in line]


@pytest.mark.parametrize("operation", ["copy", "pin"])
def test_a_copy_that_fails_is_left_to_the_driver(lab: GpuCluster, tmp_path: Path, operation: str) -> None:
    job = start(lab, *LARGE)
    job.await_lines(5)
    lab.nodes[SOURCE].fault(operation, "fail:CUDA_ERROR_UNKNOWN", once=False)
    told = lab.cluster.move(job, TARGET)
    assert "refill" not in {each["name"] for each in told["parts"]}
    assert part(told, "checkpoint")["bytes"] >= LARGE_MIB * MIB
    assert "the driver's checkpoint carries the device memory" in told["warnings"][0]
    lab.nodes[SOURCE].clear_faults()
    ends_well(lab, job, tmp_path, *LARGE)


# ---------------------------------------------------------------- undo


@pytest.mark.parametrize(
    ("node", "point"),
    [
        (SOURCE, Point.PARKED_MEMORY),
        (SOURCE, Point.CHECKPOINTED),
        (SOURCE, Point.FREEZE),
        (SOURCE, Point.STREAM),
        (TARGET, Point.CUDA_RESTORED),
        (TARGET, Point.REFILLED),
    ],
)
def test_undone_from_every_point(lab: GpuCluster, tmp_path: Path, node: str, point: Point) -> None:
    job = start(lab, *LARGE, "--threads", "1")
    job.await_lines(5)
    lab.cluster.fault(node, point, "fail")
    told = lab.cluster.move(job, TARGET, expect=UNDONE)
    assert "fault injected" in told["reason"]
    job.await_progress(3)
    lab.cluster.move(job, TARGET)  # a plain retry succeeds
    ends_well(lab, job, tmp_path, *LARGE, "--threads", "1")


@pytest.mark.parametrize(
    ("node", "point"),
    [
        (SOURCE, Point.PARKED_MEMORY),
        (SOURCE, Point.CHECKPOINTED),
        (SOURCE, Point.DUMPING),
        (SOURCE, Point.STREAM),
        (TARGET, Point.CUDA_RESTORED),
        (TARGET, Point.REFILLED),
        (TARGET, Point.ACTIVATED),
    ],
)
def test_a_daemon_is_killed(lab: GpuCluster, tmp_path: Path, node: str, point: Point) -> None:
    job = start(lab, *LARGE, "--threads", "1", steps=50)
    job.await_lines(5)
    lab.cluster.fault(node, point, "kill")
    with lab.cluster.begin_move(job, TARGET, more=("--lease", "2")) as asked:
        until("the fault", lambda: lab.lab.daemon_pid(node) is None)
        lab.lab.start_daemon(node)
        out, errors = asked.communicate(timeout=90)
    expected = {0, UNDONE} if point == Point.ACTIVATED else {UNDONE}
    assert asked.returncode in expected, f"{out}{errors}{lab.cluster.logs()}"
    job.await_progress(3)
    ends_well(lab, job, tmp_path, *LARGE, "--threads", "1", steps=50)


@pytest.mark.parametrize("arrived", [True, False])
def test_a_target_is_restarted_between_seal_and_restore(lab: GpuCluster, tmp_path: Path, arrived: bool) -> None:
    """Stripes that are here are used; nobody waits for those that will never come."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    with contextlib.ExitStack() as stack:
        if arrived:
            asked = stack.enter_context(lab.cluster.moving(job, TARGET, SOURCE, Point.STREAM))
            images = lab.cluster.run_dir(TARGET) / "images"
            until("all is there", lambda: len(list(images.glob("m-*/device-*.done"))) == devmem.STRIPES)
        else:
            _, asked = stack.enter_context(stopped_senders(lab, job, Point.STREAM))
        lab.restart(TARGET)
    assert asked.code == (0 if arrived else UNDONE), f"{asked.answer}{asked.errors}{lab.cluster.logs()}"
    assert arrived or "did not arrive whole" in asked.answer["reason"]
    ends_well(lab, job, tmp_path, *LARGE)


def copying(lab: GpuCluster, node: str) -> int:
    """The process on this node whose device memory is being copied, and is neither all here nor all away."""
    for procs in lab.lab.layout.node_cgroup(node).rglob("cgroup.procs"):
        for pid in map(int, procs.read_text().split()):
            with contextlib.suppress(SnapshotError, OSError):
                mailbox = shimctl.find(Process.of(pid))
                memory = mailbox.device_memory() if mailbox is not None else None
                if memory is not None and memory.busy and any(memory.done):
                    return pid
    return 0


class Victim(StrEnum):
    SENDER = "sender"
    RECEIVER = "receiver"
    MIGRATOR = "migrator"
    SOURCE = "source's daemon"
    TARGET = "target's daemon"
    COPY = "process whose memory is copied"


@pytest.mark.parametrize(
    ("node", "victim", "codes"),
    [
        (SOURCE, Victim.SENDER, {0}),
        (SOURCE, Victim.RECEIVER, {0, UNDONE}),
        (SOURCE, Victim.MIGRATOR, {-signal.SIGKILL}),
        (SOURCE, Victim.SOURCE, {UNDONE}),
        (SOURCE, Victim.TARGET, {UNDONE}),
        (SOURCE, Victim.COPY, {ENDED}),
        (TARGET, Victim.MIGRATOR, {-signal.SIGKILL}),
        (TARGET, Victim.SOURCE, {0, UNDONE}),
        (TARGET, Victim.TARGET, {UNDONE}),
        (TARGET, Victim.COPY, {UNDONE}),
    ],
)
def test_killed_while_memory_is_copied(
    lab: GpuCluster, tmp_path: Path, node: str, victim: Victim, codes: set[int]
) -> None:
    job = start(lab, *LARGE, "--threads", "1")
    job.await_lines(5)
    lab.nodes[node].fault("copy", "slow:250", once=False)
    with lab.cluster.begin_move(job, TARGET, more=("--lease", "2")) as asked:
        copied = until("a copy is under way", lambda: copying(lab, node))
        daemon = {Victim.SOURCE: SOURCE, Victim.TARGET: TARGET}.get(victim)
        match victim:
            case Victim.SENDER:
                os.kill(children(lab, SOURCE, "snapshotd.transport.device.send")[0], signal.SIGKILL)
            case Victim.RECEIVER:
                os.kill(children(lab, TARGET, "snapshotd.transport.device.receive")[0], signal.SIGKILL)
            case Victim.MIGRATOR:
                asked.kill()
            case Victim.COPY:
                os.kill(copied, signal.SIGKILL)
        if daemon is not None:
            lab.restart(daemon)
        lab.nodes[node].clear_faults()
        out, errors = asked.communicate(timeout=90)
    assert asked.returncode in codes, f"{out}{errors}{lab.cluster.logs()}"
    if asked.returncode == UNDONE:
        assert json.loads(out)["where"] in {"running on source", "frozen on source"}
    if (node, victim) == (SOURCE, Victim.COPY):
        assert job.finish(60) != 0
        until("nothing of it is left", lambda: not lab.cluster.leftovers(), 20)
        return
    job.await_progress(3)
    ends_well(lab, job, tmp_path, *LARGE, "--threads", "1")


def fill_up(lab: GpuCluster, node: str) -> Job:
    """Somebody takes almost all of a node's GPU."""
    hog = lab.job(node, "--mib", "3900", "--blocks", "1", steps=1, pace_s=60)
    until("the GPU is full", lambda: gpu_uses(lab, node)[0] > 3900 * MIB)
    return hog


def test_a_target_whose_device_memory_was_taken(lab: GpuCluster, tmp_path: Path) -> None:
    arguments = ("--mib", "240", "--blocks", "2", "--api", "runtime")
    job = start(lab, *arguments, steps=15)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.PARKED_MEMORY) as asked:
        hog = fill_up(lab, TARGET)
    assert asked.code == UNDONE, f"{asked.answer}{asked.errors}"
    assert "device memory" in asked.answer["reason"], f"{asked.answer}{lab.cluster.logs()}"
    hog.kill()
    job.await_progress(3)
    ends_well(lab, job, tmp_path, *arguments, steps=15)


@pytest.mark.parametrize("point", [Point.PARKED_MEMORY, Point.STREAM])
def test_a_source_whose_device_memory_was_taken(lab: GpuCluster, tmp_path: Path, point: Point) -> None:
    """The undo finds the GPU full: the rank stays frozen, and goes on as soon as there is room, also in another life."""
    arguments = ("--mib", "240", "--blocks", "2", "--api", "runtime")
    job = start(lab, *arguments, steps=15)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, point) as asked:
        hog = fill_up(lab, SOURCE)
        lab.cluster.fault(TARGET, Point.BEFORE_RESTORE, "fail")
    assert asked.code == UNDONE, f"{asked.answer}{asked.errors}"
    assert asked.answer["where"] == "frozen on source"
    before = job.lines()
    lab.restart(SOURCE)
    until("it says so", lambda: any("device memory" in move["waiting_for"] for move in moves(lab)))
    assert job.lines() == before
    hog.kill()
    until("it goes on", lambda: len(job.lines()) > len(before) + 3)
    ends_well(lab, job, tmp_path, *arguments, steps=15)


def moves(lab: GpuCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(lab.cluster.migrator("status", "--json").stdout)["moves"]
    return found
