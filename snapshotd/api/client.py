"""Calls a daemon: one typed client object per daemon, which raises only errors of our own taxonomy.

Invariant: every call has a time limit, every failure names the node and its endpoint, and a call is retried only if the
caller states that it is idempotent (`retry=True`). What carries the calls is a `Channel`: a gRPC connection, or in the
daemon the link to its network process.

    async with DaemonClient("10.0.0.2:7070", credentials=credentials, node="node-2") as client:
        info = await client.node.GetNode(GetNodeRequest(), timeout_s=5, retry=True)
        async for progress in client.source.Stream(MoveRequest(move=move), timeout_s=3600):
            ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

from google.protobuf.message import DecodeError, Message
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.calls import MAX_MESSAGE_BYTES, NO_METADATA, CallEnded, CallFailed, Channel
from snapshotd.api.credentials import Credentials
from snapshotd.api.decoding import decoded
from snapshotd.api.errors import (
    Damaged,
    Denied,
    Full,
    Internal,
    SnapshotError,
    Timeout,
    Unreachable,
    from_wire,
)

__all__ = ["Credentials", "DaemonClient", "UnknownMethod", "translate"]

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)

_SAME_VERSION = "run the same version of snapshotd and migrator everywhere"


class UnknownMethod(Internal):
    """The daemon's version does not have this call. Raised here only, never by a daemon."""


def translate(failed: CallFailed, who: str, method: str, node: str = "") -> SnapshotError:
    """Translates a failed call into an error of our own. `who` names node and endpoint."""
    if failed.error:
        return from_wire(failed.error, node)
    details = failed.details or failed.status
    match failed.status:
        case "UNAVAILABLE" | "CANCELLED":
            return Unreachable(f"{who} {_why_unreachable(details)}")
        case "DEADLINE_EXCEEDED":
            return Timeout(f"{who} did not answer {method} in time")
        case "PERMISSION_DENIED" | "UNAUTHENTICATED":
            return Denied(f"{who} does not let us call {method}: {details}")
        case "RESOURCE_EXHAUSTED" if "larger than max" in details:
            return Damaged(
                f"a message of {method}, to or from {who}, is larger than any may be: {details}",
                remedy="no sound message is so large: this is a defect, or something else speaks on that port",
            )
        case "RESOURCE_EXHAUSTED":
            return Full(f"{who} has no room for {method}: {details}")
        case "UNIMPLEMENTED":
            return UnknownMethod(f"{who} does not know {method}", remedy=_SAME_VERSION)
        case "INTERNAL" if "RST_STREAM" in details:
            return Unreachable(f"{who} broke the connection during {method}: {details}")
        case status:
            return Internal(f"{who} failed in {method}: {status}: {details}")


def _why_unreachable(details: str) -> str:
    """The reason, as far as it is certain: gRPC reports a rejected certificate like a broken connection."""
    lowered = details.lower()
    if "certificate_verify_failed" in lowered or "hostname verification" in lowered or "peer name" in lowered:
        return f"could not be reached, or does not accept our certificate, or shows one we do not accept ({details})"
    for known in ("connection refused", "no route to host", "network is unreachable", "no such file or directory"):
        if known in lowered:
            return f"could not be reached: {known}"
    if "snapshotd does not" in lowered or "network process" in lowered:  # our own words: network/link.py
        return f"could not be reached: {details}"
    if "keepalive" in lowered or "ping timeout" in lowered:
        return "could not be reached any more: the connection went silent"
    return f"could not be reached, or does not accept our certificate ({details})"


class _Link:
    """One channel, and the description of its daemon for error messages."""

    def __init__(self, channel: Channel, endpoint: str, node: str | None) -> None:
        self.channel, self.node = channel, node or ""
        self.who = f"node {node} at {endpoint}" if node else f"the daemon at {endpoint}"


