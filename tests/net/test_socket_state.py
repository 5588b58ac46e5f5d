"""Sequence numbers of a saved connection wrap, wherever the queues are."""

from __future__ import annotations

import pytest

from snapshotd.net.flows import Address
from snapshotd.net.repair import Info
from snapshotd.net.socket_state import SocketState, Stage


@pytest.mark.parametrize("send_end", [10, 1 << 20, 0xFFFFFFFF, 3000])
def test_sequence_numbers_wrap(send_end: int) -> None:
    local, remote = Address.parse("10.0.0.1:1"), Address.parse("10.0.0.2:2")
    state = SocketState(
        Stage.TAKEN, local, remote, {}, Info(1, 0, 0, 0), send_end=send_end, unsent_bytes=3000, send=bytes(5000)
    )
    assert 0 <= state.sent_end <= 0xFFFFFFFF
    assert (state.send_start + len(state.sent)) & 0xFFFFFFFF == state.sent_end
    assert (state.sent_end + state.unsent_bytes) & 0xFFFFFFFF == send_end
