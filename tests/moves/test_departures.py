"""What a node answers about a rank that has left it: a suspended rank is nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied
from snapshotd.moves.journal import Journal
from snapshotd.moves.peers.departures import Departures
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome


async def test_suspended_rank_is_on_no_other_node_until_its_image_was_sent(tmp_path: Path) -> None:
    asked: list[str] = []

    @asynccontextmanager
    async def client(name: str, endpoint: str) -> AsyncIterator[Any]:
        async def confirm(request: pb.DepartureRequest, timeout_s: float) -> pb.DepartureReply:
            asked.append(name)
            return pb.DepartureReply()

        yield SimpleNamespace(peer=SimpleNamespace(ConfirmDeparture=confirm))

    names = ("m-000000000001", "source", "night-0", "night", 0, "a", "a:1", "a", "a:1", "00" * 32, "boot", 1.0)
    journal = Journal(tmp_path)
    left = journal.begin(Begin(*names, coordinator="m-ba9876543210"))
    left.decide(Outcome.COMMIT, "every rank is ready", "coordinator")
    left.mark(Mark.SETTLED)
    ranks = SimpleNamespace(get=lambda uid, role: None)
    node: Any = SimpleNamespace(journal=journal, ranks=ranks, client=client, config=SimpleNamespace(node="a"))
    departures = Departures(node, lambda uid, holder: ())
    with pytest.raises(Denied, match="rank night-0 is suspended on node a"):
        await departures.confirm(pb.DepartureRequest(rank_uid="night-0", holder="b"))
    left.mark(Mark.SETTLED, resumed_node="b", resumed_endpoint="b:1")
    await departures.confirm(pb.DepartureRequest(rank_uid="night-0", holder="b"))
    assert asked == []
    await departures.confirm(pb.DepartureRequest(rank_uid="night-0", holder="c"))
    assert asked == ["b"], "it may have moved on from there"