class _Method(Generic[Request, Reply]):
    """One method of a daemon. `request` only tells the type checker what it takes."""

    def __init__(self, link: _Link, path: str, request: type[Request], reply: type[Reply]) -> None:
        self.path, self.request, self.reply = path, request, reply
        self._link, self._method = link, path.rpartition("/")[2]

    def _parsed(self, message: bytes) -> Reply:
        try:
            return decoded(self.reply, message)
        except DecodeError as error:
            raise Damaged(
                f"{self._link.who} answered {self._method} with something that is not an answer to it",
                remedy=_SAME_VERSION,
            ) from error

    def _failure(self, failed: CallFailed) -> SnapshotError:
        return translate(failed, self._link.who, self._method, self._link.node)

    def _written(self, request: Request) -> bytes:
        message = request.SerializeToString()
        if len(message) > MAX_MESSAGE_BYTES:
            size = f"Sent message larger than max ({len(message)} vs. {MAX_MESSAGE_BYTES})"
            raise self._failure(CallFailed("RESOURCE_EXHAUSTED", size))
        return message


class Unary(_Method[Request, Reply]):
    """One request, one reply."""

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
            return self._parsed(await self._link.channel.unary(self.path, self._written(request), timeout_s))
        except CallFailed as failed:
            raise self._failure(failed) from failed


class ServerStream(_Method[Request, Reply]):
    """One request, many replies: `async for reply in client.source.Stream(request, timeout_s=…)`.

    Leaving the loop early cancels the call once the iterator is closed (`contextlib.aclosing`) or collected.
    """

    async def __call__(self, request: Request, *, timeout_s: float | None) -> AsyncIterator[Reply]:
        message = self._written(request)
        call = self._link.channel.stream(self.path, timeout_s)
        try:
            with contextlib.suppress(CallEnded):
                await call.write(message)
                await call.done_writing()
            while (reply := await call.read()) is not None:
                yield self._parsed(reply)
        except CallFailed as failed:
            raise self._failure(failed) from failed
        finally:
            call.cancel()


