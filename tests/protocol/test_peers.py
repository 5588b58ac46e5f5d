"""Tests the peers' sockets: they are blocked during a move, re-pointed or pointed back, and never reset."""

from __future__ import annotations

import pytest

from migrator.protocol import Verdict
from snapshotd.moves.rules import Mark
from tests.protocol.faults import Scene, labels
from tests.protocol.mover import leftovers, person_says, running
from tests.protocol.network import AWAY, HOME, PEER, Broken, Copy
from tests.protocol.peering import LOST_S
from tests.protocol.world import DRIVER, World

PAL = "pal"
WALKED = labels(back=False, ticking=False)
CHANGING = range(WALKED.index("driver: Repoint asked") + 1, WALKED.index("peer: Repoint answered") + 1)


def cut_off(scene: Scene, *nodes: str) -> None:
    scene.model.cuts |= {frozenset((PEER, node)) for node in nodes}


@pytest.mark.parametrize("ticking", [False, True])
def test_unreachable_peer_delays_only_its_own_connection(ticking: bool) -> None:
    """A peer is isolated at any event. The rank runs, the other peer communicates with it, and no process stays stopped."""
    moved = 0
    for event in range(len(labels(back=False, ticking=ticking)) + 10):
        scene = Scene({}, ticking=ticking, peers=(PEER, PAL))
        scene.model.faults[event] = lambda _, scene=scene: cut_off(scene, DRIVER, HOME, AWAY)  # type: ignore[misc]
        scene.move.run()
        scene.model.settle()
        moved += scene.move.verdict is Verdict.MOVED
        assert len(running(scene.model)) == 1
        assert scene.model.flows(PAL), event
        assert all(program.running for program in scene.model.programs.values())
        scene.play_on().judge()
        assert scene.model.flows(PEER), event
        assert not scene.model.severed
    assert moved


def test_process_runs_again_before_the_outcome_is_known() -> None:
    """The peer's daemon dies while it changes a socket, is isolated, and comes back: the process must run again."""
    stopped = 0
    for event in CHANGING:
        scene = Scene({event: "peer daemon dies"}, ticking=False, soon=False)
        scene.move.run()
        stopped += not scene.model.programs[PEER].running
        cut_off(scene, DRIVER, HOME, AWAY)
        scene.model.settle()
        assert scene.model.programs[PEER].running
        scene.play_on().judge()
        assert scene.model.flows(PEER)
    assert stopped


@pytest.mark.parametrize("ticking", [False, True])
def test_peer_settles_for_commit_only_once_the_target_runs_the_rank(ticking: bool) -> None:
    """The driver dies after COMMIT and the target's copy dies before it ran. The connection continues on the source."""
    walked = labels(back=False, ticking=ticking)
    scene = Scene({walked.index("source: Commit answered"): "driver dies"}, ticking=ticking)
    scene.move.run()
    scene.model.cuts.add(frozenset((HOME, AWAY)))
    scene.model.settle()
    at_peer = scene.model.journal[PEER, "m-1"]
    assert at_peer.mark is Mark.REPOINTED
    assert at_peer.outcome is None
    scene.kill_target_copy()
    scene.play_on()
    assert [copy.node for copy in running(scene.model)] == [HOME]
    assert scene.model.flows(PEER)
    scene.judge()


def test_peer_can_learn_the_outcome_from_the_target_alone() -> None:
    """Source and target are partitioned for ever, and the driver dies after Activate. The peer asks the target."""
    scene = Scene({WALKED.index("target: Activate answered"): "driver dies"}, ticking=False)
    scene.move.run()
    scene.model.cuts.add(frozenset((HOME, AWAY)))
    scene.model.settle()
    assert scene.model.flows(PEER)


def test_peers_follow_the_target_if_the_source_is_declared_dead() -> None:
    """This works while the source is dead, although only the source knew the outcome."""
    for label in ("driver: Commit asked", "source: record COMMIT", "driver: Activate asked"):
        scene = Scene({}, ticking=False)
        scene.model.dead_for_ever.add(HOME)
        scene.model.faults[WALKED.index(label)] = lambda world: world.reboot(HOME)
        scene.move.run()
        scene.model.settle()
        if not running(scene.model):
            assert person_says(scene.model, AWAY, "DeclareSourceDead", "m-1")
        scene.model.settle()
        assert scene.model.flows(PEER), label
        scene.model.dead_for_ever.clear()
        scene.play_on()
        assert scene.model.flows(PEER), label
        assert leftovers(scene.model) == []


