"""Which nodes have a vote on a snapshot: those that keep it, and witnesses that its coordinator can ask."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import UnknownMethod
from snapshotd.moves.jobs.lease import keepers_of
from snapshotd.moves.record_parts import ImageCopy, JobPart
from tests.moves.test_lease import FIRST, Nodes

KEEPERS = ["node-1", "node-9"]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def asked(witnesses: list[str], stand_ins: list[str] | None = None) -> pb.BeginJobRequest:
    places = [pb.NodeAddresses(name=name, endpoint=name) for name in ("node-1", "node-2", "node-3")]
    return pb.BeginJobRequest(record=FIRST, job="train", nodes=places, witnesses=witnesses, stand_ins=stand_ins)


def test_keepers_are_the_coordinator_and_all_nodes_with_images() -> None:
    part = JobPart("train-0", 0, "m-0000000000aa", "node-1", "e", "", "", "", copy="m-0000000000bb", copy_node="node-4")
    assert keepers_of("node-9", [part]) == ["node-1", "node-4", "node-9"]
    twice = msgspec.structs.replace(part, more_copies=(ImageCopy("m-0000000000cc", "node-5", "e"),))
    assert keepers_of("node-1", [twice]) == ["node-1", "node-4", "node-5"]


async def test_witness_that_answers_has_a_vote_and_promises_nothing_before_the_voters_are_recorded(
    nodes: Nodes,
) -> None:
    found = await nodes["node-1"].steps.leases.voters(asked(["node-2"], ["node-3"]), KEEPERS)
    assert found == (["node-1", "node-2", "node-9"], [])
    for name in ("node-2", "node-3"):
        assert nodes[name].steps.promises.of(FIRST) is None


async def test_witness_that_the_coordinator_cannot_reach_is_replaced(nodes: Nodes) -> None:
    nodes.cut = {"node-2"}
    found = await nodes["node-1"].steps.leases.voters(asked(["node-2"], ["node-3"]), KEEPERS)
    assert found == (["node-1", "node-3", "node-9"], [])


async def test_witness_of_a_version_without_the_call_is_left_out_if_there_is_no_other(nodes: Nodes) -> None:
    async def ask(request: pb.LeaseRequest, caller: str) -> pb.LeaseReply:
        raise UnknownMethod("node-3 does not know Job.Lease")

    nodes["node-3"].steps.promises.ask = ask  # type: ignore[method-assign]
    voters, why = await nodes["node-1"].steps.leases.voters(asked(["node-3"]), KEEPERS)
    assert voters == KEEPERS, "without a lease, the job waits for an operator and does not end when it is cut off"
    assert why == ["node-3 (node-3 does not know Job.Lease)"]


async def test_number_of_voters_stays_odd_if_one_of_two_witnesses_is_left_out(nodes: Nodes) -> None:
    nodes.cut = {"node-3"}
    keepers = ["node-1", "node-8", "node-9"]
    voters, why = await nodes["node-1"].steps.leases.voters(asked(["node-2", "node-3"]), keepers)
    assert (voters, why) == (keepers, ["node-3 (no answer)"])


async def test_voter_that_has_not_promised_is_named(nodes: Nodes) -> None:
    one = nodes["node-1"]
    nodes.cut = {"node-3"}
    one.take(FIRST, "node-2", "node-3")
    outcome = await one.steps.outcome(FIRST)
    assert (outcome.settled, list(outcome.not_told)) == (False, [])
    await nodes.after(1)
    outcome = await one.steps.outcome(FIRST)
    assert (outcome.settled, list(outcome.not_told)) == (True, ["node-3"])
    nodes.cut = set()
    await nodes.after(1)
    assert list((await one.steps.outcome(FIRST)).not_told) == []


async def test_two_nodes_promise_nothing_that_is_needed(nodes: Nodes) -> None:
    nodes.cut = {"node-2"}
    nodes["node-1"].take(FIRST, "node-2")
    outcome = await nodes["node-1"].steps.outcome(FIRST)
    assert (outcome.settled, list(outcome.not_told)) == (True, [])
