"""Runs the servicers for the calls that the network process passes on. In the daemon.

Invariant: a servicer runs only for a role that the access table lists for its method, and only once the daemon is ready.
Every call ends with an answer or with one error of the taxonomy. Tracebacks are only logged.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message

from snapshotd.api import access
from snapshotd.api.access import Caller
from snapshotd.api.calls import CallEnded, CallFailed
from snapshotd.api.errors import Damaged, Denied, Internal, SnapshotError
from snapshotd.api.methods import Method, methods
from snapshotd.network.frames import METRICS, Request
from snapshotd.network.link import Call
from snapshotd.runtime import spans
from snapshotd.runtime.blocking import QUERIES
from snapshotd.runtime.logs import Throttle

log = logging.getLogger(__name__)

#: What any node or operator may ask at any time. One caller has few turns at a time, and none of the threads of moves.
_QUESTIONS = frozenset(
    f"/snapshotd.v1.{name}"
    for name in (
        "Node/GetNode",
        "Node/ListRanks",
        "Node/ListMoves",
        "Node/Diagnose",
        "Node/OpenProbe",
        "Peer/Forward",
        "Peer/ConfirmDeparture",
    )
)
#: Calls that are no part of a move's time: questions about it, and the lease that is renewed beside it.
_UNTIMED = (
    "/snapshotd.v1.Node/",
    "/snapshotd.v1.Source/Renew",
    "/snapshotd.v1.Source/GetOutcome",
    "/snapshotd.v1.Target/GetCopy",
    "/snapshotd.v1.Gate/Report",
)
_MAX_ID_CHARS = 40
#: Log records about the calls of one caller in a minute: of those that are denied, of those that fail, of defects.
_MAX_COMPLAINTS, _MAX_NOTICES, _MAX_DEFECTS = 10, 600, 30


class Context:
    """What a servicer knows about its call. Cancelled calls cancel the servicer's task."""

    def __init__(self, call: Call, request: Request) -> None:
        self.caller = Caller(request.role, request.name)
        keys = [key for key, _ in request.metadata]
        # A key that was given twice counts as missing: which one is meant?
        self.metadata = {key: value for key, value in request.metadata if keys.count(key) == 1}
        self._call = call

    async def read(self) -> bytes | None:
        """The next message of the caller as it was sent, None after the last one."""
        return await self._call.read()

    async def write(self, message: bytes) -> None:
        """Waits while the caller reads slower than this."""
        await self._call.write(message)


class Services:
    """The servicers, by method. `metrics` returns the content type and the text of the metrics."""

    def __init__(self, metrics: Callable[[], tuple[str, bytes]] = lambda: ("text/plain", b"")) -> None:
        self._servicers: dict[str, Callable[..., Any]] = {}
        self._plain: dict[str, Callable[[Context], Awaitable[None]]] = {}
        self._metrics = metrics
        self._complaints, self._notices = Throttle(log, _MAX_COMPLAINTS, "%s"), Throttle(log, _MAX_NOTICES, "%s")
        self._defects = Throttle(log, _MAX_DEFECTS, "%s")
        self.ready = False

    def add(self, service: str, servicer: object) -> None:
        """Every method of a service of the .proto that `servicer` has."""
        for method in methods().values():
            path, _, name = method.path.rpartition("/")
            if path == f"/snapshotd.v1.{service}" and hasattr(servicer, name):
                self._servicers[method.path] = getattr(servicer, name)

    def add_plain(self, path: str, serve: Callable[[Context], Awaitable[None]]) -> None:
        """A method whose messages are plain bytes."""
        self._plain[path] = serve

    async def serve(self, call: Call) -> None:
        """Runs one call. Raises CallFailed if it ends with another status than OK."""
        request = call.opening
        assert isinstance(request, Request)  # the decoder lets nothing else open a call
        if request.method == METRICS:
            kind, text = self._metrics()
            await call.write(kind.encode())
            await call.write(text)
            return
        context = Context(call, request)
        try:
            access.check(request.method, context.caller)
            if not self.ready:
                raise CallFailed("UNAVAILABLE", "snapshotd does not respond to calls yet: it is starting")
            log.debug("%s by %s", request.method, context.caller)
            if request.method in _QUESTIONS:
                async with QUERIES.turn(context.caller):
                    await self._run(request.method, context)
            else:
                await self._run(request.method, context)
        except (CallFailed, CallEnded):
            raise
        except SnapshotError as error:
            what = request.method, error.code, error.message
            if isinstance(error, Denied):
                self._complaints.warning(context.caller, "%s: %s: %s", *what)
            else:
                self._notices.info(context.caller, "%s: %s: %s", *what)
            raise access.failure(error) from error
        except Exception as error:
            level = logging.ERROR
            self._defects.record(level, context.caller, "%s failed unexpectedly", request.method, exc_info=True)
            shown = f"{request.method} failed unexpectedly: {type(error).__name__}: {error}"
            raise access.failure(Internal(shown)) from error

    async def _run(self, path: str, context: Context) -> None:
        if (plain := self._plain.get(path)) is not None:
            await plain(context)
            return
        servicer, method = self._servicers.get(path), methods().get(path)
        if servicer is None or method is None:
            raise CallFailed("UNIMPLEMENTED", f"{path} is not implemented")
        requests = _requests(method, context)
        request = requests if method.request_streaming else await anext(requests, None)
        if request is None:
            raise Damaged(f"a call of {path} contains no request")
        with spans.of_move(_move_of(path, request), path.rpartition(".")[2].replace("/", ".")):
            answer: Any = servicer(request, context)
            if not method.reply_streaming:
                await context.write(_written(await answer))
                return
            async with aclosing(answer):
                async for reply in answer:
                    await context.write(_written(reply))


async def _requests(method: Method, context: Context) -> AsyncIterator[Message]:
    while (message := await context.read()) is not None:
        yield method.decode_request(message)


def _move_of(path: str, request: Any) -> str:
    """The move to whose time this call belongs; "" if it does to none."""
    if path.startswith(_UNTIMED):
        return ""
    move = str(getattr(request, "move", "") or getattr(getattr(request, "description", None), "move", ""))
    return move if len(move) <= _MAX_ID_CHARS else ""


def _written(reply: Message) -> bytes:
    return reply.SerializeToString()
