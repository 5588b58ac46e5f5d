"""Only the node that has a rank can relay for it: nodes that had it once keep keys that are worthless."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied
from snapshotd.keepers import relay_keys
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.keepers.relay import Relays
from snapshotd.proc import host
from tests.served import Serve, servicer

UID, FIRST = "job-0-00000001", "0" * 32


def entry(role: str = "home", **fields: Any) -> RankEntry:
    known: dict[str, Any] = {
        "uid": UID,
        "job": "job",
        "rank": 0,
        "role": role,
        "keeper_pid": 1,
        "keeper_start_ticks": 1,
        "cgroup": "",
    }
    known |= {"home_node": "node-1", "home_endpoint": "node-1:7070", "relay_key": FIRST, "boot_id": host.boot_id()}
    return RankEntry(**(known | {"user_id": 1500} | fields))


def guest(handed: list[str]) -> RankEntry:
    """The entry on a node to which the rank was moved."""
    made = entry("guest")
    relay_keys.take_over(made, handed)
    return made


# ---------------------------------------------------------------- the home node


@pytest.fixture
def home(tmp_path: Path) -> Any:
    node: Any = SimpleNamespace(ranks=Ranks(tmp_path))
    known = entry(away_node="node-2")
    stand_in: Any = SimpleNamespace(role="home", pid=1, user_id=1500, is_closing=lambda: False)
    known.link = KeeperLink(stand_in, UID, stand_in, None, stand_in)
    node.ranks.put(known)
    return node


async def relay(node: Any, caller: str, **metadata: str) -> None:
    """Opens a relay as a daemon does, and ends it once the home node has answered. Raises Denied."""

    async def frames() -> AsyncIterator[pb.RelayFrame]:
        yield pb.RelayFrame()
        await asyncio.Event().wait()

    async with asyncio.timeout(30), aclosing(Relays(node).serve(frames(), metadata, caller)) as answers:
        await anext(answers)


async def test_node_that_had_a_rank_cannot_take_over_its_output_later(home: Any) -> None:
    first = {"rank-uid": UID, "relay-key": FIRST, "relay-next": "2" * 32}
    await relay(home, "node-2", **first)
    await relay(home, "node-3", **{"rank-uid": UID, "relay-key": "2" * 32, "relay-next": "3" * 32})
    for known in (first, {**first, "relay-key": "2" * 32}, {"rank-uid": UID, "relay-key": FIRST + " " + "2" * 32}):
        with pytest.raises(Denied):
            await relay(home, "node-2", **known)
    assert home.ranks.get(UID, "home").away_node == "node-3"


async def test_key_from_an_image_is_worthless_once_the_next_node_has_relayed(home: Any) -> None:
    stolen = {"rank-uid": UID, "relay-key": FIRST, "relay-next": "2" * 32}
    await relay(home, "node-3", **{"rank-uid": UID, "relay-key": FIRST, "relay-next": "3" * 32})
    with pytest.raises(Denied):
        await relay(home, "node-2", **stolen)
    assert home.ranks.get(UID, "home").away_node == "node-3"


async def test_key_is_recorded_before_the_home_node_answers(home: Any) -> None:
    await relay(home, "node-3", **{"rank-uid": UID, "relay-key": FIRST, "relay-next": "3" * 32})
    restarted = Ranks(home.ranks.folder.parent).get(UID, "home")
    assert restarted is not None
    assert (restarted.holder_key, restarted.away_node) == ("3" * 32, "node-3")
    assert restarted.relay_key == FIRST, "the home keeper still presents this one to its own daemon"


async def test_key_that_cannot_be_recorded_is_not_accepted(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: RankEntry) -> None:
        raise OSError(28, "No space left on device")

    known = {"rank-uid": UID, "relay-key": FIRST, "relay-next": "3" * 32}
    with monkeypatch.context() as patch:
        patch.setattr(home.ranks, "put", full)
        with pytest.raises(OSError, match="No space"):
            await relay(home, "node-3", **known)
    assert home.ranks.get(UID, "home").holder_key == ""
    await relay(home, "node-3", **known)


async def test_home_node_learns_the_coordinator_from_the_node_that_has_the_rank(home: Any) -> None:
    known = {"rank-uid": UID, "relay-key": FIRST, "relay-next": "2" * 32, "coordinator": "node-7"}
    await relay(home, "node-2", **known)
    await relay(home, "node-2", **(known | {"coordinator": "node-8"}))  # a snapshot binds it while the relay is up
    restarted = Ranks(home.ranks.folder.parent).get(UID, "home")
    assert restarted is not None
    assert restarted.coordinator_node == "node-8"
    with pytest.raises(Denied):
        await relay(home, "node-3", **(known | {"relay-next": "3" * 32, "coordinator": "node-3"}))
    assert home.ranks.get(UID, "home").coordinator_node == "node-8"


async def test_copy_that_was_ended_cannot_relay_any_more_not_even_its_end(home: Any) -> None:
    """Its node may come back after the rollback, and report that the rank was killed: the launcher would end."""
    known = {"rank-uid": UID, "relay-key": FIRST, "relay-next": "2" * 32}
    await relay(home, "node-2", **known)
    home.ranks.get(UID, "home").ended_by = "m-0000000000aa"
    with pytest.raises(Denied):
        await relay(home, "node-2", **known)
    ended = "m-0000000000aa m-0000000000bb"  # the home node could not be told of the second one
    keys = relay_keys.come_back(FIRST, [FIRST], ended)
    await relay(home, "node-3", **{"rank-uid": UID, "relay-key": " ".join(keys), "relay-next": "3" * 32})
    await relay(home, "node-3", **{"rank-uid": UID, "relay-key": "", "relay-next": "3" * 32})


async def test_key_made_from_the_record_that_ended_a_copy_is_accepted_once(home: Any) -> None:
    home.ranks.get(UID, "home").ended_by = "m-0000000000aa"
    again = {"rank-uid": UID, "relay-key": relay_keys.after_end(FIRST, "m-0000000000aa"), "relay-next": "2" * 32}
    await relay(home, "node-2", **again)
    await relay(home, "node-2", **again)  # the answer was lost
    with pytest.raises(Denied):
        await relay(home, "node-3", **(again | {"relay-next": "3" * 32}))


@pytest.mark.parametrize("key", ["", " ", "1" * 32, FIRST[:-1], FIRST + "0", f"{FIRST},{FIRST}"])
async def test_other_keys_are_denied(home: Any, key: str) -> None:
    with pytest.raises(Denied):
        await relay(home, "node-3", **{"rank-uid": UID, "relay-key": key, "relay-next": "3" * 32})
    with pytest.raises(Denied):
        await relay(home, "node-3", **{"rank-uid": UID, "relay-key": key, "relay-next": key})


async def test_guest_of_an_older_version_keeps_its_key(home: Any) -> None:
    older = entry("guest")
    for _ in range(2):
        await relay(home, "node-2", **relay_keys.presented(older))
    assert relay_keys.to_hand_over(older) == [FIRST]


# ---------------------------------------------------------------- the node that has the rank


async def test_relay_presents_a_new_key_at_once(serve: Serve, tmp_path: Path) -> None:
    """The move was undone, so its target must lose the key now, not when the connection breaks for some reason."""
    seen: asyncio.Queue[dict[str, str]] = asyncio.Queue()

    async def answer(frames: AsyncIterator[pb.RelayFrame], context: Any) -> AsyncIterator[pb.RelayFrame]:
        seen.put_nowait(dict(context.metadata))
        yield pb.RelayFrame(key_recorded=True)
        await asyncio.Event().wait()

    async def drain() -> None:
        pass

    stand_in: Any = SimpleNamespace(role="guest", pid=1, user_id=1500, write=lambda data: None, drain=drain)
    stand_in.close = stand_in.is_closing = lambda: False
    link, ranks = KeeperLink(stand_in, UID, stand_in, None, stand_in), Ranks(tmp_path)
    here = guest([FIRST])
    ranks.put(here)
    async with serve(servicer("Home", Relay=answer)) as served:
        node: Any = SimpleNamespace(ranks=ranks, client=lambda name, endpoint: served.root())
        relays = Relays(node)
        relays.start(here, link)
        first = await asyncio.wait_for(seen.get(), 30)
        assert (first["relay-key"], first["relay-next"]) == (FIRST, here.own_key)
        async with asyncio.timeout(30):
            while here.former_keys:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        relay_keys.replace(here)
        ranks.put(here)
        link.key_changed.set()
        second = await asyncio.wait_for(seen.get(), 30)
        assert (second["relay-key"], second["relay-next"]) == (first["relay-next"], here.own_key)
        assert second["relay-next"] != first["relay-next"]
        link.close()
        await relays.stop()
    restarted = Ranks(tmp_path).get(UID, "guest")
    assert restarted is not None
    assert restarted.own_key == here.own_key


async def test_home_node_that_does_not_record_keys_gets_the_former_one_again(serve: Serve, tmp_path: Path) -> None:
    """A daemon of version 0.1 compares the first key only."""

    async def answer(frames: AsyncIterator[pb.RelayFrame], context: Any) -> AsyncIterator[pb.RelayFrame]:
        yield pb.RelayFrame()

    async def drain() -> None:
        pass

    stand_in: Any = SimpleNamespace(role="guest", pid=1, user_id=1500, write=lambda data: None, drain=drain)
    link, here, ranks = KeeperLink(stand_in, UID, stand_in, None, stand_in), guest([FIRST]), Ranks(tmp_path)
    ranks.put(here)
    async with serve(servicer("Home", Relay=answer)) as served:
        node: Any = SimpleNamespace(ranks=ranks, client=lambda name, endpoint: served.root())
        await asyncio.wait_for(Relays(node)._once(here, link), 30)
    assert relay_keys.presented(here)["relay-key"] == FIRST


def test_keys_fit_into_the_metadata_of_a_call() -> None:
    holder = guest(["f" * 128])
    for _ in range(20):
        holder = guest(relay_keys.to_hand_over(holder))
        assert all(len(value) <= 1024 for value in relay_keys.presented(holder).values())
        assert relay_keys.check(entry(holder_key="f" * 128), relay_keys.presented(holder)) or holder.former_keys


def test_what_another_node_sends_as_a_key_is_checked() -> None:
    assert guest(["x", "", "A" * 32, "1" * 32, "1" * 129]).former_keys == ["1" * 32]


# ---------------------------------------------------------------- any order of events


def stored(known: RankEntry) -> RankEntry:
    """As after a restart."""
    return RankEntry(**json.loads(json.dumps(asdict(replace(known, link=None)))))


EVENTS = st.lists(st.sampled_from(["move", "undone", "relay", "answer lost", "restart"]), max_size=30)


@given(EVENTS)
def test_the_node_that_has_the_rank_can_always_relay_and_then_no_other_node_can(events: list[str]) -> None:
    home_entry, holder = entry(), guest([FIRST])
    others: list[dict[str, str]] = [{"rank-uid": UID, "relay-key": FIRST, "relay-next": "e" * 32}]

    def relays(known: RankEntry, *, answered: bool) -> None:
        key = relay_keys.check(home_entry, relay_keys.presented(known))
        assert key is not None
        home_entry.holder_key = key
        if answered:
            known.former_keys = []

    for event in events:
        if event == "restart":
            home_entry, holder = stored(home_entry), stored(holder)
        elif event in {"move", "undone"}:
            other = guest(relay_keys.to_hand_over(holder))
            if event == "move":
                holder, other = other, holder
            else:
                relay_keys.replace(holder)
            others.append(relay_keys.presented(other))
        else:
            relays(holder, answered=event == "relay")
        if len(holder.former_keys) >= relay_keys.MAX_FORMER:
            relays(holder, answered=True)  # with more of them, keys are kept in use
    relays(holder, answered=True)
    relays(holder, answered=True)
    for other_keys in others:
        assert relay_keys.check(home_entry, other_keys) is None


def test_rank_that_comes_back_from_an_older_image_presents_a_key_made_from_the_record_that_ended_its_copy() -> None:
    home = entry(holder_key="1" * 32, ended_by="m-0000000000aa")  # a newer key than the image has
    guest = entry("guest")
    relay_keys.take_over(guest, [FIRST])
    assert relay_keys.check(home, relay_keys.presented(guest)) is None
    relay_keys.take_over(guest, [relay_keys.after_end(FIRST, "m-0000000000aa"), FIRST])
    assert relay_keys.check(home, relay_keys.presented(guest)) == guest.own_key
    home.ended_by = "m-0000000000bb"
    assert relay_keys.check(home, relay_keys.presented(guest)) is None, "that copy was ended too"
