"""Calls a daemon: one typed client object per daemon, which raises only errors of our own taxonomy.

Invariant: no gRPC error leaves this file. Every call has a time limit, every failure names the node and its endpoint, and a
call is retried only if the caller states that it is idempotent (`retry=True`).

    async with DaemonClient("10.0.0.2:7070", credentials=credentials, node="node-2") as client:
        info = await client.node.GetNode(GetNodeRequest(), timeout_s=5, retry=True)
        async for progress in client.source.Stream(MoveRequest(move=move), timeout_s=3600):
            ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

import grpc
import grpc.aio
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from snapshotd.api import snapshotd_pb2_grpc as stubs
from snapshotd.api.channel import Credentials, open_channel
from snapshotd.api.errors import (
    WIRE_KEY,
    Damaged,
    Denied,
    Full,
    Internal,
    SnapshotError,
    Timeout,
    Unreachable,
    from_wire,
)

__all__ = ["Credentials", "DaemonClient", "UnknownMethod", "open_channel", "translate"]

Request = TypeVar("Request")
Reply = TypeVar("Reply")

_SAME_VERSION = "run the same version of snapshotd and migrator everywhere"


class UnknownMethod(Internal):
    """The daemon's version does not have this call. Raised here only, never by a daemon."""


def translate(error: grpc.aio.AioRpcError, who: str, method: str) -> SnapshotError:
    """Translates a failed call into an error of our own. `who` names node and endpoint."""
    for key, value in error.trailing_metadata() or ():
        if key == WIRE_KEY:
            return from_wire(value if isinstance(value, bytes) else value.encode())
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return Unreachable(f"{who} {_why_unreachable(details)}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Timeout(f"{who} did not answer {method} in time")
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return Denied(f"{who} does not let us call {method}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return Damaged(
                f"a message of {method}, to or from {who}, is larger than any may be: {details}",
                remedy="no sound message is so large: this is a defect, or something else speaks on that port",
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Full(f"{who} has no room for {method}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnknownMethod(f"{who} does not know {method}", remedy=_SAME_VERSION)
        case grpc.StatusCode.INTERNAL if "RST_STREAM" in details:
            return Unreachable(f"{who} broke the connection during {method}: {details}")
        case code:
            return Internal(f"{who} failed in {method}: {code.name}: {details}")


def _why_unreachable(details: str) -> str:
    """The reason, as far as it is certain: gRPC reports a rejected certificate like a broken connection."""
    lowered = details.lower()
    if "certificate_verify_failed" in lowered or "hostname verification" in lowered or "peer name" in lowered:
        return f"could not be reached, or does not accept our certificate, or shows one we do not accept ({details})"
    for known in ("connection refused", "no route to host", "network is unreachable", "no such file or directory"):
        if known in lowered:
            return f"could not be reached: {known}"
    if "keepalive" in lowered or "ping timeout" in lowered:
        return "could not be reached any more: the connection went silent"
    return f"could not be reached, or does not accept our certificate ({details})"


def _whole(reply: Reply | None, who: str, method: str) -> Reply:
    """Raises Damaged for None, which gRPC returns if it cannot parse a message."""
    if reply is None:
        raise Damaged(f"{who} answered {method} with something that is not an answer to it", remedy=_SAME_VERSION)
    return reply


class _Link:
    """One channel, and the description of its daemon for error messages."""

    def __init__(self, channel: grpc.aio.Channel, endpoint: str, node: str | None) -> None:
        self.channel = channel
        self.who = f"node {node} at {endpoint}" if node else f"the daemon at {endpoint}"


class Unary(Generic[Request, Reply]):
    """One request, one reply."""

    def __init__(self, link: _Link, method: str, call: grpc.aio.UnaryUnaryMultiCallable[Request, Reply]) -> None:
        self._link, self._method, self._call = link, method, call

    async def __call__(self, request: Request, *, timeout_s: float, retry: bool = False) -> Reply:
        """With `retry` (idempotent calls only), an unreachable daemon is called again until `timeout_s` has passed."""
        if not retry:
            return await self._once(request, timeout_s)
        deadline = monotonic() + timeout_s
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(Unreachable),
            stop=stop_after_delay(timeout_s),
            wait=wait_random_exponential(multiplier=0.1, max=2),
            reraise=True,
        )
        unreachable: Unreachable | None = None
        async for attempt in attempts:
            with attempt:
                try:
                    return await self._once(request, max(0.05, deadline - monotonic()))
                except Unreachable as error:
                    unreachable = error
                    raise
                except Timeout as error:
                    # The last attempt only ran out of time; the failure of the attempts before it says more.
                    raise unreachable or error from error
        raise AssertionError("tenacity ends with a value or an error")

    async def _once(self, request: Request, timeout_s: float) -> Reply:
        try:
            return _whole(await self._call(request, timeout=timeout_s), self._link.who, self._method)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._link.who, self._method) from error


class ServerStream(Generic[Request, Reply]):
    """One request, many replies: `async for reply in client.source.Stream(request, timeout_s=…)`.

    Leaving the loop early cancels the call once the iterator is closed (`contextlib.aclosing`) or collected.
    """

    def __init__(self, link: _Link, method: str, call: grpc.aio.UnaryStreamMultiCallable[Request, Reply]) -> None:
        self._link, self._method, self._call = link, method, call

    async def __call__(self, request: Request, *, timeout_s: float | None) -> AsyncIterator[Reply]:
        call = self._call(request, timeout=timeout_s)
        try:
            async for reply in call:
                yield _whole(reply, self._link.who, self._method)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._link.who, self._method) from error
        finally:
            call.cancel()


