"""Which caller may call which method, and how errors are returned to the caller.

Invariant: no servicer runs for a caller whose role the table below does not list, and a method that is not in the table
cannot be called at all. Every servicer returns an answer or one error of the taxonomy: its status, its message, and its
wire form in the trailing metadata. Tracebacks are only logged.

A caller is identified by a certificate of the cluster's CA with exactly one common name, `operator:NAME` or `node:NAME`, that
was not revoked. A caller on admin.sock is root, because its mode lets only root connect.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from snapshotd.api import snapshotd_pb2_grpc
from snapshotd.api.errors import WIRE_KEY, Damaged, Denied, Internal, SnapshotError
from snapshotd.api.revocation import Peer, Revocations, peer_of

LOG = logging.getLogger(__name__)

Role = Literal["operator", "node", "root"]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_OPERATOR: frozenset[Role] = frozenset({"operator", "root"})
_NODE: frozenset[Role] = frozenset({"node", "root"})
_BOTH: frozenset[Role] = _OPERATOR | _NODE

#: The same as in the comments of proto/snapshotd.proto; tests/api/test_access.py compares the two.
ALLOWED: dict[str, frozenset[Role]] = {
    "/snapshotd.v1.Node/GetNode": _BOTH,
    "/snapshotd.v1.Node/ListRanks": _BOTH,
    "/snapshotd.v1.Node/ListMoves": _BOTH,
    "/snapshotd.v1.Source/Inspect": _OPERATOR,
    "/snapshotd.v1.Source/Begin": _OPERATOR,
    "/snapshotd.v1.Source/PrepareDevice": _OPERATOR,
    "/snapshotd.v1.Source/Detach": _OPERATOR,
    "/snapshotd.v1.Source/Freeze": _OPERATOR,
    "/snapshotd.v1.Source/Stream": _OPERATOR,
    "/snapshotd.v1.Source/Attach": _OPERATOR,
    "/snapshotd.v1.Source/Renew": _OPERATOR,
    "/snapshotd.v1.Source/Commit": _OPERATOR,
    "/snapshotd.v1.Source/Abort": _OPERATOR,
    "/snapshotd.v1.Source/Release": _OPERATOR,
    "/snapshotd.v1.Source/GetOutcome": _BOTH,
    "/snapshotd.v1.Source/DeclareTargetDead": _OPERATOR,
    "/snapshotd.v1.Target/Examine": _OPERATOR,
    "/snapshotd.v1.Target/Prepare": _OPERATOR,
    "/snapshotd.v1.Target/Push": _NODE,
    "/snapshotd.v1.Target/OpenImageChannel": _NODE,
    "/snapshotd.v1.Target/OpenDeviceChannel": _NODE,
    "/snapshotd.v1.Target/Seal": _NODE,
    "/snapshotd.v1.Target/Restore": _OPERATOR,
    "/snapshotd.v1.Target/Activate": _BOTH,
    "/snapshotd.v1.Target/Discard": _BOTH,
    "/snapshotd.v1.Target/GetCopy": _BOTH,
    "/snapshotd.v1.Target/DeclareSourceDead": _OPERATOR,
    "/snapshotd.v1.Peer/InspectConnections": _OPERATOR,
    "/snapshotd.v1.Peer/SuspendTimeouts": _OPERATOR,
    "/snapshotd.v1.Peer/Repoint": _OPERATOR,
    "/snapshotd.v1.Peer/Settle": _BOTH,
    "/snapshotd.v1.Peer/Forward": _NODE,
    "/snapshotd.v1.Peer/ConfirmDeparture": _NODE,
    "/snapshotd.v1.Gate/Close": _OPERATOR,
    "/snapshotd.v1.Gate/Report": _BOTH,
    "/snapshotd.v1.Gate/SetTargets": _OPERATOR,
    "/snapshotd.v1.Gate/Detach": _NODE,
    "/snapshotd.v1.Gate/NewId": _NODE,
    "/snapshotd.v1.Gate/Attach": _NODE,
    "/snapshotd.v1.Gate/GiveUp": _NODE,
    "/snapshotd.v1.Gate/Open": _BOTH,
    "/snapshotd.v1.Home/Relay": _NODE,
}

#: Of a longer message only the beginning and the end are sent: it must fit twice into the limits of api/channel.py.
_MAX_MESSAGE_CHARS = 8_000
_MAX_DETAILS_CHARS = 500


@dataclass(frozen=True)
class Caller:
    """The peer of a call."""

    role: Role
    name: str

    def __str__(self) -> str:
        return self.role if self.role == "root" else f"{self.role} {self.name}"


def caller(context: Context) -> Caller:
    """The caller, identified by certificate or socket. Raises Denied if neither identifies it."""
    if context.peer().startswith("unix:"):
        return Caller("root", "root")
    # Not "x509_common_name": of a certificate with two names gRPC shows only the first.
    names = peer(context).common_names
    role, _, name = names[0].partition(":") if len(names) == 1 else ("", "", "")
    if name and role == "operator":
        return Caller("operator", name)
    if name and role == "node":
        return Caller("node", name)
    shown = " and ".join(names) or "the caller"
    raise Denied(f"the certificate of {shown} belongs neither to an operator nor to a node")


def peer(context: Context) -> Peer:
    """What the caller's certificate says. Raises Denied if there is none."""
    certificates = list(context.auth_context().get("x509_pem_cert", ()))
    try:
        (pem,) = certificates
        return peer_of(bytes(pem))
    except ValueError as error:
        raise Denied("the caller shows no certificate that can be read") from error


