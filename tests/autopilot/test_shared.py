"""The shared state with a real etcd: copies follow, a deposed leader changes nothing, foreign state is refused."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from migrator import pki
from migrator.autopilot import chain, database, joining, leader, shared
from migrator.autopilot.etcd import Etcd, Settings, Unavailable
from migrator.autopilot.model import MoveState, NodeState, Order
from migrator.autopilot.store import Store
from migrator.autopilot.terms import shorten
from snapshotd.api import etcd_pb2 as pb
from snapshotd.api.errors import BadConfig, Full, Usage, WrongState
from tests.autopilot.etcd_server import EtcdServer, free_port, must_be_installed
from tests.autopilot.worlds import move, rank


@contextlib.asynccontextmanager
async def joined(folder: Path, etcd: EtcdServer, *, fence: int = 0) -> AsyncIterator[Store]:
    await asyncio.to_thread(joining.join, folder, etcd.settings)
    async with Store.open(folder, fence=fence) as store:
        yield store


def elected(etcd: EtcdServer) -> leader.Term:
    found = leader.elect(Etcd(etcd.settings), b"/migrator-autopilot/leader")
    assert isinstance(found, leader.Term), f"{found} leads"
    return found


def content(folder: Path) -> dict[str, list[tuple[object, ...]]]:
    """All that a database has."""
    connection = sqlite3.connect(folder / database.FILE)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {name: connection.execute(f"SELECT rowid, * FROM {name}").fetchall() for name in tables}
    connection.close()
    return found


async def test_change_of_one_is_made_by_all(tmp_path: Path, etcd: EtcdServer) -> None:
    async with joined(tmp_path / "a", etcd) as one, joined(tmp_path / "b", etcd) as other:
        await one.set_node("node-1", NodeState.TAINTED, "noise", "alice")
        order = await one.give_order(Order(0, "drain", "node-2", (), "fan", "bob"), NodeState.DRAINING)
        # The other one has not heard of it, and changes something: it must get the next numbers.
        later = await other.give_order(Order(0, "drain", "node-3", (), "", "eve"), NodeState.DRAINING)
        assert (order.id, later.id) == (1, 2)
        with pytest.raises(WrongState, match="in progress"):
            await one.give_order(Order(0, "drain", "node-3", (), "", "bob"), NodeState.DRAINING)
        assert await one.follow() is False, "the refusal has read the newest state"
        assert not await other.follow()
        assert chain.problems(await one.events()) == []
        assert await one.events() == await other.events()
    assert content(tmp_path / "a") == content(tmp_path / "b")


async def test_changes_at_the_same_time_are_all_made_once(tmp_path: Path, etcd: EtcdServer) -> None:
    async with (
        joined(tmp_path / "a", etcd) as one,
        joined(tmp_path / "b", etcd) as other,
        Store.open(one.folder) as verb,
    ):
        stores = (one, other, verb)
        await asyncio.gather(*(store.note("x", str(number)) for number in range(20) for store in stores))
        await asyncio.gather(*(store.follow() for store in stores))
        texts = sorted(record.text for record in await one.events())
    assert texts == sorted(str(number) for number in range(20) for _ in stores)
    assert content(tmp_path / "a") == content(tmp_path / "b")


async def test_existing_state_becomes_the_first_snapshot(tmp_path: Path, etcd: EtcdServer) -> None:
    async with Store.open(tmp_path / "a") as alone:
        await alone.set_node("node-1", NodeState.TAINTED, "noise", "alice")
    async with joined(tmp_path / "a", etcd) as one, joined(tmp_path / "b", etcd) as other:
        assert (await other.load()).nodes["node-1"].state is NodeState.TAINTED
        await other.note("x", "after")
        await one.follow()
    assert content(tmp_path / "a") == content(tmp_path / "b")


async def test_deposed_leader_cannot_intend_a_move(tmp_path: Path, etcd: EtcdServer) -> None:
    first = await asyncio.to_thread(elected, etcd)
    async with joined(tmp_path / "a", etcd, fence=first.fence) as deposed:
        await deposed.intend(move(rank(0, "node-1"), "spare-1", MoveState.INTENDED, id="m-1"))
        await asyncio.to_thread(first.resign)
        with pytest.raises(shared.TermOver):
            await deposed.intend(move(rank(1, "node-1"), "spare-1", MoveState.INTENDED, id="m-2"))
        second = await asyncio.to_thread(elected, etcd)
        assert second.fence > first.fence
        async with joined(tmp_path / "b", etcd, fence=second.fence) as successor:
            assert [one.id for one in await successor.intended()] == ["m-1"]
            with pytest.raises(shared.TermOver):
                await deposed.finish("m-1", MoveState.MOVED, "")
            assert await successor.finish("m-1", MoveState.MOVED, "")
            with pytest.raises(shared.TermOver, match="another autopilot leads"):
                await deposed.note("x", "I am back")
    with pytest.raises(shared.TermOver):
        first.must_hold()


async def test_only_one_is_elected_until_its_lease_ends(tmp_path: Path, etcd: EtcdServer) -> None:
    client, key = Etcd(etcd.settings), b"/migrator-autopilot/leader"
    found = await asyncio.gather(*(asyncio.to_thread(leader.elect, client, key) for _ in range(5)))
    assert sum(isinstance(one, leader.Term) for one in found) == 1
    assert await asyncio.to_thread(leader.current, client, key) == leader.my_name()
    client.close()


async def test_snapshot_shortens_the_history_and_late_copies_continue_from_it(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "EVERY", 30)
    monkeypatch.setattr(shared, "EVERY_CHUNK", 0)
    monkeypatch.setattr(leader, "TTL_S", 60)  # nothing here keeps the term alive
    monkeypatch.setattr("migrator.autopilot.snapshots.CHUNK_BYTES", 1000)
    term = await asyncio.to_thread(elected, etcd)
    client = Etcd(etcd.settings)
    everything = pb.RangeRequest(key=b"/migrator-autopilot/", range_end=b"/migrator-autopilot0")
    async with joined(tmp_path / "late", etcd) as late:
        await late.note("x", "early")
        async with joined(tmp_path / "a", etcd, fence=term.fence) as one:
            for number in range(100):
                await one.note("x", str(number), noise=secrets.token_hex(20))
                await asyncio.to_thread(shorten, one)
            keys = [pair.key for pair in await asyncio.to_thread(client.range, everything)]
            assert sum(b"/entry/" in key for key in keys) <= 40
            names = {key.split(b"/")[3] for key in keys if b"/chunk/" in key}
            assert len(names) == 1, "older snapshots are removed"
            assert sum(b"/chunk/" in key for key in keys) > 1
            assert await late.follow()
            async with joined(tmp_path / "new", etcd) as new:
                assert await new.events() == await one.events() == await late.events()
                await new.note("x", "of the new one")
            await one.follow()
            await late.follow()
    client.close()
    assert content(tmp_path / "a") == content(tmp_path / "late") == content(tmp_path / "new")


async def test_folder_with_a_state_of_its_own_is_refused(tmp_path: Path, etcd: EtcdServer) -> None:
    async with joined(tmp_path / "a", etcd) as one:
        await one.note("x", "shared")
    async with Store.open(tmp_path / "b") as alone:
        await alone.note("x", "alone")
    with pytest.raises(BadConfig, match="has one of its own"):
        await asyncio.to_thread(joining.join, tmp_path / "b", etcd.settings)
    async with Store.open(tmp_path / "b") as alone:  # nothing has changed
        await alone.note("x", "still alone")


async def test_etcd_that_was_set_back_is_refused(tmp_path: Path, etcd: EtcdServer) -> None:
    async with joined(tmp_path / "a", etcd) as one:
        await one.note("x", "1")
        etcd.kill()
        shutil.copytree(etcd.folder / "data", etcd.folder / "backup")
        etcd.start()
        await one.note("x", "2")
        etcd.kill()
        shutil.rmtree(etcd.folder / "data")
        shutil.copytree(etcd.folder / "backup", etcd.folder / "data")
        etcd.start()
        with pytest.raises(BadConfig, match="with changes that etcd does not have") as refused:
            await one.note("x", "3")
        assert "--etcd-begin-anew" in refused.value.advice
        async with joined(tmp_path / "b", etcd) as other:  # the history goes on without the lost change
            await other.note("x", "another 2")
            await other.note("x", "another 3")
        with pytest.raises(BadConfig, match="not a copy"):
            await one.note("x", "3")
        assert [record.text for record in await one.events()] == ["1", "2"]


async def test_etcd_without_its_data_is_refused_until_an_operator_begins_anew(tmp_path: Path, etcd: EtcdServer) -> None:
    async with joined(tmp_path / "a", etcd) as one:
        await one.note("x", "1")
    etcd.kill()
    shutil.rmtree(etcd.folder / "data")
    etcd.start()
    with pytest.raises(BadConfig, match="has no state"):
        await asyncio.to_thread(joining.join, tmp_path / "a", etcd.settings)
    await asyncio.to_thread(joining.join, tmp_path / "a", etcd.settings, begin_anew=True)
    async with joined(tmp_path / "a", etcd) as one, joined(tmp_path / "b", etcd) as other:
        await one.note("x", "2")
        await other.follow()
        assert [record.text for record in await other.events()] == ["1", "2"]


async def test_without_etcd_nothing_is_changed_and_it_goes_on_afterwards(tmp_path: Path, etcd: EtcdServer) -> None:
    term = await asyncio.to_thread(elected, etcd)
    async with joined(tmp_path / "a", etcd) as one, Store.open(tmp_path / "a", fence=term.fence) as leading:
        await leading.note("x", "1")
        etcd.kill()
        with pytest.raises(Unavailable, match="cannot be used"):
            await one.note("x", "2")
        with pytest.raises(shared.TermOver):
            await leading.intend(move(rank(0, "node-1"), "spare-1", MoveState.INTENDED, id="m-1"))
        assert len(await one.events()) == 1, "the state can be read"
        assert await one.intended() == []
        etcd.start()
        await one.note("x", "3")
        assert [record.text for record in await one.events()] == ["1", "3"]


async def test_crash_between_etcd_and_sqlite_loses_nothing(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path / "a", etcd) as one:
        await one.note("x", "1")

        def dies(connection: sqlite3.Connection, here: shared.Head) -> None:
            raise KeyboardInterrupt  # after etcd has it, before SQLite's commit

        with monkeypatch.context() as patched:
            patched.setattr(shared, "_set", dies)
            connection = database.connect(tmp_path / "a")
            connection.execute("BEGIN IMMEDIATE")
            tx = database.Transaction(connection, one.now)
            tx.append("x", "2")
            with pytest.raises(KeyboardInterrupt):
                shared.Shared(Etcd(etcd.settings), database.SCHEMA).publish(connection, tx.statements)
            connection.close()
        assert [record.text for record in await one.events()] == ["1"]
        await one.note("x", "3")
        assert [record.text for record in await one.events()] == ["1", "2", "3"]
        assert chain.problems(await one.events()) == []


async def test_lost_answer_and_another_writer_make_no_change_twice(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path / "a", etcd) as one, joined(tmp_path / "b", etcd) as other:
        assert one.history is not None
        client, loop = one.history.etcd, asyncio.get_running_loop()
        transact = client.transact

        def twice(request: pb.TxnRequest) -> pb.TxnResponse:
            assert transact(request).succeeded  # this answer is lost
            asyncio.run_coroutine_threadsafe(other.note("x", "of the other one"), loop).result(60)
            return transact(request)

        with monkeypatch.context() as patched:
            patched.setattr(client, "transact", twice)
            intended = move(rank(0, "node-1"), "spare-1", MoveState.INTENDED, id="m-1")
            await one.intend(intended)  # and is not refused because of itself
        assert [record.kind for record in await other.events()] == ["intent", "x"]
        await one.note("x", "later")
        assert [record.text for record in await one.events()][1:] == ["of the other one", "later"]
        await other.follow()
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize("fails", ["snapshot", "before", "after"])
async def test_first_start_that_etcd_interrupts_can_be_repeated(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    async with Store.open(tmp_path / "a") as alone:
        await alone.note("x", "1")
    transact = Etcd.transact

    def away(client: Etcd, *given: object) -> None:
        raise Unavailable("etcd does not answer")

    def lost(client: Etcd, request: pb.TxnRequest) -> None:
        transact(client, request)
        raise Unavailable("etcd does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(Etcd, "put" if fails == "snapshot" else "transact", lost if fails == "after" else away)
        with pytest.raises(Unavailable):
            await asyncio.to_thread(joining.join, tmp_path / "a", etcd.settings)
    if fails == "snapshot":
        async with Store.open(tmp_path / "a") as alone:
            await alone.note("x", "2")  # it is as it was
    async with joined(tmp_path / "a", etcd) as one, joined(tmp_path / "b", etcd) as other:
        await one.note("x", "3")
        await other.follow()
        assert await other.events() == await one.events()


async def test_beginning_that_another_autopilot_was_faster_with_is_forgotten(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(client: Etcd, *given: object) -> None:
        raise Unavailable("etcd does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(Etcd, "transact", away)
        with pytest.raises(Unavailable):
            await asyncio.to_thread(joining.join, tmp_path / "a", etcd.settings)
    async with joined(tmp_path / "b", etcd) as other:
        await other.note("x", "1")
        async with joined(tmp_path / "a", etcd) as one:
            assert await one.events() == await other.events()


async def test_change_that_is_too_large_for_etcd_harms_no_other(tmp_path: Path, etcd: EtcdServer) -> None:
    async with joined(tmp_path / "a", etcd) as one:
        small = [one.note("x", f"small {number}") for number in range(3)]
        large = one.note("x", "large", noise=secrets.token_hex(2 << 20))
        results = await asyncio.gather(*small, large, one.note("x", "last"), return_exceptions=True)
        assert [type(result) for result in results] == [type(None)] * 3 + [Full, type(None)]
        assert len(await one.events()) == 4


async def test_other_statements_than_changes_are_refused(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path / "a", etcd) as one, joined(tmp_path / "b", etcd) as other:

        def attack(tx: database.Transaction) -> None:
            tx.execute("PRAGMA user_version = 9")

        with monkeypatch.context() as patched:
            patched.setattr(shared, "_CHANGES", ("PRAGMA ",))
            await one._change(attack)
        with pytest.raises(BadConfig, match="no statement of an autopilot"):
            await other.follow()


async def test_folder_remembers_its_etcd(tmp_path: Path, etcd: EtcdServer) -> None:
    async with joined(tmp_path / "a", etcd) as one:
        await one.note("x", "1")
    (tmp_path / "a" / "etcd.json").unlink()
    async with Store.open(tmp_path / "a") as one:
        with pytest.raises(BadConfig, match=r"etcd\.json is missing") as refused:
            await one.note("x", "2")
    assert "--etcd none" in refused.value.advice
    await asyncio.to_thread(joining.leave, tmp_path / "a")
    async with Store.open(tmp_path / "a") as one:
        await one.note("x", "2")


async def test_certificates_and_an_endpoint_that_is_down(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    must_be_installed(request)
    await asyncio.to_thread(pki.init, tmp_path / "ca")
    known = await asyncio.to_thread(pki.issue_node, tmp_path / "ca", "etcd-1", ["127.0.0.1"])
    urls = tuple(f"https://127.0.0.1:{free_port()}" for _ in range(2))  # at the first one there is nothing
    settings = Settings(urls, known.cert, known.key, known.ca)
    server = EtcdServer(tmp_path / "etcd", settings=settings)
    server.start()
    try:
        async with joined(tmp_path / "a", server) as one, joined(tmp_path / "b", server) as other:
            await one.note("x", "1")
            await other.follow()
            assert len(await other.events()) == 1
        stranger = Settings(urls, ca=known.ca)
        with pytest.raises(Unavailable):
            await asyncio.to_thread(joining.join, tmp_path / "c", stranger)
    finally:
        server.kill()


@pytest.mark.parametrize("url", ["etcd-1:2379", "https://etcd-1", "ftp://etcd-1:2379", "https://etcd-1:2379/x", ""])
def test_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(Usage, match="endpoint"):
        Settings((url,))
