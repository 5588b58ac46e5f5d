"""The pure functions that decide when a node opens its gates, and which processes are members of a communicator."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged
from snapshotd.inprocess import nccl_lines, ncclctl
from snapshotd.moves.nccl import gate_processes
from snapshotd.moves.nccl.membership import membership_of, untried
from snapshotd.moves.record_parts import GateProcess, Member
from snapshotd.moves.rules import CopyState, GateDecision, GateFacts, Mark, Outcome, gate_next


def every_fact() -> list[GateFacts]:
    flags = [False, True]
    outcomes = [None, *Outcome]
    return [
        GateFacts(Mark.GATED, None, source, undone, unknowing, silent, target, lost, down, abandoned)
        for source, undone, unknowing, silent, target, lost, down, abandoned in itertools.product(
            outcomes, flags, flags, flags, CopyState, flags, flags, flags
        )
        if silent or not lost
    ]


def test_no_gate_opens_before_the_communicators_are_complete() -> None:
    """For every combination of answers: ABORT alone, or COMMIT alone, opens no gate."""
    for facts in every_fact():
        decision, reason = gate_next(facts)
        assert reason
        assert decision in {GateDecision.ASK, GateDecision.LEARN_COMMIT, GateDecision.LEARN_ABORT}
        if decision is GateDecision.LEARN_COMMIT:
            assert facts.target in {CopyState.RUNNING, CopyState.ENDED}
        if decision is GateDecision.LEARN_ABORT:
            assert facts.target not in {CopyState.RUNNING, CopyState.HELD} or facts.source_undone
            assert facts.source_undone or facts.source_unknowing or facts.source_silent or facts.abandoned
            assert facts.source_undone or facts.abandoned or not facts.down


def test_undecided_move_keeps_the_gate_closed() -> None:
    assert gate_next(GateFacts(Mark.GATED, None))[0] is GateDecision.ASK
    assert gate_next(GateFacts(Mark.GATED, None, Outcome.ABORT))[0] is GateDecision.ASK
    assert gate_next(GateFacts(Mark.GATED, None, Outcome.COMMIT, target=CopyState.HELD))[0] is GateDecision.ASK


@pytest.mark.parametrize("outcome", list(Outcome))
def test_recorded_outcome_opens_the_gate_and_ends_the_move(outcome: Outcome) -> None:
    assert gate_next(GateFacts(Mark.GATED, outcome))[0] is GateDecision.OPEN
    assert gate_next(GateFacts(Mark.SETTLED, outcome))[0] is GateDecision.CLOSE


def test_completed_undo_at_the_source_is_learned_as_abort() -> None:
    facts = GateFacts(Mark.GATED, None, Outcome.ABORT, source_undone=True)
    assert gate_next(facts)[0] is GateDecision.LEARN_ABORT


def test_silent_source_is_given_up_if_the_target_has_no_copy() -> None:
    silent = GateFacts(Mark.GATED, None, source_silent=True)
    assert gate_next(silent)[0] is GateDecision.ASK
    held = GateFacts(Mark.GATED, None, source_silent=True, target=CopyState.HELD)
    assert gate_next(held)[0] is GateDecision.ASK
    for state in (CopyState.DISCARDED, CopyState.GONE, CopyState.NO_SUCH_MOVE, CopyState.RECEIVING):
        gone = GateFacts(Mark.GATED, None, source_silent=True, target=state)
        assert gate_next(gone)[0] is GateDecision.LEARN_ABORT


def test_lost_source_and_unreachable_target_are_given_up() -> None:
    lost = GateFacts(Mark.GATED, None, source_silent=True, source_lost=True)
    assert gate_next(lost)[0] is GateDecision.LEARN_ABORT
    assert gate_next(replace(lost, target=CopyState.HELD))[0] is GateDecision.ASK


def test_silent_source_opens_no_gate_in_front_of_a_communicator_that_is_down() -> None:
    lost = GateFacts(Mark.GATED, None, source_silent=True, source_lost=True, down=True)
    for state in CopyState:
        decision, reason = gate_next(replace(lost, target=state))
        if state not in {CopyState.RUNNING, CopyState.ENDED}:
            assert decision is GateDecision.ASK
            assert "communicators are down here" in reason
    declared = replace(lost, target=CopyState.DISCARDED, abandoned=True)
    assert gate_next(declared)[0] is GateDecision.LEARN_ABORT


WORLD, PAIR, OTHERS = "0" * 16, "1" * 16, "2" * 16


def process(uid: str, membership: dict[str, tuple[int, int]], refused: str = "", **more: object) -> pb.ProcessGate:
    """A process's report as a node forwards it; `more` are further keys of the shim's report."""
    return gate_processes.to_proto(GateProcess(uid, int(uid[-1]), 7, 7, 1), shim_report(membership, refused, **more))


def shim_report(membership: dict[str, tuple[int, int]], refused: str = "", **more: Any) -> ncclctl.Report:
    comms = [
        {"id": comm, "nranks": size, "rank": rank, "state": "live", "refused": [refused] if refused else []}
        for comm, (rank, size) in membership.items()
    ]
    comms += more.pop("comms", [])
    report = {"gate": "closed", "instance": 1, "comms": comms, "nccl_threads": 0, **more}
    return ncclctl.parse(json.dumps(report))


def reports(**nodes: list[pb.ProcessGate]) -> dict[str, pb.GateReport]:
    return {name: pb.GateReport(processes=processes) for name, processes in nodes.items()}


def test_membership_covers_only_communicators_of_the_rank() -> None:
    membership, problems = membership_of(
        reports(
            a=[process("job-0", {WORLD: (0, 3), PAIR: (0, 2)})],
            b=[process("job-1", {WORLD: (1, 3), PAIR: (1, 2)}), process("job-2", {WORLD: (2, 3), OTHERS: (0, 1)})],
        ),
        "job-0",
    )
    assert problems == []
    assert membership == {
        WORLD: [Member("a", "job-0", 7, 0), Member("b", "job-1", 7, 1), Member("b", "job-2", 7, 2)],
        PAIR: [Member("a", "job-0", 7, 0), Member("b", "job-1", 7, 1)],
    }


def test_unknown_member_is_a_problem() -> None:
    _, problems = membership_of(reports(a=[process("job-0", {WORLD: (0, 2)})]), "job-0")
    assert len(problems) == 1
    assert "has 2 members, and only [0] of them are known" in problems[0]


def test_refusal_counts_only_in_communicators_of_the_rank() -> None:
    _, problems = membership_of(
        reports(a=[process("job-0", {PAIR: (0, 1)})], b=[process("job-1", {OTHERS: (0, 1)}, refused="it is grown")]),
        "job-0",
    )
    assert problems == []
    _, problems = membership_of(
        reports(a=[process("job-0", {PAIR: (0, 2)})], b=[process("job-1", {PAIR: (1, 2)}, refused="it is grown")]),
        "job-0",
    )
    assert problems == [f"communicator {PAIR} rank 1 on b: it is grown"]


def creating(*, held: bool) -> dict[str, Any]:
    """A communicator that is being created, whose size is not known yet."""
    comm = {"id": PAIR, "nranks": -1, "rank": -1, "state": "pending", "refused": []}
    waiting = [{"thread": 8, "group": [[WORLD, "c", -1, 1], [PAIR, "c", -1, 1]]}]
    return {"comms": [comm], "held": waiting if held else []}


def pending(uid: str, *, held: bool) -> pb.ProcessGate:
    return process(uid, {WORLD: (int(uid[-1]), 2)}, **creating(held=held))


def test_communicator_whose_creation_waits_at_the_gate_is_not_taken_down() -> None:
    membership, problems = membership_of(reports(a=[pending("job-0", held=True), pending("job-1", held=True)]), "job-0")
    assert (list(membership), problems) == ([WORLD], [])
    report = shim_report({WORLD: (0, 2)}, **creating(held=True))
    assert [comm.real for comm in report.comms] == [True, False]


def test_communicator_being_created_inside_nccl_is_a_problem() -> None:
    _, problems = membership_of(reports(a=[pending("job-0", held=False), pending("job-1", held=False)]), "job-0")
    assert any("it is being made" in problem for problem in problems)
    assert shim_report({WORLD: (0, 2)}, **creating(held=False)).refusals() == [], "it will be ready in a moment"


@pytest.mark.parametrize(
    "text", ['{"comms": [{"id": "x"}]}', "[]", '{"held": [{"thread": 1, "group": [["x", "c", 1, 1]]}]}', "nonsense"]
)
def test_malformed_report_is_damaged(text: str) -> None:
    with pytest.raises(Damaged):
        ncclctl.parse(text)


def test_report_with_numbers_out_of_range_is_damaged() -> None:
    comm = {"id": PAIR, "nranks": 2, "rank": 0, "state": "live", "refused": [], "collectives": -1}
    with pytest.raises(Damaged):
        process("job-0", {}, comms=[comm])


def test_report_is_converted_completely() -> None:
    comm = {"id": PAIR, "nranks": 2, "rank": 0, "state": "live", "refused": ["it is grown"], "users": [7, 8]}
    counts = {"collectives": 3, "sent": {"1": 4}, "received": {"1": 5}}
    ended = {"id": OTHERS, "nranks": 1, "rank": 0, "state": "aborted", "collectives": 2}
    sent = process(
        "job-0",
        {},
        comms=[comm | counts],
        ended=[ended],
        held=[{"thread": 7, "group": [[PAIR, "s", 1, 1]]}],
        calling=[{"thread": 8, "function": "ncclAllReduce"}],
    )
    assert sent.communicators[0] == pb.Communicator(
        id=PAIR,
        nranks=2,
        state="live",
        refusals=["it is grown"],
        users=[7, 8],
        collectives=3,
        sent={1: 4},
        received={1: 5},
    )
    assert (sent.ended[0].state, sent.ended[0].collectives) == ("aborted", 2)
    group = [pb.ChannelCount(communicator=PAIR, kind=pb.ChannelCount.SEND, peer=1, count=1)]
    assert list(sent.waiting) == [pb.WaitingThread(thread=7, group=group)]
    assert (list(sent.calling), sent.instance) == ([8], 1)


def test_communicator_on_a_shared_gpu_is_built_untried() -> None:
    pair = [Member("a", "job-0", 7, 0), Member("b", "job-1", 7, 1)]
    one, two = frozenset({"GPU-1"}), frozenset({"GPU-2"})
    assert not untried(pair, {"job-0": one, "job-1": two})
    assert not untried(pair, {})
    assert untried(pair, {"job-0": one, "job-1": one | two})
    assert untried([pair[0], Member("a", "job-0", 7, 1)], {})
    assert not untried([pair[0], Member("a", "job-0", 8, 1)], {})


def test_values_from_the_wire_are_checked_before_they_reach_a_process() -> None:
    collective = pb.ChannelCount(communicator=WORLD, kind=pb.ChannelCount.COLLECTIVE, peer=-1, count=12)
    assert gate_processes.target_line(collective) == f"{WORLD} c -1 12"
    send = pb.ChannelCount(communicator=PAIR, kind=pb.ChannelCount.SEND, peer=3, count=4)
    assert gate_processes.target_line(send) == f"{PAIR} s 3 4"
    assert nccl_lines.attach_line(WORLD, "ab" * 128, untried=False) == f"{WORLD} {'ab' * 128} try"
    for comm, kind in ((WORLD, "x"), ("zz", "c")):
        with pytest.raises(Damaged):
            nccl_lines.target_line(comm, kind, 1, 2)
    with pytest.raises(Damaged):
        nccl_lines.attach_line(WORLD, "ab\nff", untried=True)
    with pytest.raises(Damaged):
        nccl_lines.check_comm("../../etc")
