"""Proposals: nothing is done without the operator's approval, every step is recorded, an answer ends with its cause."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from migrator.autopilot.decide import NodeDecision
from migrator.autopilot.facts import about_node, proposed
from migrator.autopilot.model import NodeState, Proposal, ProposalState
from migrator.autopilot.policy import Policy
from migrator.autopilot.ruled import ruled_for
from migrator.autopilot.store import Store
from migrator.autopilot.world import World
from snapshotd.api.errors import NotFound, WrongState
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import alerts, results, running, until
from tests.autopilot.worlds import NOW, acting, alarm, node, rank, world
from tests.cli.conftest import Migrator, a_rank

RULE = {"name": "asks", "severity": "notice", "action": "drain", "approval": True}
ASKING = acting(rules=[RULE])


def the_proposal(there: World, policy: Policy = ASKING) -> Proposal:
    (found,) = proposed(there, policy, [], NOW).values()
    return found


def answered(proposal: Proposal, state: ProposalState) -> Proposal:
    return Proposal(7, proposal.key, proposal.what, proposal.why, proposal.node, state, NOW, "alice", "because")


def test_rule_that_asks_does_nothing_until_it_is_approved() -> None:
    parts = (node("node-1"), node("spare-1"), rank(0, "node-1"), alarm("node-1"))
    there = world(*parts)
    wanted = the_proposal(there)
    assert (wanted.what, wanted.why) == ("drain node-1", "rule asks: gpu-ecc on host: it fails")
    assert about_node(there, ASKING, there.nodes["node-1"], NOW).decision is NodeDecision.SUSPECT
    approved = world(*parts, answered(wanted, ProposalState.APPROVED))
    about = about_node(approved, ASKING, approved.nodes["node-1"], NOW)
    assert (about.decision, about.reason) == (NodeDecision.DRAIN, f"{wanted.why}; alice approved it")
    rejected = world(*parts, answered(wanted, ProposalState.REJECTED))
    assert about_node(rejected, ASKING, rejected.nodes["node-1"], NOW).decision is NodeDecision.SUSPECT
    assert ruled_for(rejected, ASKING, "node-1", NOW)[0].waits == "alice rejected it: because"
    assert the_proposal(rejected).state is ProposalState.REJECTED, "it is not proposed again"


def test_alarm_that_is_raised_anew_needs_a_new_answer() -> None:
    old = answered(the_proposal(world(node("node-1"), alarm("node-1"))), ProposalState.APPROVED)
    again = world(node("node-1"), alarm("node-1", since_unix_s=NOW - 5), old)
    assert the_proposal(again).state is ProposalState.OPEN


def test_nothing_is_proposed_while_the_rule_waits_or_only_observes() -> None:
    there = world(node("node-1"), alarm("node-1"))
    for change in ({"wait_s": 1000}, {"action": "observe"}, {"count": 2}):
        assert proposed(there, acting(rules=[RULE | change]), [], NOW) == {}


async def test_proposals_are_recorded_once_answered_and_end_with_their_cause(tmp_path: Path) -> None:
    wanted = Proposal(0, "k", "drain node-1", "it fails", "node-1")
    async with Store.open(tmp_path) as store:
        await store.set_proposals({"k": wanted})
        (known,) = await store.set_proposals({"k": wanted})
        assert (known.id, known.state) == (1, ProposalState.OPEN)
        await store.set_proposals({}, end_others=False)
        assert (await store.answer_proposal(1, False, "bob", "not now")).reason == "not now"
        assert (await store.answer_proposal(1, True, "alice")).state is ProposalState.APPROVED
        with pytest.raises(WrongState, match="by alice already"):
            await store.answer_proposal(1, True, "carol")
        assert [one.by for one in (await store.load()).proposals] == ["alice"]
        assert await store.set_proposals({}) == ()
        with pytest.raises(WrongState, match="cause has gone"):
            await store.answer_proposal(1, True, "carol")
        with pytest.raises(NotFound):
            await store.answer_proposal(2, True, "carol")
        (second,) = await store.set_proposals({"k": wanted})
        assert second.id == 2
        await store.set_proposals({})
        kinds = [(record.kind, record.data.get("by", "")) for record in await store.events()]
    assert kinds == [
        ("proposal", ""),
        ("proposal-answered", "bob"),
        ("proposal-answered", "alice"),
        ("proposal-ended", ""),
        ("proposal", ""),
        ("proposal-ended", ""),
    ]


async def test_autopilot_waits_for_the_approval_and_then_acts(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    async with running(pilots, ASKING) as store:
        pilots["node-1"].raise_alarm()
        assert "`migrator approve 1`" in await alerts(store, "migrator approve")
        assert pilots.begun() == 0
        async with Store.open(pilots.path.parent / "state") as other:  # as `migrator approve` does
            await other.answer_proposal(1, True, "alice")
        assert await results(store) == [("spare-1", "moved")]

        async def drained() -> bool:
            return (await store.load()).nodes["node-1"].state is NodeState.DRAINED

        await until("the node to be drained", drained)
        assert not (await store.load()).alerts


async def test_proposal_lapses_when_the_alarm_is_cleared(pilots: PilotCluster) -> None:
    async with running(pilots, ASKING) as store:
        pilots["node-1"].raise_alarm()
        await alerts(store, "migrator approve")
        with pilots["node-1"].changed:
            del pilots["node-1"].health.alarms[:]
            pilots["node-1"].changed.notify_all()

        async def over() -> bool:
            stored = await store.load()
            return not stored.proposals and not stored.alerts

        await until("the proposal to lapse", over)
        assert (await store.events())[-1].kind in ("alert-over", "state", "proposal-ended")


async def made(folder: Path) -> None:
    async with Store.open(folder) as store:
        await store.set_proposals({"k": Proposal(0, "k", "drain node-1", "it fails", "node-1")})


async def test_verbs_list_approve_and_reject(pilots: PilotCluster, migrator: Migrator, tmp_path: Path) -> None:
    def verbs() -> None:
        assert migrator("proposals").out == "the autopilot proposes nothing\n"
        asyncio.run(made(tmp_path / "state"))
        assert migrator("proposals").out.splitlines()[1].split()[:2] == ["1", "open"]
        assert migrator("approve", "1", "--dry-run", "--json").json["dry_run"]
        assert migrator("approve", "9", "--dry-run").code == NotFound.exit_code
        assert migrator("reject", "1", "--reason", "later").out == "proposal 1 is rejected: drain node-1\n"
        (one,) = migrator("proposals", "--json").json["proposals"]
        assert (one["state"], one["reason"]) == ("rejected", "later")
        assert migrator("approve", "1", "--json").json["state"] == "approved"
        assert migrator("approve", "1").code == WrongState.exit_code

    await asyncio.to_thread(verbs)
