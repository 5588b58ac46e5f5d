"""Relays stdio, signals and exit status between a rank's guest keeper and its home keeper, through both nodes' daemons.

The daemons do not interpret the frames. What is lost when a connection breaks, the keepers send again by byte offset. If
the home keeper has died, the rank is killed, so that no orphan runs beside a restarted job. If the home node is
unreachable or was rebooted, the rank keeps running and its keeper spools. Which node may relay is decided by keys
(relay_keys.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from shim.keeper.frames import decode, encode
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, NotFound, RankGone, SnapshotError, Unreachable, Where
from snapshotd.keepers import relay_keys
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.ranks import RankEntry, check_rank_uid
from snapshotd.moves.node import Node

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


class Relays:
    """All relays of this daemon: of guests on this node to their home nodes, and from other nodes to home keepers here."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._out: dict[str, asyncio.Task[None]] = {}
        self._in: dict[str, asyncio.Task[None]] = {}

    # ------------------------------------------------------------------ on the guest's node

    def start(self, entry: RankEntry, link: KeeperLink) -> None:
        """Starts to relay for an activated guest, until its link closes."""
        if (old := self._out.get(entry.uid)) is not None:
            old.cancel()
        task = self._out[entry.uid] = asyncio.create_task(self._keep_up(entry, link), name=f"relay {entry.uid}")
        task.add_done_callback(lambda ended: self._forget(entry.uid, ended))

    def _forget(self, uid: str, ended: asyncio.Task[None]) -> None:
        if self._out.get(uid) is ended:
            del self._out[uid]

    async def stop(self) -> None:
        tasks = [*self._out.values(), *self._in.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_up(self, entry: RankEntry, link: KeeperLink) -> None:
        wait_s, logged = _FIRST_WAIT_S, ""
        while not link.closed.is_set():
            try:
                await self._until_key_changes(entry, link)
                wait_s = _FIRST_WAIT_S
            except RankGone as error:
                log.warning("killing rank %s: %s", entry.uid, error.message)
                with contextlib.suppress(SnapshotError):
                    await link.kill()
                return
            except SnapshotError as error:
                if error.message != logged:
                    logged = error.message
                    log.info("the relay of rank %s to %s is down: %s", entry.uid, entry.home_node, logged)
                if isinstance(error, NotFound) and not entry.process.alive():
                    # The home node was rebooted, so its keeper cannot receive the exit status any more.
                    with contextlib.suppress(SnapshotError):
                        await link.kill()
                    return
            with contextlib.suppress(SnapshotError):
                await link.relay(False)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    async def _until_key_changes(self, entry: RankEntry, link: KeeperLink) -> None:
        """Relays over one connection until it breaks, or has to be made anew with another key."""
        link.key_changed.clear()
        relaying, changed = asyncio.create_task(self._once(entry, link)), asyncio.create_task(link.key_changed.wait())
        try:
            await asyncio.wait((relaying, changed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (relaying, changed):
                task.cancel()
            await asyncio.wait((relaying, changed))
        if not relaying.cancelled():
            relaying.result()

    async def _once(self, entry: RankEntry, link: KeeperLink) -> None:
        """Relays over one connection to the home node until it breaks.

        Afterwards nothing waits for a frame of `link`: that would take the first frame from the next connection.
        """

        async def frames() -> AsyncGenerator[pb.RelayFrame, None]:
            yield pb.RelayFrame()  # opens the stream; the home node answers it once its keeper is connected
            async with aclosing(link.relay_frames()) as found:
                async for frame in found:
                    yield pb.RelayFrame(frame=frame)

        presented = relay_keys.presented(entry)
        async with (
            self.node.client(entry.home_node, entry.home_endpoint) as client,
            aclosing(client.home.Relay(frames(), metadata=presented)) as replies,
        ):
            async for reply in replies:
                if reply.frame:
                    await link.send_relay(reply.frame)
                else:
                    if reply.key_recorded:
                        self._accepted(entry, presented)
                    await link.relay(True)

    def _accepted(self, entry: RankEntry, presented: dict[str, str]) -> None:
        """The home node has recorded the key of this node, so that it expects no former one."""
        current = presented.get("relay-next") == entry.own_key
        if current and entry.former_keys and self.node.ranks.get(entry.uid, entry.role) is entry:
            entry.former_keys = []
            self.node.ranks.put(entry)

    async def report_end(self, entry: RankEntry, status: int) -> None:
        """Reports the exit status of a rank to its home keeper in place of a guest keeper that has died. Retries for ever."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                await self._report_once(entry, status)
                return
            except (RankGone, NotFound):
                return
            except Denied as error:  # another node has had the rank since: this one does not speak for it any more
                log.warning("the end of rank %s is not reported: %s", entry.uid, error.message)
                return
            except SnapshotError:
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    async def _report_once(self, entry: RankEntry, status: int) -> None:
        async def frames() -> AsyncGenerator[pb.RelayFrame, None]:
            yield pb.RelayFrame()
            yield pb.RelayFrame(frame=encode("exit", {"status": status}))
            await asyncio.Event().wait()  # keeps the stream open until the answer arrives

        async with (
            self.node.client(entry.home_node, entry.home_endpoint) as client,
            aclosing(client.home.Relay(frames(), metadata=relay_keys.presented(entry), timeout_s=10)) as replies,
        ):
            async for reply in replies:
                if reply.frame and decode(reply.frame).type == "exitack":
                    return

    async def tell_home(self, entry: RankEntry, text: str) -> None:
        """Has a message printed where the user of a rank's launcher sees it. Retries until the home node has answered: it may
        be cut off, too. A rank that came back meanwhile has another key, and the message is not wanted any more."""
        request, wait_s = pb.SayRequest(presented=relay_keys.presented(entry), text=text), _FIRST_WAIT_S
        while True:
            try:
                async with self.node.client(entry.home_node, entry.home_endpoint) as client:
                    await client.home.Say(request, timeout_s=10)
                return
            except (RankGone, NotFound, Denied) as error:
                log.info("the launcher of rank %s is not told why it was ended: %s", entry.uid, error.message)
                return
            except SnapshotError:
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    # ------------------------------------------------------------------ on the home node

    async def said(self, request: pb.SayRequest, caller: str) -> pb.SayReply:
        """Prints what the node that had a rank says about it."""
        entry, _ = self._home_entry(dict(request.presented), caller)
        log.warning("rank %s: %s", entry.uid, request.text[:1000])
        assert entry.link is not None
        await entry.link.say(request.text)
        return pb.SayReply()

    async def serve(
        self, frames: AsyncIterator[pb.RelayFrame], metadata: dict[str, str], caller: str
    ) -> AsyncGenerator[pb.RelayFrame, None]:
        """Serves one relay on the home node. A newer one of the same rank replaces it."""
        entry, key = self._home_entry(metadata, caller)
        link = entry.link
        assert link is not None
        ended_by = "" if relay_keys.comes_back(entry, metadata) else entry.ended_by
        before = entry.away_node, entry.holder_key, entry.coordinator_node, entry.ended_by
        after = caller, key, metadata.get("coordinator", ""), ended_by
        if after != (before[0], entry.holder_key or entry.relay_key, *before[2:]):
            entry.away_node, entry.holder_key, entry.coordinator_node, entry.ended_by = after
            try:
                self.node.ranks.put(entry)  # before the answer: the caller then forgets the former keys
            except OSError:
                entry.away_node, entry.holder_key, entry.coordinator_node, entry.ended_by = before
                raise
        if (old := self._in.get(entry.uid)) is not None:
            old.cancel()
            await asyncio.gather(old, return_exceptions=True)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(64)

        async def towards_keeper() -> None:
            async for message in frames:
                if message.frame:
                    await link.send_relay(message.frame)

        async def from_keeper() -> None:
            async with aclosing(link.relay_frames()) as found:
                async for frame in found:
                    await queue.put(frame)

        async def both() -> None:
            tasks = [asyncio.create_task(towards_keeper()), asyncio.create_task(from_keeper())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if queue.full():  # it has no reader any more; the keepers send again what is lost
                    queue.get_nowait()
                queue.put_nowait(None)

        pump = self._in[entry.uid] = asyncio.create_task(both(), name=f"relay from {caller} for {entry.uid}")
        try:
            yield pb.RelayFrame(key_recorded=True)
            while (frame := await queue.get()) is not None:
                yield pb.RelayFrame(frame=frame)
        finally:
            pump.cancel()
            if self._in.get(entry.uid) is pump:
                del self._in[entry.uid]

    def _home_entry(self, metadata: dict[str, str], caller: str) -> tuple[RankEntry, str]:
        """The rank, and the key that is valid from now on."""
        uid = check_rank_uid(metadata.get("rank-uid", ""))
        if self.node.ranks.is_buried(uid):
            raise RankGone(f"the home keeper of rank {uid} has died", where=Where.TARGET_RUNNING)
        entry = self.node.ranks.get(uid, "home")
        if entry is None:
            raise NotFound(f"this node has no home keeper of rank {uid}", where=Where.TARGET_RUNNING)
        key = relay_keys.check(entry, metadata)
        if key is None:
            raise Denied(
                f"{caller} presented no key that is valid for rank {uid}: another node has the rank, or has had it since",
                remedy="check with `migrator ps` which node has the rank",
                where=Where.TARGET_RUNNING,
            )
        if not entry.away_node:
            raise Unreachable(f"rank {uid} has not been released on its home node yet", where=Where.TARGET_RUNNING)
        if entry.link is None:
            raise Unreachable(f"the home keeper of rank {uid} has not reconnected yet", where=Where.TARGET_RUNNING)
        return entry, key