class BothStream(Generic[Request, Reply]):
    """Many requests, many replies. The requests come from an iterator that is consumed as fast as the daemon reads.

    The iterator is not read any more once the replies have ended, normally or not. gRPC's own reader for iterators would keep
    waiting for the next request after the call broke, so it is not used. Use `aclosing`.
    """

    def __init__(self, link: _Link, method: str, call: grpc.aio.StreamStreamMultiCallable[Request, Reply]) -> None:
        self._link, self._method, self._call = link, method, call

    async def __call__(
        self,
        requests: AsyncGenerator[Request, None],
        *,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Reply, None]:
        call = self._call(timeout=timeout_s, metadata=grpc.aio.Metadata(*metadata))

        async def feed() -> None:
            try:
                async with aclosing(requests):
                    async for request in requests:
                        await call.write(request)
                await call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the call has ended; the loop over the replies raises the reason
            except BaseException:
                call.cancel()
                raise

        feeding = asyncio.create_task(feed(), name=f"requests of {self._method}")
        try:
            async for reply in call:
                yield _whole(reply, self._link.who, self._method)
        except asyncio.CancelledError:
            if (error := _failure(feeding)) is not None:  # `feed` cancelled the call; our own task was not cancelled
                raise error from None
            raise
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._link.who, self._method) from error
        finally:
            call.cancel()
            feeding.cancel()
            await asyncio.wait([feeding])
            _failure(feeding)  # otherwise asyncio warns that the exception was never retrieved


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


class NodeCalls:
    def __init__(self, link: _Link) -> None:
        stub = stubs.NodeStub(link.channel)
        self.GetNode = Unary(link, "GetNode", stub.GetNode)
        self.ListRanks = Unary(link, "ListRanks", stub.ListRanks)
        self.ListMoves = Unary(link, "ListMoves", stub.ListMoves)


