"""The faults that can occur at an event of a move, by name, and the conditions that must hold in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from migrator.protocol import Verdict
from snapshotd.moves.rules import Mark, Outcome
from tests.protocol.model import Model
from tests.protocol.mover import Move, leftovers, other, running
from tests.protocol.network import AWAY, HOME, PEER
from tests.protocol.world import DRIVER, LEASE_S, PERSON, World

Strike = Callable[[World, "Scene"], None]


@dataclass
class Scene:
    """One move with faults. `back`: a rank that has already moved once moves home again."""

    faults: dict[int, str]
    back: bool = False
    ticking: bool = True
    soon: bool = True  # what died is back before the driver's next request; else only when the driver has ended
    peers: tuple[str, ...] = (PEER,)
    survived: bool = True  # whether a copy must run in the end, given the state in which the fault occurred
    model: Model = field(init=False)
    move: Move = field(init=False)

    def __post_init__(self) -> None:
        self.model = Model(ticking=self.ticking, peers=self.peers)
        self.source, self.target = (AWAY, HOME) if self.back else (HOME, AWAY)
        if self.back:
            assert Move(self.model, "m-0", HOME, AWAY).run() is Verdict.MOVED
            self.model.settle()
        self.move = Move(self.model, "m-1", self.source, self.target)
        self.first_event = len(self.model.labels)
        for event, name in self.faults.items():
            self.model.faults[self.first_event + event] = lambda world, name=name: self.strike(name)  # type: ignore[misc]

    def strike(self, name: str) -> None:
        STRIKES[name](self.model, self)

    def down(self, node: str) -> None:
        if self.soon:
            self.model.coming_back.add(node)

    def kill_source_copy(self) -> None:
        """The rank dies. It must survive if the target holds, or has activated, a complete copy."""
        aborted = self.move.at_source is not None and self.move.at_source.outcome is Outcome.ABORT
        held = self.move.at_target is not None and self.move.at_target.mark in (Mark.HELD, Mark.ACTIVATED)
        whole = held and self.move.at_target is not None and self.move.at_target.copy_exists
        self.survived = self.survived and whole and not aborted
        if self.move.moved_copy is not None:
            self.model.fall(self.move.moved_copy)

    def kill_target_copy(self) -> None:
        """The restored copy dies. The rank must survive unless that copy was activated."""
        if self.move.at_target is not None and self.move.at_target.copy is not None:
            self.survived = self.survived and self.move.at_target.mark is not Mark.ACTIVATED
            self.model.fall(self.move.at_target.copy)

    # ------------------------------------------------------------ the whole scenario, and what must hold

    def play(self) -> Scene:
        self.move.run()
        return self.play_on()

    def play_on(self) -> Scene:
        self.model.settle(2)  # under partitions that last
        self.model.faults.clear()
        self.model.drop = self.model.delay = self.model.criu_killed = False
        self.model.cuts.clear()
        self.model.settle(2)
        return self

    def judge(self, *, retry: bool = True) -> None:
        """Checks the end of a scenario in which all daemons run and reach each other."""
        model, move = self.model, self.move
        if move.verdict is Verdict.MOVED:
            assert move.committed
        elif move.verdict in (Verdict.UNDONE, Verdict.REFUSED):
            assert not move.committed
        elif move.verdict is Verdict.UNKNOWN:
            assert not move.knowable
        assert not move.stranded, "the source has not taken back what died at the target"
        assert all(record.overruled_by != PERSON for record in model.journal.values())
        if model.keeper_killed:
            assert not any(copy.alive for copy in model.copies), "a killed keeper takes its rank with it"
            return
        owner = move.owner()
        assert running(model) == ([owner] if owner else [])
        assert owner or not self.survived, "the rank is lost without need"
        assert leftovers(model) == []
        if owner and retry:
            self.retry(owner.node)

    def retry(self, start: str) -> None:
        again = Move(self.model, "m-2", start, other(start))
        assert again.run() is Verdict.MOVED
        self.model.settle()
        assert [copy.node for copy in running(self.model)] == [other(start)]
        assert leftovers(self.model) == []


def _reboot(world: World, scene: Scene, node: str) -> None:
    if node != PEER:
        (scene.kill_source_copy if node == scene.source else scene.kill_target_copy)()
    world.reboot(node)
    scene.down(node)


def _daemon(world: World, scene: Scene, node: str) -> None:
    world.kill(node)
    scene.down(node)


def _guest_keeper(world: World, scene: Scene) -> None:
    """Once the daemon has decided to write ACTIVATED, a copy that dies counts as one that has run."""
    scene.kill_target_copy()
    scene.survived = scene.survived and not world.labels[-1].endswith("mark activated")


def _guest_keeper_while_asked(world: World, scene: Scene) -> None:
    """The copy dies while the daemon activates it, and the source asks for it before the mark is written."""
    _guest_keeper(world, scene)
    world.tick(scene.source)


def _set(name: str) -> Strike:
    return lambda world, scene: setattr(world, name, True)


def _cut(one: str, another: str) -> Strike:
    def strike(world: World, scene: Scene) -> None:
        named = {"driver": DRIVER, "source": scene.source, "target": scene.target, "peer": PEER}
        world.cuts.add(frozenset((named[one], named[another])))

    return strike


STRIKES: dict[str, Strike] = {
    "driver dies": lambda world, scene: world.kill(DRIVER),
    "source daemon dies": lambda world, scene: _daemon(world, scene, scene.source),
    "target daemon dies": lambda world, scene: _daemon(world, scene, scene.target),
    "source node reboots": lambda world, scene: _reboot(world, scene, scene.source),
    "target node reboots": lambda world, scene: _reboot(world, scene, scene.target),
    "peer daemon dies": lambda world, scene: _daemon(world, scene, PEER),
    "peer node reboots": lambda world, scene: _reboot(world, scene, PEER),
    "rank dies on source": lambda world, scene: scene.kill_source_copy(),
    "guest keeper dies on target": _guest_keeper,
    "guest keeper dies on target, the source asks": _guest_keeper_while_asked,
    "home keeper dies": _set("keeper_killed"),
    "criu dies": _set("criu_killed"),
    "driver and source cut off": _cut("driver", "source"),
    "driver and target cut off": _cut("driver", "target"),
    "source and target cut off": _cut("source", "target"),
    "driver and peer cut off": _cut("driver", "peer"),
    "source and peer cut off": _cut("source", "peer"),
    "target and peer cut off": _cut("target", "peer"),
    "request lost": _set("drop"),
    "request late": _set("delay"),
    "answer lost": _set("drop"),
    "silence longer than the lease": lambda world, scene: setattr(world, "now_s", world.now_s + LEASE_S + 1),
}


def fits(name: str, label: str) -> bool:
    """Whether the fault is possible at this event: messages are lost where one is sent, criu dies where it runs."""
    if name.startswith("request"):
        return label.endswith("asked")
    if name == "answer lost":
        return label.endswith("answered")
    if name.endswith("the source asks"):
        return label == "target: mark activated"
    return name != "criu dies" or "criu" in label


def labels(*, back: bool, ticking: bool) -> list[str]:
    """The events of a move without faults."""
    scene = Scene({}, back=back, ticking=ticking)
    assert scene.move.run() is Verdict.MOVED
    named = [label.replace(scene.source, "source").replace(scene.target, "target") for label in scene.model.labels]
    return named[scene.first_event :]


def single_faults(*, back: bool, ticking: bool) -> Iterator[tuple[int, str, str]]:
    for event, label in enumerate(labels(back=back, ticking=ticking)):
        yield from ((event, label, name) for name in STRIKES if fits(name, label))
