"""Re-points a connection of another process with full queues, and loses no byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.net import repoint
from tests.net import moving
from tests.net.hosts import Hosts
from tests.net.moving import Talk, change, hold, peer_flow, put_on, release, take_off, talk

pytestmark = pytest.mark.root

# family of the peer's socket, whether it listens, the listener's address, where the other connects, the rank's new address
CASES = {
    "v4 accepted": ("inet", True, "0.0.0.0", "10.9.1.1", "10.9.1.3"),
    "v4 connected": ("inet", False, "10.9.1.2", "10.9.1.2", "10.9.1.3"),
    "v6 accepted": ("inet6", True, "::", "fd09:1::1", "fd09:1::3"),
    "v6 connected": ("inet6", False, "fd09:1::2", "fd09:1::2", "fd09:1::3"),
    "mapped accepted": ("inet6", True, "::", "10.9.1.1", "10.9.1.3"),
    "mapped connected": ("inet6", False, "10.9.1.2", "::ffff:10.9.1.2", "10.9.1.3"),
}


def move(conversation: Talk, hosts: Hosts, new_ip: str, folder: Path) -> float:
    """Moves the rank's socket from h2 to h3 and re-points the peer's on h1; returns how long the peer was stopped."""
    rank, everyone = conversation.rank, list(hosts)
    flow = peer_flow(hosts.h1, rank)
    local, remote = flow.endpoints
    old, new = flow.endpoints, (local, remote.at(new_ip))
    before = moving.visible(conversation.peer.pid)
    hold(everyone, old, new)
    state, family = take_off(rank), rank.family
    stopped_s = hosts.h1.call(repoint.repoint_all, [change(flow, new, folder)])
    conversation.rank = hosts.h3.call(put_on, state, family, (new[1], new[0]))
    release(everyone)
    assert moving.visible(conversation.peer.pid) == before
    assert not list(folder.glob("stopped.json*"))
    return stopped_s


@pytest.mark.sampled(1, per="case")
@pytest.mark.parametrize("style", ["threads", "epoll", "fork"])
@pytest.mark.parametrize("case", CASES)
def test_full_queues_survive(case: str, style: str, hosts: Hosts, tmp_path: Path) -> None:
    family, peer_listens, ip, to, new_ip = CASES[case]
    with talk(style, family, hosts.h1, hosts.h2, peer_listens=peer_listens, ip=ip, to=to) as conversation:
        assert conversation.line() == "ready"
        conversation.fill()
        stopped_s = move(conversation, hosts, new_ip, tmp_path)
        conversation.finish()
    print(f"stopped for {stopped_s * 1e3:.2f} ms")