def test_frozen_rank_that_dies_keeps_its_connections_on_the_target() -> None:
    """The source does not commit by itself while the driver runs, because the driver will first re-point the peers."""
    for ticking in (False, True):
        walked = labels(back=False, ticking=ticking)
        for event in range(walked.index("target: mark held") + 1, walked.index("source: release: silence")):
            scene = Scene({event: "rank dies on source"}, ticking=ticking).play()
            assert scene.move.verdict is Verdict.MOVED
            assert scene.model.flows(PEER), walked[event]
            scene.judge()


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("ticking", [False, True])
def test_source_that_reboots_before_the_re_point_resets_no_peer(ticking: bool, soon: bool) -> None:
    """Its kernel answers packets of old connections with RST, and its own filter is lost: the peers' filters drop it. If the
    driver gives up, the source commits the target's copy when it is back, and the peers re-point by themselves."""
    walked = labels(back=False, ticking=ticking)
    for event in range(walked.index("target: mark held") + 1, walked.index("driver: Commit asked")):
        scene = Scene({event: "source node reboots"}, ticking=ticking, soon=soon).play()
        assert not scene.model.severed, walked[event]
        assert scene.model.flows(PEER), walked[event]
        assert [copy.node for copy in running(scene.model)] == [AWAY], walked[event]
        scene.judge()


def test_peer_that_hears_of_no_one_lets_its_connections_go() -> None:
    """Driver, source and target die for good between the freeze and the re-point."""
    scene = Scene({}, ticking=False)
    scene.model.dead_for_ever |= {HOME, AWAY}

    def all_die(world: World) -> None:
        for node in (DRIVER, HOME, AWAY):
            world.kill(node)

    scene.model.faults[WALKED.index("target: mark held") + 1] = all_die
    scene.move.run()
    scene.model.settle()
    assert scene.model.journal[PEER, "m-1"].mark is Mark.FILTERED
    assert [entry for entry in scene.model.filters if entry[0] == PEER]
    scene.model.now_s += LOST_S
    scene.model.settle()
    assert scene.model.journal[PEER, "m-1"].mark is Mark.SETTLED
    assert not [entry for entry in scene.model.filters if entry[0] == PEER]
    assert not scene.model.programs[PEER].sockets[PEER].timeouts_suspended


@pytest.mark.parametrize("late", ["SuspendTimeouts", "Hold", "Repoint"])
def test_request_that_arrives_after_abort_changes_nothing(late: str) -> None:
    """The request arrives after ABORT has been sent to the peers. A peer that did not know the move asks and undoes it."""
    scene = Scene({WALKED.index(f"driver: {late} asked"): "request late"}, ticking=False)
    scene.move.run()
    assert scene.move.verdict is Verdict.UNDONE
    assert scene.model.flows(PEER)
    scene.play_on()
    assert f"{PEER}: mark {Mark.REPOINTING}" not in scene.model.labels
    scene.judge()


def test_peer_points_back_without_the_driver() -> None:
    """The driver dies when all peers are re-pointed. The lease expires, and the source answers ABORT to every query."""
    scene = Scene({WALKED.index("driver: Commit asked"): "driver dies"}, ticking=False).play()
    assert f"{PEER}: mark {Mark.POINTED_BACK}" in scene.model.labels
    assert [copy.node for copy in running(scene.model)] == [HOME]
    scene.judge()


# ------------------------------------------------------------ the network itself


def connected_world() -> Scene:
    scene = Scene({}, ticking=False)
    assert scene.model.flows(PEER)
    return scene


def test_stale_address_without_a_filter_is_answered_with_rst() -> None:
    scene = connected_world()
    scene.model.programs[PEER].sockets[PEER].names = AWAY
    with pytest.raises(Broken, match="RST from"):
        scene.model.retransmit(for_real=False)
    for node in (PEER, AWAY):
        scene.model.hold(node, "m-1", PEER, AWAY, HOME)
        if node == PEER:
            scene.model.retransmit(for_real=False)
            scene.model.drop_filters(PEER, "m-1")
    with pytest.raises(Broken, match=f"RST from {PEER} to {HOME}"):
        scene.model.retransmit(for_real=False)


def test_model_detects_a_running_process_with_a_partly_changed_socket() -> None:
    scene = connected_world()
    scene.model.programs[PEER].sockets[PEER].repair = True
    with pytest.raises(Broken, match="half changed"):
        scene.model.retransmit(for_real=False)


def test_model_detects_a_dropped_copy_that_sends_packets() -> None:
    scene = connected_world()
    scene.model.copies.append(Copy(AWAY, running=True))  # the rank runs on another node
    with pytest.raises(Broken, match="says goodbye"):
        scene.model.kill_silently(scene.model.copies[0])
    scene.model.hold(HOME, "m-1", PEER, HOME)
    scene.model.kill_silently(scene.model.copies[0])


@pytest.mark.parametrize("died", [HOME, PEER])
def test_death_of_a_node_excuses_a_lost_connection(died: str) -> None:
    scene = connected_world()
    scene.model.reboot(died)
    scene.model.retransmit(for_real=True)
    assert not any(socket.lost for _, _, socket in scene.model.ends()), "a node that is off does not answer"
    scene.model.settle()
    assert not list(scene.model.ends())
