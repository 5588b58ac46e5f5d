"""The re-pointing process is killed at every point; the next call still brings the socket where it belongs, without loss."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapshotd.net.repoint import Change
from snapshotd.proc import tree
from tests.net import crasher
from tests.net.hosts import REPOSITORY, Hosts
from tests.net.moving import change, hold, peer_flow, put_on, release, take_off, talk
from tests.sampling import Sampler

pytestmark = [pytest.mark.root, pytest.mark.slow]

Order = Callable[[list[Change], int | None], dict[str, Any]]


def order_to(process: subprocess.Popen[str]) -> Order:
    def order(changes: list[Change], die_at: int | None) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"changes": [crasher.to_json(change) for change in changes], "die_at": die_at}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    return order


def number_of_points(order: Order, there: Change, back: Change) -> int:
    """The number of calls at which a re-point can be killed, found by bisection."""

    def kills(point: int) -> bool:
        order([back], None)
        return bool(order([there], point)["killed"])

    low, high = 100, 200
    assert kills(low)
    while kills(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kills(middle) else (low, middle)
    return high


@pytest.mark.parametrize(
    ("family", "ip", "to", "new_ip"),
    [
        ("inet", "0.0.0.0", "10.9.1.1", "10.9.1.3"),
        ("inet6", "::", "fd09:1::1", "fd09:1::3"),
    ],
)
def test_kill_at_every_point_is_recovered(
    family: str, ip: str, to: str, new_ip: str, hosts: Hosts, tmp_path: Path, sampled: Sampler
) -> None:
    """Killed on the way there, killed again on the way back, then finished in either direction."""
    with (
        talk("patience", family, hosts.h1, hosts.h2, peer_listens=True, ip=ip, to=to) as conversation,
        hosts.h1.program([sys.executable, "-m", "tests.net.crasher"], cwd=REPOSITORY) as process,
    ):
        order = order_to(process)
        assert conversation.line() == "ready"
        conversation.fill()
        flow = peer_flow(hosts.h1, conversation.rank)
        old = flow.endpoints
        new = old[0], old[1].at(new_ip)
        hold(list(hosts), old, new)
        rank_state, rank_family = take_off(conversation.rank), conversation.rank.family
        there, back = change(flow, new, tmp_path), change(flow, old, tmp_path)
        before = order([back], None)["state"][0]["same"]
        assert before["queues"][1] > 0
        assert before["queues"][3] > 0

        killed = 0
        points = sampled(range(number_of_points(order, there, back)), 30)
        for point in points:
            order([back], None)
            killed += order([there], point)["killed"]
            order([back], point * 7 % 97)
            goal = there if point % 2 else back
            after = order([goal], None)
            assert after["error"] == "", point
            assert after["state"][0]["same"] == before, point
            assert after["state"][0]["endpoints"] == [str(goal.local), str(goal.remote)], point
            assert not tree.stopped(conversation.peer.pid), point
            assert not (tmp_path / "stopped.json").exists(), point
        assert killed > len(points) / 2  # the number of calls varies: stopping a process is a poll loop

        order([there], None)
        conversation.rank = hosts.h3.call(put_on, rank_state, rank_family, (new[1], new[0]))
        release(list(hosts))
        conversation.finish()
