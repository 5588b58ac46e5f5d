"""The link between the daemon and its network process: calls in both directions over one pair of sockets.

Invariant: what is buffered is bounded, for each call, for each caller and in all (accounts.py): the sender waits for credit,
and a peer that does not wait breaks the link. A call with one request or one reply by its definition has no second one.
When the link ends, every call on it ends: for the caller with UNAVAILABLE, for the callee by cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from snapshotd.api.calls import MAX_MESSAGE_BYTES, OK, CallEnded, CallFailed
from snapshotd.api.methods import methods
from snapshotd.network.accounts import CALLS_PER_CALLER, MAX_CALLS, MESSAGE_COST, WINDOW_COST, Account, Accounts, Window
from snapshotd.network.frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    Cancel,
    Close,
    Credit,
    Data,
    Dial,
    Done,
    End,
    Files,
    Frame,
    Listening,
    NotListening,
    Ping,
    Pong,
    Request,
    Settings,
    Stop,
    Violation,
    decode,
    encode,
)

log = logging.getLogger(__name__)

_FULL_BYTES = 1 << 16
MAX_BACKLOG_BYTES = 2 * MAX_FRAME_BYTES
#: A peer with open calls that has sent nothing for so long is asked, and if it does not answer for so long taken for dead.
ASK_AFTER_S, DEAD_AFTER_S, LOOK_S = 3.0, 7.0, 1.0

Opening = Request | Dial
Control = Settings | Files | Close | Stop | Listening | NotListening


class Call:
    """One end of a call. For the side that opened it, a `calls.StreamCall`."""

    def __init__(self, link: Link, opening: Opening, account: Account, *, ours: bool) -> None:
        self.opening, self.number, self.ours = opening, opening.call, ours
        self.task: asyncio.Task[None] | None = None  # of the side that was called
        self.ended: CallFailed | None = None
        self._link = link
        self._unread: deque[bytes] = deque()
        self.sending, self.unread = Window(WINDOW_COST, account.sending), Window(WINDOW_COST, account.unread)
        self._allowed = _messages(opening.method, requests=ours)  # how many more may be sent
        self._awaited = _messages(opening.method, requests=not ours)  # how many more the peer may send
        self._complete = False  # the peer sends no more messages
        self._readable, self._writable = asyncio.Event(), asyncio.Event()
        self._limit: asyncio.TimerHandle | None = None

    def limit(self, timeout_s: float) -> None:
        """Ends a call of ours after this time, in case that the peer does not."""
        failed = CallFailed("DEADLINE_EXCEEDED", "no answer in time")
        self._limit = asyncio.get_running_loop().call_later(timeout_s, self.give_up, failed)

    async def write(self, message: bytes | memoryview) -> None:
        """Raises CallEnded; CallFailed for a message that is too large, or a second one where there can be only one."""
        if self._allowed == 0:
            raise CallFailed("INVALID_ARGUMENT", f"a second message of {self.opening.method}")
        self._allowed -= 1
        if len(message) > MAX_MESSAGE_BYTES:
            size = f"Sent message larger than max ({len(message)} vs. {MAX_MESSAGE_BYTES})"
            raise CallFailed("RESOURCE_EXHAUSTED", size)
        cost = len(message) + MESSAGE_COST
        while self.ended is None and (not self.sending.admits(cost) or self._link.full()):
            self._writable.clear()
            await self._writable.wait()
        if self.ended is not None:
            raise CallEnded
        self.sending.take(cost)
        self._link.send_soon(Data(self.number, message))  # type: ignore[arg-type]  # msgpack takes memoryviews too

    async def done_writing(self) -> None:
        if self.ended is not None:
            raise CallEnded
        self._link.send_soon(Done(self.number))

    async def read(self) -> bytes | None:
        """Messages that arrived before the end come first. Raises CallFailed."""
        while not self._unread:
            if self.ended is not None and self.ended.status != OK:
                raise CallFailed(self.ended.status, self.ended.details, self.ended.error)
            if self.ended is not None or self._complete:
                return None
            self._readable.clear()
            await self._readable.wait()
        message = self._unread.popleft()
        if self.ended is None:
            cost = len(message) + MESSAGE_COST
            self.unread.give(cost)
            self._link.send_soon(Credit(self.number, cost))
        return message

    def cancel(self) -> None:
        self.give_up(CallFailed("CANCELLED", "the call was cancelled"))

    def give_up(self, reason: CallFailed) -> None:
        """Ends a call of ours: the peer gets a cancellation, and whatever uses the call gets `reason`."""
        if self.ended is None:
            self._link.send_soon(Cancel(self.number))
            self._unread.clear()
            self.end(reason)

    def finish(self, result: CallFailed) -> None:
        """Ends a call that the peer opened."""
        if self.ended is None:
            self._link.send_soon(End(self.number, result.status, result.details, result.error))
            self.end(result)

    # ------------------------------------------------------------------ for the link

    def end(self, reason: CallFailed) -> None:
        self.ended = reason
        if self._limit is not None:
            self._limit.cancel()
        self._readable.set()
        self._writable.set()
        self.unread.clear()  # the peer, too, counts them no longer
        self._freed(self.sending.used_cost)
        self._link.ended(self)

    def room(self) -> None:
        """The link can take more."""
        self._writable.set()

    def arrived(self, frame: Data | Done | End | Cancel | Credit) -> None:
        match frame:
            case Data(body=body) if not self._complete:
                if self._awaited == 0:
                    raise Violation(f"a second message of {self.opening.method}")
                if not self.unread.admits(len(body) + MESSAGE_COST):
                    raise Violation("more messages than it has credit for")
                self._awaited -= 1
                self.unread.take(len(body) + MESSAGE_COST)
                self._unread.append(body)
                self._readable.set()
            case Done() if not self.ours and not self._complete:
                self._complete = True
                self._readable.set()
            case End() if self.ours:
                self.end(CallFailed(frame.status, frame.details, frame.error))
            case Cancel() if not self.ours:
                self.abandon()
            case Credit(cost=cost) if cost <= self.sending.used_cost:
                self._freed(cost)
                self._writable.set()
            case _:
                raise Violation(f"{type(frame).__name__} does not fit the state of the call")

    def _freed(self, cost: int) -> None:
        """The peer has used messages, or wants no more. Other calls may have waited for that too."""
        crowded = self.sending.outer is not None and self.sending.outer.full()
        self.sending.give(cost)
        if crowded:
            self._link.room()

    def abandon(self) -> None:
        """The caller has gone: stops what serves the call."""
        self._unread.clear()
        self.end(CallFailed("CANCELLED", "the caller has gone"))
        if self.task is not None:
            self.task.cancel()


def _messages(method: str, *, requests: bool) -> int:
    """How many requests or replies a call has. Negative: any number."""
    known = methods().get(method)
    return -1 if known is None or (known.request_streaming if requests else known.reply_streaming) else 1


def _no_room(calls: int, all_calls: int, times: int = 1) -> CallFailed | None:
    """Why another call of a caller is refused: it has `calls` already, and there are `all_calls`."""
    if calls >= times * CALLS_PER_CALLER:
        return CallFailed("RESOURCE_EXHAUSTED", f"this caller has {calls} calls open, which is the limit")
    if all_calls >= times * MAX_CALLS:
        return CallFailed("RESOURCE_EXHAUSTED", f"{all_calls} calls are open, which is the limit")
    return None


class Link:
    """One end of the link. `serve` runs for every call that the peer opens, `control` for every other frame."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Frame],
        serve: Callable[[Call], Awaitable[None]],
        control: Callable[[Control], None],
        *,
        first: int,
    ) -> None:
        """`first` is 1 on one side and 2 on the other: calls that it opens have every second number from there."""
        self.calls: dict[int, Call] = {}
        self.accounts = Accounts()
        self.closed = False
        self.silent: Callable[[], None] = self.fail_calls  # called when the peer hangs
        self._draining: asyncio.Task[None] | None = None
        self._decoder, self._serve, self._control = decoder, serve, control
        self._next = first
        self._their_last = 1 - first  # the last number that the peer used
        self._open = {True: 0, False: 0}  # calls that are ours or not
        self._served = 0  # servicers that have not ended, also of calls that were cancelled
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard_s = time.monotonic()
        self._asked_s: float | None = None  # when the peer was asked, if it has not sent anything since

    async def attach(self, end: socket.socket) -> None:
        """Takes over one end of the pair. Frames can be sent from now on."""
        end.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=end, limit=1 << 20)
        self._writer.transport.set_write_buffer_limits(high=_FULL_BYTES)

    async def run(self) -> str:
        """Serves until the link ends, and returns why. Every call has ended then."""
        assert self._reader is not None
        assert self._writer is not None
        reader = self._reader
        watching = asyncio.create_task(self._watch(), name="link")
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if size > MAX_FRAME_BYTES:
                    raise Violation(f"a frame of {size} bytes")
                frame = decode(self._decoder, await reader.readexactly(size))
                self._heard_s, self._asked_s = time.monotonic(), None
                self._arrived(frame)
        except (asyncio.IncompleteReadError, OSError):
            return "it closed the link"
        except Violation as error:
            return f"it violated the protocol: {error}"
        finally:
            self.closed = True
            watching.cancel()
            self._writer.close()
            self.fail_calls()

    def open(self, make: Callable[[int], Opening]) -> Call:
        """A new call of ours. It has failed already if the link is down or has no room for another call."""
        opening = make(self._next)
        account = self.accounts.of(opening)
        call = Call(self, opening, account, ours=True)
        if self.closed or self._writer is None:
            call.end(CallFailed("UNAVAILABLE", "the network process is not running"))
        elif refusal := _no_room(account.calls, self._open[True]):
            call.end(refusal)
        else:
            self._next += 2
            self._add(call)
            self.accounts.opened(opening, account)
            self.send_soon(call.opening)
        return call

    def _add(self, call: Call) -> None:
        self.calls[call.number] = call
        self._open[call.ours] += 1

    def ended(self, call: Call) -> None:
        """A call has ended here. Idempotent."""
        if self.calls.pop(call.number, None) is not None:
            self._open[call.ours] -= 1
            if call.ours:
                self.accounts.closed(call.opening)

    def send_soon(self, frame: Frame) -> None:
        """Does not wait until the peer has received it. Breaks the link of a peer that does not receive at all."""
        if self._writer is None or self.closed:
            return
        if self._writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            log.error("the other process of this daemon does not read: closing the link")
            self._writer.transport.abort()
            return
        self._writer.write(encode(frame))
        if self.full() and self._draining is None:
            self._draining = asyncio.create_task(self._drain(self._writer))

    def full(self) -> bool:
        """Whether frames wait in this process because the peer has not read others yet: messages must wait then."""
        return self._writer is not None and self._writer.transport.get_write_buffer_size() > _FULL_BYTES

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # `run` ends every call
            await writer.drain()
        self._draining = None
        self.room()

    def room(self) -> None:
        """Calls that wait with a message look again whether it can be sent."""
        for call in list(self.calls.values()):
            call.room()

    def close(self) -> None:
        """Ends `run`."""
        if self._writer is not None:
            self._writer.close()

    def fail_calls(self) -> None:
        """Ends all calls: the other process is gone, or does not respond."""
        for call in list(self.calls.values()):
            if call.ours:
                call.give_up(CallFailed("UNAVAILABLE", "snapshotd does not respond"))
            else:
                call.abandon()

    def _arrived(self, frame: Frame) -> None:
        match frame:
            case Ping():
                self.send_soon(Pong())
            case Pong():
                pass
            case Request() | Dial():
                self._opened(frame)
            case Data() | Done() | End() | Cancel() | Credit():
                call = self.calls.get(frame.call)
                if call is not None:
                    call.arrived(frame)
                elif frame.call > self._their_last and (frame.call % 2 != self._next % 2 or frame.call >= self._next):
                    raise Violation(f"call {frame.call} was never opened")  # one that has ended may still get frames
            case Settings() | Files() | Close() | Stop() | Listening() | NotListening():
                self._control(frame)

    def _opened(self, opening: Opening) -> None:
        if opening.call <= self._their_last or opening.call % 2 != self._their_last % 2:
            raise Violation(f"call {opening.call} is not a new one")
        if self._open[False] >= MAX_CALLS:
            raise Violation(f"more than {MAX_CALLS} calls")
        self._their_last = opening.call
        # Servicers of cancelled calls count too: one that waits for a thread ends later. Twice the limit, because others
        # end at the next turn of the event loop.
        account = self.accounts.of(opening)
        if refusal := _no_room(account.calls, self._served, 2):
            self.send_soon(End(opening.call, refusal.status, refusal.details))
            return
        self.accounts.opened(opening, account)
        call = Call(self, opening, account, ours=False)
        self._add(call)
        self._served += 1
        call.task = asyncio.create_task(self._run_call(call), name=opening.method)
        call.task.add_done_callback(lambda _: self._stopped_serving(opening))

    def _stopped_serving(self, opening: Opening) -> None:
        self._served -= 1
        self.accounts.closed(opening)

    async def _run_call(self, call: Call) -> None:
        try:
            await self._serve(call)
        except CallFailed as failed:
            call.finish(failed)
        except CallEnded:
            pass
        except asyncio.CancelledError:
            call.finish(CallFailed("CANCELLED", "the servicer was cancelled"))
            raise
        except Exception:
            log.exception("%s failed unexpectedly", call.opening.method)
            call.finish(CallFailed("INTERNAL", "it failed unexpectedly"))
        else:
            call.finish(CallFailed(OK))

    async def _watch(self) -> None:
        """A peer that hangs is noticed, as gRPC's keepalive notices a node that hangs. Without calls nothing waits for it."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if not self.calls:
                self._heard_s, self._asked_s = now, None
            elif self._asked_s is None and now > self._heard_s + ASK_AFTER_S:
                self._asked_s = now
                self.send_soon(Ping())
            elif self._asked_s is not None and now > self._asked_s + DEAD_AFTER_S:
                self._heard_s, self._asked_s = now, None
                self.silent()
