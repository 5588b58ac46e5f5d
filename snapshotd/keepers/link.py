"""One connected keeper: the daemon's control requests, and relay frames in both directions.

Invariants: every request returns one answer, or raises Timeout if the keeper does not respond and RankGone if it has
disconnected. Relay frames wait in a bounded queue; further frames are dropped, and the keepers send them again by offset.
Frames from another node are passed on only if they are relay frames: a remote daemon cannot send control requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from shim.keeper.frames import RELAY_TYPES, Frame, FrameError, decode, encode
from snapshotd.api.errors import Damaged, RankGone, Timeout, Where, WrongState
from snapshotd.keepers import stdio_state
from snapshotd.keepers.hello import Hello
from snapshotd.keepers.stdio_state import MAX_STATE_BYTES, StdioState
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
MAX_RELAY_QUEUE_BYTES = 8 << 20


class KeeperLink:
    """One connected keeper. Its calls raise Timeout if it does not respond and RankGone if it has disconnected."""

    def __init__(
        self, hello: Hello, uid: str, keeper: Process, rank: Process | None, writer: asyncio.StreamWriter
    ) -> None:
        self.role = hello.role
        self.uid = uid
        self.user_id = hello.user_id  # whose rank it is
        self.info = hello
        self.keeper = keeper
        self.rank = rank
        self.closed = asyncio.Event()
        self.key_changed = asyncio.Event()  # guest: the relay has to present its new key
        self._writer = writer
        self._answers: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}
        self._stdio = bytearray()
        self._relay: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._relay_bytes = 0
        self._overflowed = False

    def __repr__(self) -> str:
        return f"<{self.role} keeper {self.keeper.pid} of {self.uid or 'a new rank'}>"

    # ---- control requests

    async def hold(self, move: str) -> None:
        """Makes the keeper hold back signals and stdin."""
        await self._ask("hold", {"move": move}, "held", move)

    async def drain(self, move: str) -> StdioState:
        """Returns the complete stdio state, for the next keeper, checked in form. The rank must be frozen."""
        self._stdio.clear()
        answer = await self._ask("drain", {"move": move}, "stdio", move)
        if "error" in answer:
            raise WrongState(
                f"the keeper could not hand over the rank's stdio: {str(answer['error'])[:300]}",
                remedy="wait until the buffered output has reached the rank's home node, then retry",
                where=Where.SOURCE_FROZEN,
            )
        content, self._stdio = bytes(self._stdio), bytearray()
        try:
            return await in_thread(stdio_state.decode, content)
        except ValueError as error:
            raise Damaged(
                f"the keeper's stdio state is invalid: {error}",
                remedy="the move is undone; start the rank with the `migrator run` of this version",
                where=Where.SOURCE_FROZEN,
            ) from error

    async def resume(self, move: str) -> None:
        """Reverts hold and drain: returns unread stdin and delivers queued signals."""
        await self._ask("resume", {"move": move}, "resumed", move)

    async def away(self, move: str, node: str) -> None:
        """After COMMIT: the rank is on `node` now, so the end of the local copy is not the end of the rank."""
        await self._ask("away", {"move": move, "node": node}, "gone", move)

    async def restored(self, pid: int) -> None:
        """Guest: criu has finished; `pid` is the rank's in the keeper's pid namespace."""
        await self._ask("restored", {"pid": pid}, "ready", "")

    async def activated(self, move: str) -> None:
        """Guest: the rank may run. Starts stdin, signals and relaying."""
        await self._ask("activated", {"move": move}, "active", move)

    async def relay(self, up: bool) -> None:
        """Guest: the connection to the home keeper is up (it synchronises at once) or down (it spools)."""
        await self.send(encode("relay", {"up": up}))

    async def protect(self) -> None:
        """The rank's job has a snapshot: its keeper holds a failure of the rank back for a while."""
        await self.send(encode("protect"))

    async def say(self, text: str) -> None:
        """Home: prints a message where the launcher's user sees it. A keeper of an older version does not."""
        await self.send(encode("say", {"text": text[:1000]}))

    async def kill(self) -> None:
        """Makes the keeper kill the rank and exit. Returns once the link is closed. Idempotent."""
        if self.closed.is_set():
            return
        with contextlib.suppress(RankGone):
            await self.send(encode("kill"))
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self.closed.wait()
        except TimeoutError:
            raise Timeout(f"{self!r} did not exit within {CONTROL_TIMEOUT_S:.0f} s", where=Where.UNKNOWN) from None

    async def _ask(self, request: str, fields: dict[str, Any], answer: str, key: str) -> dict[str, Any]:
        slot = (answer, key)
        if slot in self._answers:
            raise WrongState(f"{self!r} has not answered an earlier {request!r} yet", where=Where.UNKNOWN)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[slot] = future
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self.send(encode(request, fields))
                return await future
        except TimeoutError:
            raise Timeout(
                f"{self!r} did not answer {request!r} within {CONTROL_TIMEOUT_S:.0f} s", where=Where.UNKNOWN
            ) from None
        finally:
            del self._answers[slot]

    # ---- relay frames between this keeper and the one on the other node

    async def send_relay(self, frame: bytes) -> None:
        """Passes a frame from the other node on to this keeper. Raises Damaged if it is not a relay frame."""
        try:
            kind = decode(frame).type
        except FrameError as error:
            raise Damaged(f"a relay frame from another node is malformed: {error}", where=Where.UNKNOWN) from error
        if kind not in RELAY_TYPES:
            raise Damaged(f"another node sent {kind[:20]!r}, which is not a relay frame", where=Where.UNKNOWN)
        await self.send(frame)

    async def relay_frames(self) -> AsyncGenerator[bytes, None]:
        """The relay frames from this keeper to the other node, until the link closes. One reader at a time."""
        while (frame := await self._relay.get()) is not None:
            self._relay_bytes -= len(frame)
            self._overflowed = False
            yield frame
        self._relay.put_nowait(None)

    # ---- for KeeperLinks

    async def send(self, frame: bytes) -> None:
        if self.closed.is_set():
            raise RankGone(f"{self!r} is not connected", where=Where.UNKNOWN)
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError as error:
            raise RankGone(f"{self!r} has disconnected: {error}", where=Where.UNKNOWN) from error

    def take_relay(self, frame: Frame) -> None:
        encoded = frame.encoded()
        if self._relay_bytes + len(encoded) > MAX_RELAY_QUEUE_BYTES:
            if not self._overflowed:
                log.warning(
                    "%r sends faster than the other node receives; frames are dropped and will be sent again", self
                )
            self._overflowed = True
            return
        self._relay_bytes += len(encoded)
        self._relay.put_nowait(encoded)

    def take_answer(self, frame: Frame) -> None:
        """Delivers an answer. One without a waiting request is ignored: the request has timed out."""
        move = frame.header.get("move", "")
        future = self._answers.get((frame.type, move if isinstance(move, str) else ""))
        if frame.type == "stdio" and future is not None:
            most_bytes = MAX_STATE_BYTES[self.role]
            if len(self._stdio) + len(frame.payload) > most_bytes:
                raise FrameError(f"the stdio state exceeds {most_bytes >> 20} MiB")
            self._stdio += frame.payload
            if frame.header.get("more") is True:
                return
        if future is not None and not future.done():
            future.set_result(frame.header)

    def close(self) -> None:
        self.closed.set()
        self._relay.put_nowait(None)
        self._writer.close()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(RankGone(f"{self!r} has disconnected", where=Where.UNKNOWN))
