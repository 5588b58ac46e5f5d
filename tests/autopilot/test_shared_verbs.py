"""Commands on a machine whose autopilot does not run: they know what the other autopilots have changed through etcd."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from migrator.autopilot import joining, operate
from migrator.autopilot.model import NodeState, Order
from migrator.autopilot.store import Store
from snapshotd.api.errors import Unreachable, WrongState
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.etcd_server import EtcdServer
from tests.cli.conftest import Migrator


def both(tmp_path: Path, etcd: EtcdServer) -> tuple[Path, Path]:
    folders = tmp_path / "there", tmp_path / "here"
    for folder in folders:
        joining.join(folder, etcd.settings)
    return folders


def change(folder: Path, state: NodeState) -> None:
    async def act() -> None:
        async with Store.open(folder) as store:
            await store.set_node("node-3", state, "of the other machine")

    asyncio.run(act())


def test_commands_know_what_another_machine_has_changed(
    pilots: PilotCluster, migrator: Migrator, tmp_path: Path, etcd: EtcdServer
) -> None:
    there, here = both(tmp_path, etcd)
    given = ("--state", str(here), "--json")
    change(there, NodeState.TAINTED)
    assert migrator("taint", "node-3", "--dry-run", *given).json["before"] == "tainted"
    change(there, NodeState.REPAIRING)
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    explained = migrator("policy", "explain", "node-3", "--policy", str(policy), *given)
    assert explained.json["state"] == "repairing"
    change(there, NodeState.DRAINING)
    found = migrator("watch", "--once", *given).json["nodes"]
    assert [one["state"] for one in found if one["name"] == "node-3"] == ["draining"]
    assert migrator("untaint", "node-3", "--dry-run", *given).json["before"] == "draining"


def test_commands_without_etcd_change_nothing_and_warn_of_what_they_show(
    pilots: PilotCluster, migrator: Migrator, tmp_path: Path, etcd: EtcdServer
) -> None:
    _, here = both(tmp_path, etcd)
    etcd.kill()
    for command in (("undrain", "node-3"), ("health", "--clear", "all", "node-3")):
        refused = migrator(*command, "--state", str(here))
        assert refused.code == Unreachable.exit_code
        assert "nothing was changed" in refused.err
        assert "repeat the command" in refused.err
    shown = migrator("proposals", "--state", str(here))
    assert (shown.code, shown.out) == (0, "the autopilot proposes nothing\n")
    assert "may be out of date" in shown.err


async def test_word_of_an_operator_is_about_the_newest_state(tmp_path: Path, etcd: EtcdServer) -> None:
    there, here = await asyncio.to_thread(both, tmp_path, etcd)
    async with Store.open(there) as other:
        order = await other.give_order(Order(0, "drain", "node-3", by="alice"), NodeState.DRAINING)
        async with Store.open(here) as store:
            used = await operate.use_again(store, "node-3", "bob")
        assert (used.before, used.orders) == (NodeState.DRAINING, [order.id])
        await other.follow()
        found = await other.load()
        assert (found.nodes["node-3"].state, found.orders) == (NodeState.HEALTHY, ())
        await other.set_node("node-3", NodeState.REPAIRING, "its validation failed")
        async with Store.open(here) as store:
            with pytest.raises(WrongState, match="node-3 is repairing"):
                await operate.taint(store, "node-3", "noise", "bob")
