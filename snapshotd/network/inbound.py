"""Calls from outside: who calls is checked, the messages are decoded and written anew, and the daemon runs them.

A caller is identified by a certificate of the cluster's CA with exactly one common name, `operator:NAME` or `node:NAME`, that
was not revoked. A CA that is no longer in ca.crt does not count. A caller on admin.sock is root, because its mode lets only
root connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Container
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from snapshotd.api import access
from snapshotd.api.access import ALLOWED, Caller
from snapshotd.api.calls import CallEnded, CallFailed
from snapshotd.api.errors import WIRE_KEY, Damaged, Denied
from snapshotd.api.methods import PUSH, methods, rewritten
from snapshotd.api.revocation import Peer, peer_of
from snapshotd.network.accounts import CALLS_PER_CALLER
from snapshotd.network.authorities import Authorities
from snapshotd.network.frames import METADATA_KEYS, Request
from snapshotd.network.link import Call, Link
from snapshotd.runtime.logs import Throttle
from snapshotd.runtime.pace import Pace

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_MAX_VALUE_CHARS = 1024
#: How fast one caller may give the daemon work; the cost of a message is 1. A caller that is too fast waits here, so that the
#: daemon, which spends some 0.03 ms on a message and 0.2 ms on a call besides its actual work, is not kept busy by it. The
#: driver of a move makes about 30 calls to each daemon, then one a second: an operator that drains a node of 64 ranks makes
#: 2,000 in the first seconds, which may come at once. Images, even in the smallest chunks (64 KiB), may come at 600 MB/s. A
#: relay under pressure sends larger messages.
CALL_COST, CHUNK_COST = 10, 0.25
COST_PER_S, BURST_COST = 5_000, 20_000
#: Log records about one caller in a minute: of refusals, and of connections that break.
_MAX_COMPLAINTS, _MAX_NOTICES = 10, 60


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
    try:
        return peer_of(_shown(context))
    except ValueError as error:
        raise Denied("the caller shows no certificate that can be read") from error


def _shown(context: Context) -> bytes:
    """The caller's certificate. Raises ValueError if there is none."""
    (pem,) = context.auth_context().get("x509_pem_cert", ())
    return bytes(pem)


class Inbound(grpc.GenericRpcHandler):
    """The handler of every method: each one passes the call on to the daemon."""

    def __init__(self, link: Link) -> None:
        self.revoked: Container[int] = frozenset()
        self.authorities = Authorities()
        self._link = link
        self._pace = Pace(COST_PER_S, BURST_COST)
        self._waiting: Counter[Caller] = Counter()  # calls that the daemon has not got yet
        self._complaints = Throttle(log, _MAX_COMPLAINTS, "%s")
        self._notices = Throttle(log, _MAX_NOTICES, "%s")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if method not in ALLOWED:
            return None

        async def forward(_requests: object, context: Context) -> None:
            await self._forward(method, context)

        # A unary call is a stream with one message, so one kind of handler serves all methods.
        behaviour: Any = forward  # the type stubs know only blocking servicers
        return grpc.stream_stream_rpc_method_handler(behaviour)

    async def _forward(self, method: str, context: Context) -> None:
        found: Caller | None = None
        try:
            found = caller(context)
            self._check(method, context, found)
            await self._turn(found)
            metadata = [
                (key, value)
                for key, value in context.invocation_metadata() or ()
                if key in METADATA_KEYS and isinstance(value, str) and len(value) <= _MAX_VALUE_CHARS
            ]
            role, name = found.role, found.name[:_MAX_VALUE_CHARS]
            call = self._link.open(lambda number: Request(number, method, role, name, metadata[:8]))
            await self._carry(method, call, context, found)
        except Denied as error:
            about = found or "callers without a valid certificate"
            self._complaints.warning(about, "%s: %s: %s", method, error.code, error.message)
            await _abort(context, access.failure(error))
        except CallFailed as failed:
            await _abort(context, failed)
        except grpc.aio.BaseError as error:
            self._notices.info(found or "unknown callers", "%s: the caller has disconnected: %s", method, error)
            raise

    async def _turn(self, found: Caller) -> None:
        """Waits while the caller is too fast. Raises CallFailed if too many of its calls wait."""
        if self._waiting[found] >= CALLS_PER_CALLER:
            raise CallFailed("RESOURCE_EXHAUSTED", f"{found} calls too often: {CALLS_PER_CALLER} calls wait")
        self._waiting[found] += 1
        try:
            await self._pace.turn(found, CALL_COST)
        finally:
            self._waiting[found] -= 1
            if not self._waiting[found]:
                del self._waiting[found]

    def _check(self, method: str, context: Context, found: Caller) -> None:
        if found.role != "root" and (serial := peer(context).serial) in self.revoked:
            raise Denied(
                f"the certificate of {found} with serial number {serial:x} has been revoked",
                remedy="use the certificate that replaced it, or have the CA issue a new one",
            )
        if found.role != "root" and self.authorities.dropped(_shown(context)):
            raise Denied(
                f"the certificate of {found} is of a CA that this node no longer trusts",
                remedy="use a certificate of the present CA (`migrator cluster rotate` makes one)",
            )
        access.check(method, found)

    async def _carry(self, method: str, call: Call, context: Context, found: Caller) -> None:
        """Messages in both directions until the daemon ends the call. Raises CallFailed."""
        feeding = asyncio.create_task(self._feed(method, call, context, found), name=f"requests of {method}")
        try:
            while (reply := await call.read()) is not None:
                await context.write(reply)
        finally:
            call.cancel()  # does nothing to a call that has ended
            feeding.cancel()
            await asyncio.wait([feeding])

    async def _feed(self, method: str, call: Call, context: Context, found: Caller) -> None:
        known, cost = methods().get(method), CHUNK_COST if method == PUSH else 1
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await self._pace.turn(found, cost)
                await call.write(rewritten(known.request, message) if known is not None else message)
            await call.done_writing()
        except DecodeError as error:
            call.give_up(access.failure(Damaged(f"a request for {method} is malformed: {error}")))
        except CallFailed as failed:
            call.give_up(failed)
        except CallEnded:
            return
        except (grpc.aio.BaseError, grpc.RpcError) as error:
            call.give_up(CallFailed("CANCELLED", f"the caller has disconnected: {error}"))


async def _abort(context: Context, failed: CallFailed) -> None:
    try:
        status = grpc.StatusCode[failed.status]
    except KeyError:
        status = grpc.StatusCode.UNKNOWN
    trailing = ((WIRE_KEY, failed.error),) if failed.error else ()
    with contextlib.suppress(grpc.aio.UsageError):  # the caller has gone meanwhile
        await context.abort(status, failed.details, trailing_metadata=trailing)