class SourceCalls:
    def __init__(self, link: _Link) -> None:
        stub = stubs.SourceStub(link.channel)
        self.Inspect = Unary(link, "Inspect", stub.Inspect)
        self.Begin = Unary(link, "Begin", stub.Begin)
        self.PrepareDevice = Unary(link, "PrepareDevice", stub.PrepareDevice)
        self.Detach = Unary(link, "Detach", stub.Detach)
        self.Freeze = Unary(link, "Freeze", stub.Freeze)
        self.Stream = ServerStream(link, "Stream", stub.Stream)
        self.Attach = Unary(link, "Attach", stub.Attach)
        self.Renew = Unary(link, "Renew", stub.Renew)
        self.Commit = Unary(link, "Commit", stub.Commit)
        self.Abort = Unary(link, "Abort", stub.Abort)
        self.Release = Unary(link, "Release", stub.Release)
        self.GetOutcome = Unary(link, "GetOutcome", stub.GetOutcome)
        self.DeclareTargetDead = Unary(link, "DeclareTargetDead", stub.DeclareTargetDead)


class TargetCalls:
    """All calls except Push, the image channel over gRPC, which is in snapshotd/transport/image/grpc_channel.py."""

    def __init__(self, link: _Link) -> None:
        stub = stubs.TargetStub(link.channel)
        self.Examine = Unary(link, "Examine", stub.Examine)
        self.Prepare = Unary(link, "Prepare", stub.Prepare)
        self.OpenImageChannel = Unary(link, "OpenImageChannel", stub.OpenImageChannel)
        self.OpenDeviceChannel = Unary(link, "OpenDeviceChannel", stub.OpenDeviceChannel)
        self.Seal = Unary(link, "Seal", stub.Seal)
        self.Restore = Unary(link, "Restore", stub.Restore)
        self.Activate = Unary(link, "Activate", stub.Activate)
        self.Discard = Unary(link, "Discard", stub.Discard)
        self.GetCopy = Unary(link, "GetCopy", stub.GetCopy)
        self.DeclareSourceDead = Unary(link, "DeclareSourceDead", stub.DeclareSourceDead)


class PeerCalls:
    def __init__(self, link: _Link) -> None:
        stub = stubs.PeerStub(link.channel)
        self.InspectConnections = Unary(link, "InspectConnections", stub.InspectConnections)
        self.SuspendTimeouts = Unary(link, "SuspendTimeouts", stub.SuspendTimeouts)
        self.Repoint = Unary(link, "Repoint", stub.Repoint)
        self.Settle = Unary(link, "Settle", stub.Settle)
        self.Forward = Unary(link, "Forward", stub.Forward)
        self.ConfirmDeparture = Unary(link, "ConfirmDeparture", stub.ConfirmDeparture)


class GateCalls:
    def __init__(self, link: _Link) -> None:
        stub = stubs.GateStub(link.channel)
        self.Close = Unary(link, "Close", stub.Close)
        self.Report = Unary(link, "Report", stub.Report)
        self.SetTargets = Unary(link, "SetTargets", stub.SetTargets)
        self.Detach = Unary(link, "Detach", stub.Detach)
        self.NewId = Unary(link, "NewId", stub.NewId)
        self.Attach = Unary(link, "Attach", stub.Attach)
        self.GiveUp = Unary(link, "GiveUp", stub.GiveUp)
        self.Open = Unary(link, "Open", stub.Open)


class HomeCalls:
    def __init__(self, link: _Link) -> None:
        self.Relay = BothStream(link, "Relay", stubs.HomeStub(link.channel).Relay)


class DaemonClient:
    """One daemon, over a separate connection. Use `async with`, or `await client.close()` at the end."""

    def __init__(self, endpoint: str, *, credentials: Credentials | None = None, node: str | None = None) -> None:
        self.endpoint = endpoint
        self.name = node
        self.channel = open_channel(endpoint, credentials, node)
        link = _Link(self.channel, endpoint, node)
        self.node = NodeCalls(link)
        self.source = SourceCalls(link)
        self.target = TargetCalls(link)
        self.peer = PeerCalls(link)
        self.gate = GateCalls(link)
        self.home = HomeCalls(link)

    async def close(self) -> None:
        await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
