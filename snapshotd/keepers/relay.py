"""Stdio, signals and exit status between a rank's guest keeper and its home keeper, over both nodes' daemons.

The daemons pass frames on unread; what was lost when a connection broke, the keepers send again by their byte offsets. If
the home keeper is dead, the rank is killed here: no orphan runs beside a restarted job. If the home node cannot be
reached, or was rebooted, the rank goes on and its keeper spools.
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
from snapshotd.keepers.listener import KeeperLink
from snapshotd.keepers.ranks import RankEntry, check_rank_uid
from snapshotd.moves.node import Node

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


class Relays:
    """All relays of this daemon: towards home for guests here, and from elsewhere for home keepers here."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._out: dict[str, asyncio.Task[None]] = {}
        self._in: dict[str, asyncio.Task[None]] = {}

    # ------------------------------------------------------------------ the guest's side

    def start(self, entry: RankEntry, link: KeeperLink) -> None:
        """Relays for a guest that may run, for as long as its link is open."""
        if (old := self._out.get(entry.uid)) is not None:
            old.cancel()
        self._out[entry.uid] = asyncio.create_task(self._keep_up(entry, link), name=f"relay {entry.uid}")

    async def stop(self) -> None:
        tasks = [*self._out.values(), *self._in.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_up(self, entry: RankEntry, link: KeeperLink) -> None:
        wait_s, said = _FIRST_WAIT_S, ""
        while not link.closed.is_set():
            try:
                await self._once(entry, link)
                wait_s = _FIRST_WAIT_S
            except RankGone as error:
                log.warning("killing rank %s: %s", entry.uid, error.message)
                with contextlib.suppress(SnapshotError):
                    await link.kill()
                return
            except SnapshotError as error:
                if error.message != said:
                    said = error.message
                    log.info("no way to %s for rank %s: %s", entry.home_node, entry.uid, said)
                if isinstance(error, NotFound) and not entry.process.alive():
                    with contextlib.suppress(
                        SnapshotError
                    ):  # the home node was rebooted: nobody is left to hear the end
                        await link.kill()
                    return
            with contextlib.suppress(SnapshotError):
                await link.relay(False)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    async def _once(self, entry: RankEntry, link: KeeperLink) -> None:
        """One connection to the home node, until it breaks. Then nobody waits for a frame of `link` any more: that one would
        take the first from the next connection."""

        async def frames() -> AsyncGenerator[pb.RelayFrame, None]:
            yield pb.RelayFrame()  # opens the stream; the home side answers it once the keeper there listens
            async with aclosing(link.relay_frames()) as found:
                async for frame in found:
                    yield pb.RelayFrame(frame=frame)

        async with (
            self.node.client(entry.home_node, entry.home_endpoint) as client,
            aclosing(client.home.Relay(frames(), metadata=_metadata(entry))) as replies,
        ):
            async for reply in replies:
                if reply.frame:
                    await link.send_relay(reply.frame)
                else:
                    await link.relay(True)

    async def report_end(self, entry: RankEntry, status: int) -> None:
        """Tells the home keeper how the rank ended, on behalf of a guest keeper that cannot any more."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                await self._report_once(entry, status)
                return
            except (RankGone, NotFound):
                return
            except SnapshotError:
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    async def _report_once(self, entry: RankEntry, status: int) -> None:
        async def frames() -> AsyncGenerator[pb.RelayFrame, None]:
            yield pb.RelayFrame()
            yield pb.RelayFrame(frame=encode("exit", {"status": status}))
            await asyncio.Event().wait()  # the stream stays open until the answer has come

        async with (
            self.node.client(entry.home_node, entry.home_endpoint) as client,
            aclosing(client.home.Relay(frames(), metadata=_metadata(entry), timeout_s=10)) as replies,
        ):
            async for reply in replies:
                if reply.frame and decode(reply.frame).type == "exitack":
                    return

    # ------------------------------------------------------------------ the home's side

    async def serve(
        self, frames: AsyncIterator[pb.RelayFrame], metadata: dict[str, str], caller: str
    ) -> AsyncGenerator[pb.RelayFrame, None]:
        """The home end of one relay. A newer one of the same rank takes its place."""
        entry = self._home_entry(metadata, caller)
        link = entry.link
        assert link is not None
        if entry.away_node != caller:
            entry.away_node = caller
            self.node.ranks.put(entry)
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
                if queue.full():  # nobody reads it any more; what is lost the keepers send again
                    queue.get_nowait()
                queue.put_nowait(None)

        pump = self._in[entry.uid] = asyncio.create_task(both(), name=f"relay from {caller} for {entry.uid}")
        try:
            yield pb.RelayFrame()
            while (frame := await queue.get()) is not None:
                yield pb.RelayFrame(frame=frame)
        finally:
            pump.cancel()
            if self._in.get(entry.uid) is pump:
                del self._in[entry.uid]

    def _home_entry(self, metadata: dict[str, str], caller: str) -> RankEntry:
        uid = check_rank_uid(metadata.get("rank-uid", ""))
        if self.node.ranks.is_buried(uid):
            raise RankGone(f"the home keeper of rank {uid} is dead", where=Where.TARGET_RUNNING)
        entry = self.node.ranks.get(uid, "home")
        if entry is None:
            raise NotFound(f"no keeper of rank {uid} is at home here", where=Where.TARGET_RUNNING)
        if metadata.get("relay-key") != entry.relay_key:
            raise Denied(f"{caller} does not have the key of rank {uid}", where=Where.TARGET_RUNNING)
        if not entry.away_node:
            raise Unreachable(f"rank {uid} has not been released here yet", where=Where.TARGET_RUNNING)
        if entry.link is None:
            raise Unreachable(f"the keeper of rank {uid} has not reconnected yet", where=Where.TARGET_RUNNING)
        return entry


def _metadata(entry: RankEntry) -> list[tuple[str, str]]:
    return [("rank-uid", entry.uid), ("relay-key", entry.relay_key)]
