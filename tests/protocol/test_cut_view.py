"""Tests what the driver tells the gates from round to round (`migrator/quiesce/view.py`), without daemons."""

from __future__ import annotations

import pytest

from migrator.quiesce.cut import Decision
from migrator.quiesce.process_reports import ProcessReport
from migrator.quiesce.view import View
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import RankGone

OLD, NEW = "00000000000000aa", "00000000000000bb"


def comm(name: str, rank: int, collectives: int, state: str = "live") -> pb.Communicator:
    return pb.Communicator(id=name, rank=rank, nranks=2, collectives=collectives, state=state, users=[7])


def process(
    rank: int, *comms: pb.Communicator, ended: tuple[pb.Communicator, ...] = (), held: str = ""
) -> ProcessReport:
    gate = pb.ProcessGate(rank_uid=f"job-{rank}", rank=rank, pid=1, communicators=comms, ended=ended, passed=0)
    if held:
        gate.waiting.add(thread=7).group.add(communicator=held, peer=-1, count=1)
    return ProcessReport.of(f"node-{rank}", gate)


def test_only_gates_with_new_targets_are_told() -> None:
    view = View(pb.MoveDescription())
    cut, told = view.next([process(0, comm(OLD, 0, 5)), process(1, comm(OLD, 1, 4))])
    assert cut.decision is Decision.RUN_ON
    assert set(told) == {"node-1"}  # the other has reached its targets, and stays there
    assert view.to_ask() == {"node-1"}
    cut, told = view.next([process(0, comm(OLD, 0, 5)), process(1, comm(OLD, 1, 4))])
    assert (cut.decision, told) == (Decision.RUN_ON, {})
    cut, told = view.next([process(0, comm(OLD, 0, 5)), process(1, comm(OLD, 1, 5))])
    assert (cut.decision, told) == (Decision.REACHED, {})


def test_targets_of_an_aborted_communicator_are_withdrawn_before_the_cut_counts_as_reached() -> None:
    """Otherwise a gate could still let a thread pass."""
    view = View(pb.MoveDescription())
    view.next([process(0, comm(OLD, 0, 5), comm(NEW, 0, 7)), process(1, comm(OLD, 1, 4), comm(NEW, 1, 7))])
    aborted = process(0, comm(NEW, 0, 7), ended=(comm(OLD, 0, 5, "aborted"),))
    behind = process(1, comm(OLD, 1, 4), comm(NEW, 1, 7))
    cut, told = view.next([aborted, behind])
    assert cut.decision is Decision.REACHED
    assert [(one.communicator, one.count) for one in told["node-1"][0].targets] == []
    assert view.next([aborted, behind])[1] == {}


def test_permission_is_handed_out_and_ends() -> None:
    view = View(pb.MoveDescription())
    late = process(1, comm(OLD, 1, 4), comm(NEW, 1, 7), held=NEW)
    ahead = process(0, comm(OLD, 0, 5), comm(NEW, 0, 7))
    _, told = view.next([ahead, late])
    (permission,) = told["node-1"][0].permissions
    assert (permission.thread, permission.until.communicator, permission.until.count) == (7, OLD, 5)
    assert not told["node-0"][0].permissions


def test_older_shim_gets_no_permission() -> None:
    late = process(1, comm(OLD, 1, 4), comm(NEW, 1, 7), held=NEW)
    late.gate.ClearField("passed")
    _, told = View(pb.MoveDescription()).next([process(0, comm(OLD, 0, 5), comm(NEW, 0, 7)), late])
    assert not told["node-1"][0].permissions
    assert (NEW, 8) in [(one.communicator, one.count) for one in told["node-1"][0].targets]


def test_process_that_has_ended_is_named() -> None:
    view = View(pb.MoveDescription())
    view.next([process(0, comm(OLD, 0, 5)), process(1, comm(OLD, 1, 4))])
    with pytest.raises(RankGone, match="process 1 of rank 1 has ended"):
        view.next([process(0, comm(OLD, 0, 5))])


def test_only_nodes_with_processes_that_may_go_on_are_asked() -> None:
    view = View(pb.MoveDescription())
    there, late = process(0, comm(OLD, 0, 5)), process(1, comm(OLD, 1, 4))
    view.next([there, late])
    assert view.to_ask() == {"node-1"}
    cut, told = view.next([process(1, comm(OLD, 1, 5))], {"node-1"})
    assert (cut.decision, told, view.to_ask()) == (Decision.REACHED, {}, set())


def test_all_nodes_are_asked_while_a_member_is_not_known() -> None:
    view = View(pb.MoveDescription())
    view.next([process(0, comm(OLD, 0, 5))])
    assert view.to_ask() is None


def test_process_that_has_ended_on_a_node_that_was_not_asked_is_noticed_when_it_is() -> None:
    view = View(pb.MoveDescription())
    view.next([process(0, comm(OLD, 0, 5)), process(1, comm(OLD, 1, 4))])
    view.next([process(1, comm(OLD, 1, 4))], {"node-1"})
    with pytest.raises(RankGone, match="process 1 of rank 0 has ended"):
        view.next([process(1, comm(OLD, 1, 4))])


def test_later_guesses_wait_as_long_as_processes_needed_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of rank 1 use the communicator, so it is a guess that the one at the gate has to pass."""
    now = 100.0
    monkeypatch.setattr("migrator.quiesce.view.time.monotonic", lambda: now)

    def late(other: int) -> ProcessReport:
        made = process(1, comm(OLD, 1, 4), comm(NEW, 1, other), held=NEW)
        for one in made.gate.communicators:
            one.users.append(8)
        return made

    view, ahead = View(pb.MoveDescription()), process(0, comm(OLD, 0, 9), comm(NEW, 0, 20))
    guessed: list[float] = []
    began = now
    for _ in range(2000):
        other = 20 + len(guessed)
        cut, _ = view.next([ahead, late(other)])
        if sum(cut.guesses.values()) > len(guessed):
            guessed.append(now - began)
            began = now
        now += 0.005
        if len(guessed) == 3:
            break
    first, second, third = guessed
    assert first > 0.5
    assert second < 0.2
    assert third < 0.2
