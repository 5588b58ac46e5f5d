"""What a reader of the health of a node gets: every event once, in order, and at once if it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Usage
from snapshotd.health import monitor
from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.host import Clock
from snapshotd.health.monitor import Monitor
from snapshotd.health.settings import CHECKS, Settings


def signal(subject: str) -> Signal:
    return Signal("gpu-ecc", subject, Severity.CRITICAL, "3 errors", "replace it", 3.0)


def made(folder: Path, kept_events: int = 100) -> Monitor:
    return Monitor("node-1", folder, Settings(), kept_events=kept_events)


async def test_a_node_without_alarms_answers_at_once(tmp_path: Path) -> None:
    health = await made(tmp_path).since(pb.GetHealthRequest(wait_s=30))
    assert (health.node, health.sequence, list(health.alarms), list(health.events)) == ("node-1", 0, [], [])
    assert (bool(health.epoch), health.more, health.pruned) == (True, False, False)


async def test_a_reader_that_was_away_gets_everything_once_in_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "PAGE_EVENTS", 3)
    await made(tmp_path).report([signal(f"gpu:{number}") for number in range(8)])
    node = made(tmp_path)  # restarted
    request, seen = pb.GetHealthRequest(), []
    while True:
        health = await node.since(request)
        seen += [event.sequence for event in health.events]
        request = pb.GetHealthRequest(epoch=health.epoch, after=health.sequence)
        if not health.more:
            break
    assert seen == list(range(1, 9))
    assert len(health.alarms) == 8
    assert list((await node.since(request)).events) == []


async def test_a_reader_that_was_away_too_long_is_told_so(tmp_path: Path) -> None:
    node = made(tmp_path, kept_events=4)
    epoch = (await node.since(pb.GetHealthRequest())).epoch
    await node.report([signal(f"gpu:{number}") for number in range(4)])
    assert not (await node.since(pb.GetHealthRequest(epoch=epoch))).pruned
    await node.report([signal(f"gpu:{number}") for number in range(4, 8)])
    health = await node.since(pb.GetHealthRequest(epoch=epoch, after=2))
    assert health.pruned
    assert [event.sequence for event in health.events] == [5, 6, 7, 8]
    assert not (await node.since(pb.GetHealthRequest(epoch=epoch, after=4))).pruned


async def test_a_reader_that_waits_gets_the_next_event(tmp_path: Path) -> None:
    node = made(tmp_path)
    known = await node.since(pb.GetHealthRequest())
    waiting = asyncio.create_task(node.since(pb.GetHealthRequest(epoch=known.epoch, wait_s=1e9)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await node.report([signal("gpu:1")])
    health = await asyncio.wait_for(waiting, 60)
    (event,) = health.events
    assert (event.kind, event.subject, event.severity, event.value) == (
        pb.HealthEvent.RAISED,
        "gpu:1",
        pb.CRITICAL,
        3.0,
    )
    again = pb.GetHealthRequest(epoch=health.epoch, after=health.sequence, wait_s=0.01)
    assert list((await node.since(again)).events) == []


async def test_a_reader_of_another_epoch_gets_all_events_without_waiting(tmp_path: Path) -> None:
    node = made(tmp_path)
    await node.report([signal("gpu:1")])
    health = await asyncio.wait_for(node.since(pb.GetHealthRequest(epoch="other", after=77, wait_s=30)), 20)
    assert [event.sequence for event in health.events] == [1]


async def test_alarms_are_cleared_by_check_subject_or_all(tmp_path: Path) -> None:
    node = made(tmp_path)
    await node.report([signal("gpu:1"), signal("gpu:2"), Signal("clock", "host", Severity.NOTICE, "it jumped")])

    async def cleared(**wanted: object) -> list[str]:
        reply = await node.clear(pb.ClearAlarmsRequest(**wanted), "operator alice")  # type: ignore[arg-type]
        return [alarm.subject for alarm in reply.cleared]

    assert await cleared(check="gpu-ecc", subject="gpu:2") == ["gpu:2"]
    assert await cleared(check="clock") == ["host"]
    assert await cleared(check="clock") == []
    with pytest.raises(Usage):
        await cleared()
    with pytest.raises(Usage):
        await cleared(all=True, check="clock")
    assert await cleared(all=True) == ["gpu:1"]
    health = await node.since(pb.GetHealthRequest())
    assert list(health.alarms) == []
    assert health.events[-1].text == "cleared by operator alice"


# ------------------------------------------------------------ checks


def rooted(folder: Path, moving: Callable[[], bool] = lambda: False, **settings: Any) -> Monitor:
    given = {"root": str(folder / "root"), "interval_s": 0.1, **settings}
    (folder / "state").mkdir(exist_ok=True)
    return Monitor("node-1", folder / "state", Settings(**given), str(folder / "no libraries"), moving)


def kernel_says(folder: Path, sequence: int, text: str) -> None:
    (folder / "root/dev").mkdir(parents=True, exist_ok=True)
    with (folder / "root/dev/kmsg").open("a") as file:
        file.write(f"4,{sequence},{int(time.monotonic() * 1e6)},-;{text}\n")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def states(health: pb.Health) -> dict[str, tuple[str, str]]:
    return {check.name: (pb.HealthCheck.State.Name(check.state), check.reason) for check in health.checks}


async def test_a_line_in_the_kernels_log_reaches_a_reader_and_survives_a_restart(tmp_path: Path) -> None:
    kernel_says(tmp_path, 1, "NVRM: Xid (PCI:0000:65:00): 79, pid=1, GPU has fallen off the bus.")
    node = rooted(tmp_path)
    node.start()
    epoch = (await node.since(pb.GetHealthRequest())).epoch
    health = await asyncio.wait_for(node.since(pb.GetHealthRequest(epoch=epoch, wait_s=30)), 60)
    assert [(alarm.check, alarm.subject) for alarm in health.alarms] == [("gpu-xid", "gpu:0000:65:00")]
    await node.stop()
    again = rooted(tmp_path)
    again.start()
    await again.clear(pb.ClearAlarmsRequest(all=True), "operator alice")
    kernel_says(tmp_path, 2, "Out of memory: Killed process 1 (python)")
    await until(lambda: bool(again._log.state.alarms))
    await again.stop()
    assert [check for check, _ in again._log.state.alarms] == ["host-oom"], "an old line does not raise it again"


async def test_checks_are_running_off_or_unable(tmp_path: Path) -> None:
    kernel_says(tmp_path, 1, "EXT4-fs (sda1): Remounting filesystem read-only")
    node = rooted(tmp_path, off=("host-oom", "link-ethernet"))
    node.start()
    await until(lambda: bool(node._log.state.alarms) and len(node._unable) >= 7)
    found = states(await node.since(pb.GetHealthRequest()))
    await node.stop()
    assert set(found) == set(CHECKS)
    assert found["host-oom"] == ("OFF", "switched off by the configuration")
    assert found["gpu-xid"] == ("RUNNING", "")
    assert found["disk-read-only"] == ("RUNNING", ""), "one of two sources is enough"
    assert found["link-infiniband"][0] == "UNABLE"
    assert "infiniband cannot be read" in found["link-infiniband"][1]
    assert found["gpu-ecc"][0] == "UNABLE"


async def test_a_check_that_is_off_raises_nothing(tmp_path: Path) -> None:
    kernel_says(tmp_path, 1, "Out of memory: Killed process 1 (python)")
    kernel_says(tmp_path, 2, "NVRM: Xid (PCI:0000:65:00): 79")
    node = rooted(tmp_path, off=("host-oom",))
    node.start()
    await until(lambda: bool(node._log.state.alarms))
    await node.stop()
    assert [check for check, _ in node._log.state.alarms] == ["gpu-xid"]


async def test_a_defect_of_a_check_is_a_reason_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Clock, now: object) -> list[Signal]:
        raise KeyError("a defect")

    monkeypatch.setattr(Clock, "read", fail)
    kernel_says(tmp_path, 1, "NVRM: Xid (PCI:0000:65:00): 79")
    node = rooted(tmp_path)
    node.start()
    await until(lambda: bool(node._log.state.alarms) and len(node._unable) >= 7)
    found = states(await node.since(pb.GetHealthRequest()))
    await node.stop()
    assert found["host-clock"] == ("UNABLE", "KeyError: 'a defect'")
    assert found["gpu-xid"] == ("RUNNING", "")


async def test_during_a_move_only_the_log_and_the_clock_are_read(tmp_path: Path) -> None:
    moving = True
    kernel_says(tmp_path, 1, "NVRM: Xid (PCI:0000:65:00): 79")
    node = rooted(tmp_path, lambda: moving)
    node.start()
    await until(lambda: bool(node._log.state.alarms) and len(node._unable) == 2)
    assert {type(group).__name__ for group in node._unable} == {"KernelLog", "Clock"}
    moving = False
    await until(lambda: len(node._unable) == 9)
    await node.stop()


def test_thresholds_and_names_of_checks_are_checked() -> None:
    assert Settings(off=("gpu-ecc", "program-fans"), thresholds={"link_flaps_per_hour": 2}).problems() == []
    wrong = Settings(off=("gpu-ec",), thresholds={"flaps": 2, "link_flaps_per_hour": -1}).problems()
    assert [line.split(":")[0] for line in wrong] == [
        "health.off",
        "health.thresholds.flaps",
        "health.thresholds.link_flaps_per_hour",
    ]