def check(method: str, context: Context, revocations: Revocations | None = None) -> Caller:
    """The caller. Raises Denied if its certificate is revoked, or if the table does not allow it to call `method`."""
    found = caller(context)
    if revocations is not None and found.role != "root" and revocations.revoked(serial := peer(context).serial):
        raise Denied(
            f"the certificate of {found} with serial number {serial:x} has been revoked",
            remedy="use the certificate that replaced it, or have the CA issue a new one",
        )
    roles = ALLOWED.get(method, frozenset())
    if found.role not in roles:
        allowed = " or ".join(f"an {role}" if role == "operator" else f"a {role}" for role in sorted(roles - {"root"}))
        reason = f"only {allowed} may" if allowed else "it is not in the access table"
        raise Denied(f"{found} may not call {method.rpartition('/')[2]}: {reason}")
    return found


class Access(grpc.aio.ServerInterceptor):
    """Wraps every handler: checks the caller and the table, runs the servicer, and translates the errors that it raises."""

    def __init__(self, revocations: Revocations | None = None) -> None:
        self._revocations = revocations

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        found = await continuation(handler_call_details)
        return None if found is None else _guard(handler_call_details.method, found, self._revocations)


def _guard(method: str, handler: Handler, revocations: Revocations | None) -> Handler:
    """The same handler with the same serializers, wrapped. Its servicer may be a coroutine or an async generator."""
    # The type stubs only know the blocking form of a servicer, hence Any.
    behaviours: list[Any] = [handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream]
    servicer = next(behaviour for behaviour in behaviours if behaviour is not None)
    # A method that this daemon does not have is inherited from the generated base class. Its NotImplementedError says so,
    # but that of a handler is a failure of the method: a caller must not take it for an older daemon.
    missing = getattr(servicer, "__module__", None) == snapshotd_pb2_grpc.__name__

    def decode(blob: bytes) -> Any:
        if handler.request_deserializer is None:
            return blob
        try:
            return handler.request_deserializer(blob)
        except DecodeError as error:
            raise Damaged(f"a request for {method} is malformed: {error}") from error

    async def one_reply(request: Any, context: Context) -> Any:
        async def work() -> Any:
            if missing:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented")
            return await servicer(request if handler.request_streaming else decode(request), context)

        return await _guarded(method, context, revocations, work)

    async def many_replies(request: Any, context: Context) -> None:
        async def work() -> None:
            if missing:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented")
            replies = servicer(request if handler.request_streaming else decode(request), context)
            if inspect.isawaitable(replies):  # it writes with context.write
                await replies
                return
            async with aclosing(replies):
                async for reply in replies:
                    await context.write(reply)

        await _guarded(method, context, revocations, work)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    # A single request is decoded after its sender was checked; the requests of a stream while the servicer reads them.
    return make(
        many_replies if handler.response_streaming else one_reply,
        decode if handler.request_streaming else None,
        handler.response_serializer,
    )


async def _guarded(
    method: str, context: Context, revocations: Revocations | None, work: Callable[[], Awaitable[Any]]
) -> Any:
    try:
        found = check(method, context, revocations)
        LOG.debug("%s by %s", method, found)
        return await work()
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except SnapshotError as error:
        level = logging.WARNING if isinstance(error, Denied) else logging.INFO
        LOG.log(level, "%s: %s: %s", method, error.code, error.message)
        await _abort(context, error)
    except grpc.aio.BaseError as error:
        # The caller disconnected during the reply, so the error cannot be returned.
        LOG.info("%s: the caller has disconnected: %s", method, error)
        raise
    except Exception as error:
        LOG.exception("%s failed unexpectedly", method)
        await _abort(context, Internal(f"{method} failed unexpectedly: {type(error).__name__}: {error}"))


async def _abort(context: Context, error: SnapshotError) -> None:
    message = error.message
    if len(message) > _MAX_MESSAGE_CHARS:
        half = _MAX_MESSAGE_CHARS // 2
        message = f"{message[:half]}\n[… {len(message) - 2 * half} characters left out …]\n{message[-half:]}"
    short = type(error)(message, remedy=error.advice[:_MAX_DETAILS_CHARS], where=error.where)
    await context.abort(error.status, message[:_MAX_DETAILS_CHARS], trailing_metadata=((WIRE_KEY, short.to_wire()),))