class BothStream(_Method[Request, Reply]):
    """Many requests, many replies. The requests come from an iterator that is consumed as fast as the daemon reads.

    The iterator is not read any more once the replies have ended, normally or not. Use `aclosing`.
    """

    async def __call__(
        self,
        requests: AsyncGenerator[Request, None],
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> AsyncGenerator[Reply, None]:
        call = self._link.channel.stream(self.path, timeout_s, metadata)

        async def feed() -> None:
            try:
                async with aclosing(requests):
                    async for request in requests:
                        await call.write(self._written(request))
                await call.done_writing()
            except CallEnded:
                return  # the loop over the replies raises the reason
            except BaseException:
                call.cancel()
                raise

        feeding = asyncio.create_task(feed(), name=f"requests of {self._method}")
        try:
            while (reply := await call.read()) is not None:
                yield self._parsed(reply)
        except CallFailed as failed:
            if (error := _exception(feeding)) is not None:  # it cancelled the call
                raise error from None
            raise self._failure(failed) from failed
        finally:
            call.cancel()
            feeding.cancel()
            await asyncio.wait([feeding])
            _exception(feeding)  # otherwise asyncio warns that the exception was never retrieved


def _exception(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


class NodeCalls:
    def __init__(self, link: _Link) -> None:
        path = "/snapshotd.v1.Node/"
        self.GetNode = Unary(link, path + "GetNode", pb.GetNodeRequest, pb.NodeInfo)
        self.ListRanks = Unary(link, path + "ListRanks", pb.ListRanksRequest, pb.ListRanksReply)
        self.ListMoves = Unary(link, path + "ListMoves", pb.ListMovesRequest, pb.ListMovesReply)
        self.FindNode = Unary(link, path + "FindNode", pb.FindNodeRequest, pb.FindNodeReply)
        self.Diagnose = Unary(link, path + "Diagnose", pb.DiagnoseRequest, pb.DiagnoseReply)
        self.OpenProbe = Unary(link, path + "OpenProbe", pb.OpenProbeRequest, pb.OpenProbeReply)
        self.GetHealth = Unary(link, path + "GetHealth", pb.GetHealthRequest, pb.Health)
        self.ClearAlarms = Unary(link, path + "ClearAlarms", pb.ClearAlarmsRequest, pb.ClearAlarmsReply)
        self.GetProgress = Unary(link, path + "GetProgress", pb.GetProgressRequest, pb.NodeProgress)
        self.GetSpans = Unary(link, path + "GetSpans", pb.GetSpansRequest, pb.GetSpansReply)


class SourceCalls:
    def __init__(self, link: _Link) -> None:
        path = "/snapshotd.v1.Source/"
        self.Inspect = Unary(link, path + "Inspect", pb.InspectRequest, pb.InspectReply)
        self.Begin = Unary(link, path + "Begin", pb.BeginRequest, pb.BeginReply)
        self.PrepareDevice = Unary(link, path + "PrepareDevice", pb.MoveRequest, pb.PrepareDeviceReply)
        self.Detach = Unary(link, path + "Detach", pb.MoveRequest, pb.DetachReply)
        self.Freeze = Unary(link, path + "Freeze", pb.MoveRequest, pb.FreezeReply)
        self.Stream = ServerStream(link, path + "Stream", pb.MoveRequest, pb.Progress)
        self.Attach = Unary(link, path + "Attach", pb.MoveRequest, pb.AttachReply)
        self.Renew = Unary(link, path + "Renew", pb.MoveRequest, pb.RenewReply)
        self.Commit = Unary(link, path + "Commit", pb.CommitRequest, pb.Outcome)
        self.Abort = Unary(link, path + "Abort", pb.AbortRequest, pb.Outcome)
        self.Release = Unary(link, path + "Release", pb.MoveRequest, pb.ReleaseReply)
        self.GetOutcome = Unary(link, path + "GetOutcome", pb.MoveRequest, pb.Outcome)
        self.DeclareTargetDead = Unary(link, path + "DeclareTargetDead", pb.DeclareRequest, pb.Outcome)
        self.DeclareMemberDead = Unary(link, path + "DeclareMemberDead", pb.DeclareMemberRequest, pb.Outcome)
        self.GetImage = Unary(link, path + "GetImage", pb.MoveRequest, pb.StoredImage)
        self.Send = ServerStream(link, path + "Send", pb.SendRequest, pb.Progress)
        self.DropImage = Unary(link, path + "DropImage", pb.DropImageRequest, pb.DropImageReply)
        self.Hurry = Unary(link, path + "Hurry", pb.MoveRequest, pb.HurryReply)


class TargetCalls:
    """All calls except Push, the image channel over gRPC, which is in snapshotd/transport/image/grpc_channel.py."""

    def __init__(self, link: _Link) -> None:
        path = "/snapshotd.v1.Target/"
        self.Examine = Unary(link, path + "Examine", pb.ExamineRequest, pb.ExamineReply)
        self.Prepare = Unary(link, path + "Prepare", pb.PrepareRequest, pb.PrepareReply)
        self.OpenImageChannel = Unary(
            link, path + "OpenImageChannel", pb.OpenImageChannelRequest, pb.OpenImageChannelReply
        )
        self.OpenDeviceChannel = Unary(
            link, path + "OpenDeviceChannel", pb.OpenDeviceChannelRequest, pb.OpenDeviceChannelReply
        )
        self.AllocateDeviceMemory = Unary(
            link, path + "AllocateDeviceMemory", pb.AllocateDeviceMemoryRequest, pb.AllocateDeviceMemoryReply
        )
        self.Seal = Unary(link, path + "Seal", pb.SealRequest, pb.SealReply)
        self.Restore = Unary(link, path + "Restore", pb.MoveRequest, pb.RestoreReply)
        self.Activate = Unary(link, path + "Activate", pb.TokenRequest, pb.ActivateReply)
        self.Discard = Unary(link, path + "Discard", pb.TokenRequest, pb.DiscardReply)
        self.GetCopy = Unary(link, path + "GetCopy", pb.MoveRequest, pb.Copy)
        self.DeclareSourceDead = Unary(link, path + "DeclareSourceDead", pb.DeclareRequest, pb.ActivateReply)


class PeerCalls:
    def __init__(self, link: _Link) -> None:
        path = "/snapshotd.v1.Peer/"
        self.InspectConnections = Unary(
            link, path + "InspectConnections", pb.InspectConnectionsRequest, pb.InspectConnectionsReply
        )
        self.SuspendTimeouts = Unary(link, path + "SuspendTimeouts", pb.RepointRequest, pb.SuspendTimeoutsReply)
        self.Hold = Unary(link, path + "Hold", pb.RepointRequest, pb.HoldReply)
        self.Repoint = Unary(link, path + "Repoint", pb.RepointRequest, pb.RepointReply)
        self.Settle = Unary(link, path + "Settle", pb.TokenRequest, pb.SettleReply)
        self.Forward = Unary(link, path + "Forward", pb.ForwardRequest, pb.ForwardReply)
        self.ConfirmDeparture = Unary(link, path + "ConfirmDeparture", pb.DepartureRequest, pb.DepartureReply)


class GateCalls:
    def __init__(self, link: _Link) -> None:
        path = "/snapshotd.v1.Gate/"
        self.Close = Unary(link, path + "Close", pb.MoveDescription, pb.GateReport)
        self.Report = Unary(link, path + "Report", pb.GateReportRequest, pb.GateReport)
        self.SetTargets = Unary(link, path + "SetTargets", pb.SetTargetsRequest, pb.GateReport)
        self.Detach = Unary(link, path + "Detach", pb.DetachRequest, pb.DetachReply)
        self.NewId = Unary(link, path + "NewId", pb.NewIdRequest, pb.NewIdReply)
        self.Attach = Unary(link, path + "Attach", pb.AttachRequest, pb.AttachReply)
        self.GiveUp = Unary(link, path + "GiveUp", pb.MoveRequest, pb.GiveUpReply)
        self.Open = Unary(link, path + "Open", pb.TokenRequest, pb.OpenReply)


class JobCalls:
    def __init__(self, link: _Link) -> None:
        path = "/snapshotd.v1.Job/"
        self.Begin = Unary(link, path + "Begin", pb.BeginJobRequest, pb.BeginJobReply)
        self.Renew = Unary(link, path + "Renew", pb.MoveRequest, pb.RenewReply)
        self.Detach = Unary(link, path + "Detach", pb.MoveRequest, pb.DetachReply)
        self.Attach = Unary(link, path + "Attach", pb.MoveRequest, pb.AttachReply)
        self.Commit = Unary(link, path + "Commit", pb.MoveRequest, pb.Outcome)
        self.Abort = Unary(link, path + "Abort", pb.AbortRequest, pb.Outcome)
        self.GetOutcome = Unary(link, path + "GetOutcome", pb.MoveRequest, pb.Outcome)
        self.Drop = Unary(link, path + "Drop", pb.DropJobRequest, pb.DropImageReply)
        self.List = Unary(link, path + "List", pb.ListJobsRequest, pb.ListJobsReply)
        self.Rollback = Unary(link, path + "Rollback", pb.RollbackRequest, pb.Outcome)
        self.MayRun = Unary(link, path + "MayRun", pb.MayRunRequest, pb.MayRunReply)
        self.EndRanks = Unary(link, path + "EndRanks", pb.EndRanksRequest, pb.EndRanksReply)
        self.ListKept = Unary(link, path + "ListKept", pb.ListKeptRequest, pb.ListKeptReply)
        self.HandOver = Unary(link, path + "HandOver", pb.HandOverRequest, pb.Outcome)
        self.Adopt = Unary(link, path + "Adopt", pb.AdoptRequest, pb.Outcome)
        self.Succeed = Unary(link, path + "Succeed", pb.SucceedRequest, pb.SucceedReply)
        self.Lease = Unary(link, path + "Lease", pb.LeaseRequest, pb.LeaseReply)


class HomeCalls:
    def __init__(self, link: _Link) -> None:
        path = "/snapshotd.v1.Home/"
        self.Relay = BothStream(link, path + "Relay", pb.RelayFrame, pb.RelayFrame)
        self.Say = Unary(link, path + "Say", pb.SayRequest, pb.SayReply)


class DaemonClient:
    """One daemon, over a separate connection. Use `async with`, or `await client.close()` at the end."""

    def __init__(
        self,
        endpoint: str,
        *,
        credentials: Credentials | None = None,
        node: str | None = None,
        channel: Channel | None = None,
    ) -> None:
        """Without `channel`, over a gRPC connection of its own."""
        self.endpoint = endpoint
        self.name = node
        if channel is None:
            from snapshotd.api.channel import GrpcChannel, open_channel  # the daemon itself never loads gRPC

            channel = GrpcChannel(open_channel(endpoint, credentials, node))
        self.channel = channel
        link = _Link(channel, endpoint, node)
        self.node = NodeCalls(link)
        self.source = SourceCalls(link)
        self.target = TargetCalls(link)
        self.peer = PeerCalls(link)
        self.gate = GateCalls(link)
        self.home = HomeCalls(link)
        self.job = JobCalls(link)

    async def close(self) -> None:
        await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
