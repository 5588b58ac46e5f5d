"""What a reader of the health of a node gets: every event once, in order, and at once if it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Usage
from snapshotd.health import monitor
from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.monitor import Monitor


def signal(subject: str) -> Signal:
    return Signal("gpu-ecc", subject, Severity.CRITICAL, "3 errors", "replace it", 3.0)


def made(folder: Path, kept_events: int = 100) -> Monitor:
    return Monitor("node-1", folder, kept_events)


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
