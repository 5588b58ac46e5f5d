"""Tests random schedules: moves back and forth with faults at random events, and deaths, partitions and pauses in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.protocol import Verdict
from tests.protocol.model import Model
from tests.protocol.mover import Move, leftovers, other, person_says, running
from tests.protocol.network import AWAY, HOME, PEER
from tests.protocol.world import DRIVER, LEASE_S, World
from tests.sampling import DRAWN, examples

STARTS = st.sampled_from((HOME, AWAY))
NAMES = st.sampled_from((HOME, AWAY, PEER))
PAIRS = st.sampled_from(list(combinations((DRIVER, HOME, AWAY, PEER), 2)))


@dataclass(frozen=True)
class Act:
    """One incident. As a fault it occurs at an event inside a move, otherwise between two moves."""

    what: str
    node: str = HOME
    pair: tuple[str, str] = (HOME, AWAY)

    def __call__(self, world: World) -> None:
        match self.what:
            case "driver dies":
                world.kill(DRIVER)
            case "daemon dies":
                world.kill(self.node)
            case "node dies":
                world.reboot(self.node)
                world.dead_for_ever.add(self.node)
            case "node reboots":
                world.reboot(self.node)
            case "back":
                world.dead_for_ever.discard(self.node)
                world.coming_back |= {node for node in world.daemons if not world.up[node]} - world.dead_for_ever
            case "cut":
                world.cuts.add(frozenset(self.pair))
            case "heal":
                world.cuts.discard(frozenset(self.pair))
            case "silence":
                world.now_s += LEASE_S + 1
            case "criu dies":
                world.criu_killed = True
            case "message lost":
                world.drop = True
            case "message late":
                world.delay = True
            case "a copy dies":
                holders = (*world.copies, *world.programs.values())
                for copy in [copy for copy in holders if copy.alive and copy.node == self.node][:1]:
                    world.fall(copy)
            case _:
                raise ValueError(self.what)


INSIDE = ("driver dies", "daemon dies", "daemon dies", "back", "back", "cut", "heal", "silence", "criu dies")
MESSAGES = ("message lost", "message late")
DEADLY = ("node dies", "node reboots", "a copy dies")
ACTS = st.builds(Act, st.sampled_from(INSIDE + MESSAGES + DEADLY), NAMES, PAIRS)
GENTLE = st.builds(Act, st.sampled_from(INSIDE + MESSAGES), NAMES, PAIRS)
BETWEEN = st.builds(Act, st.sampled_from(("back", "heal", "silence", "daemon dies", "cut")), NAMES, PAIRS)


def episodes(acts: st.SearchStrategy[Act]) -> st.SearchStrategy[list[Episode]]:
    faults = st.dictionaries(st.integers(0, 110), acts, max_size=4)
    one = st.builds(Episode, STARTS, faults, st.lists(BETWEEN, max_size=3), st.lists(NAMES, max_size=4), st.booleans())
    return st.lists(one, min_size=1, max_size=4)


@dataclass
class Episode:
    """An attempt to move the rank from `start`, and what happens before the next attempt."""

    start: str
    faults: dict[int, Act]
    between: list[Act]
    looks: list[str]  # the daemons that settle their moves, in this order
    ticking: bool
    moves: list[Move] = field(default_factory=list)


def play(story: list[Episode], *, false_words: bool = False) -> tuple[Model, list[Move]]:
    model, moves = Model(), []
    for number, episode in enumerate(story):
        model.ticking = episode.ticking
        model.faults = {len(model.labels) + event: act for event, act in episode.faults.items()}
        moves.append(Move(model, f"m-{number}", episode.start, other(episode.start)))
        moves[-1].run()
        for act in episode.between:
            act(model)
        for node in episode.looks:
            model.tick(node)
        bury(model, moves, false_words=false_words)
    model.faults.clear()
    model.cuts.clear()
    model.dead_for_ever.clear()
    model.drop = model.delay = model.criu_killed = False
    model.settle(4)
    assert not any(move.stranded for move in moves), "no move needs a person once both nodes are back"
    return model, moves


def bury(model: Model, moves: list[Move], *, false_words: bool) -> None:
    """Declares a node dead only if it really is; with `false_words` also a source whose daemon is only down. The declaration
    is refused if the node is not needed."""
    for move in moves:
        if false_words and not model.up[move.source] and move.at_target is not None:
            person_says(model, move.target, "DeclareSourceDead", move.name)
        if move.target in model.dead_for_ever and move.at_source is not None and not move.at_source_ended:
            person_says(model, move.source, "DeclareTargetDead", move.name)
        if move.source in model.dead_for_ever and move.at_target is not None:
            person_says(model, move.target, "DeclareSourceDead", move.name)


def judge(model: Model) -> None:
    assert leftovers(model) == []
    for copy in running(model):
        again = Move(model, "m-again", copy.node, other(copy.node))
        assert again.run() is Verdict.MOVED
        model.settle()
        assert [now.node for now in running(model)] == [other(copy.node)]
        assert leftovers(model) == []


@settings(DRAWN, max_examples=examples(200))
@given(episodes(ACTS), st.booleans())
def test_at_most_one_copy_runs_under_random_faults(story: list[Episode], false_words: bool) -> None:
    """The invariants are checked at every event inside `play`."""
    model, _ = play(story, false_words=false_words)
    judge(model)


@settings(DRAWN, max_examples=examples(200))
@given(episodes(GENTLE))
def test_rank_runs_in_the_end_if_no_fault_kills_it(story: list[Episode]) -> None:
    model, _ = play(story)
    assert len(running(model)) == 1
    assert not model.severed
    judge(model)
