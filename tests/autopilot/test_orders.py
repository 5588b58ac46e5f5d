"""Orders to move one rank, carried out by the loop with fake daemons."""

from __future__ import annotations

from migrator.autopilot.model import NodeState, Order
from migrator.autopilot.store import Store
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import running, until
from tests.autopilot.worlds import acting
from tests.cli.conftest import a_rank

OBSERVE = acting("observe", jobs=[{"job": "bench-*", "move": False}])


async def ended(store: Store, rank: str, *targets: str) -> str:
    """Orders to move a rank of node-1, and returns how the order ended."""
    order = Order(0, "move", "node-1", targets, "a test", "alice", rank_uid=rank, rank_name="rank 0 of train")
    given = await store.give_order(order, None)

    async def summary() -> str:
        return (await store.order(given.id)).summary

    return str(await until("the end of the order", summary))


async def test_one_rank_moves_and_the_node_stays_in_use(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks += [a_rank("node-1", uid="train-0"), a_rank("node-1", rank=1, uid="train-1")]
    async with running(pilots, OBSERVE) as store:
        assert await ended(store, "train-0", "spare-2") == "1 rank moved"
        assert await ended(store, "train-1") == "1 rank moved"
        (first, second) = (await store.load()).moves
        assert (first.reason, first.cause, first.cause_class) == (
            "alice ordered to move it; spare-2 has room for all",
            "order 1",
            "planned",
        )
        assert second.target == "spare-1"
        assert await ended(store, "train-0") == "0 ranks moved; the rank is not on node-1 any more"
        states = {one.node for one in await store.events() if one.kind == "state"}
    assert states == set()
    assert pilots.places() == {"train-0": "spare-2", "train-1": "spare-1"}
    assert pilots.begun() == 2


async def test_move_that_fails_or_cannot_be_ends_with_the_reason_and_no_alert(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks += [a_rank("node-1", uid="train-0"), a_rank("node-1", job="bench-1", uid="bench-0")]
    pilots["node-1"].fails_to.add("spare-1")
    async with running(pilots, OBSERVE) as store:
        assert (await ended(store, "train-0", "spare-1")).startswith(
            "0 ranks moved; rank 0 of train stays: alice ordered to move it, but the move has failed; "
        )
        begun = pilots.begun()
        assert "the policy excludes its job" in await ended(store, "bench-0")
        assert "spare-1: failed just now" in await ended(store, "train-0", "spare-1")
        assert pilots.begun() == begun
        assert await ended(store, "train-0") == "1 rank moved"  # it tries the other one
        kinds = {one.kind for one in await store.events()}
    assert "alert" not in kinds
    assert pilots.places() == {"train-0": "spare-2", "bench-0": "node-1"}


async def test_node_can_be_drained_while_one_of_its_ranks_has_an_order(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks += [a_rank("node-1", uid="train-0"), a_rank("node-1", rank=1, uid="train-1")]
    async with Store.open(pilots.path.parent / "state") as store:
        order = Order(0, "move", "node-1", ("spare-2",), by="alice", rank_uid="train-0", rank_name="rank 0 of train")
        await store.give_order(order, None)
        await store.give_order(Order(0, "drain", "node-1", by="bob"), NodeState.DRAINING)
    async with running(pilots, OBSERVE) as store:

        async def drained() -> bool:
            stored = await store.load()
            return stored.nodes["node-1"].state is NodeState.DRAINED and not stored.orders

        await until("the drained node", drained)
    assert pilots.places() == {"train-0": "spare-2", "train-1": "spare-1"}
