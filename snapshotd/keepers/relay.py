"""Relays stdio, signals and exit status between a rank's guest keeper and its home keeper, through both nodes' daemons.

The daemons do not interpret the frames. What is lost when a connection breaks, the keepers send again by byte offset. If
the home keeper has died, the rank is killed, so that no orphan runs beside a restarted job. If the home node is
unreachable or was rebooted, the rank keeps running and its keeper spools.
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
        self._out[entry.uid] = asyncio.create_task(self._keep_up(entry, link), name=f"relay {entry.uid}")

    async def stop(self) -> None:
        tasks = [*self._out.values(), *self._in.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_up(self, entry: RankEntry, link: KeeperLink) -> None:
        wait_s, logged = _FIRST_WAIT_S, ""
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

    async def _once(self, entry: RankEntry, link: KeeperLink) -> None:
        """Relays over one connection to the home node until it breaks.

        Afterwards nothing waits for a frame of `link`: that would take the first frame from the next connection.
        """

        async def frames() -> AsyncGenerator[pb.RelayFrame, None]:
            yield pb.RelayFrame()  # opens the stream; the home node answers it once its keeper is connected
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
        """Reports the exit status of a rank to its home keeper in place of a guest keeper that has died. Retries for ever."""
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
            await asyncio.Event().wait()  # keeps the stream open until the answer arrives

        async with (
            self.node.client(entry.home_node, entry.home_endpoint) as client,
            aclosing(client.home.Relay(frames(), metadata=_metadata(entry), timeout_s=10)) as replies,
        ):
            async for reply in replies:
                if reply.frame and decode(reply.frame).type == "exitack":
                    return

    # ------------------------------------------------------------------ on the home node

    async def serve(
        self, frames: AsyncIterator[pb.RelayFrame], metadata: dict[str, str], caller: str
    ) -> AsyncGenerator[pb.RelayFrame, None]:
        """Serves one relay on the home node. A newer one of the same rank replaces it."""
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
                if queue.full():  # it has no reader any more; the keepers send again what is lost
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
            raise RankGone(f"the home keeper of rank {uid} has died", where=Where.TARGET_RUNNING)
        entry = self.node.ranks.get(uid, "home")
        if entry is None:
            raise NotFound(f"this node has no home keeper of rank {uid}", where=Where.TARGET_RUNNING)
        if metadata.get("relay-key") != entry.relay_key:
            raise Denied(f"{caller} presented a wrong relay key for rank {uid}", where=Where.TARGET_RUNNING)
        if not entry.away_node:
            raise Unreachable(f"rank {uid} has not been released on its home node yet", where=Where.TARGET_RUNNING)
        if entry.link is None:
            raise Unreachable(f"the home keeper of rank {uid} has not reconnected yet", where=Where.TARGET_RUNNING)
        return entry


def _metadata(entry: RankEntry) -> list[tuple[str, str]]:
    return [("rank-uid", entry.uid), ("relay-key", entry.relay_key)]
