"""A gRPC connection to a daemon: its options, and how its calls appear to api/client.py.

Invariant: each channel is one separate TCP connection, never through a proxy, and a peer that stops responding is
detected within about ten seconds. No gRPC error leaves this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from snapshotd.api.calls import MAX_MESSAGE_BYTES, NO_METADATA, CallEnded, CallFailed
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import WIRE_KEY, BadConfig

#: Errors quote CRIU's log; with gRPC's default limit of 8 KiB a long quotation would break the connection.
MAX_METADATA_BYTES = 128 << 10

#: For client and server: a dead peer is detected within about ten seconds.
COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the effective one: its default is 60 s, regardless of keepalive_timeout
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one channel is one connection: parallel streams depend on it
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the time limit of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),  # this program decides whether a call may be repeated
)


def open_channel(
    endpoint: str,
    credentials: Credentials | None,
    node: str | None = None,
    options: Sequence[tuple[str, int | str]] = (),
) -> grpc.aio.Channel:
    """A new connection to "host:port" (TLS; the certificate must name `node`) or "unix:/path".

    It connects with the first call, so this does not fail if the daemon is unreachable.
    """
    if credentials is None and not endpoint.startswith("unix:"):
        raise BadConfig(
            f"connecting to {node or 'the daemon'} at {endpoint} requires a certificate",
            remedy="set ca, cert and key in the [tls] table of cluster.toml; `migrator cluster init` creates them",
        )
    return connect(endpoint, None if credentials is None else credentials.read(), node, options)


def connect(
    endpoint: str,
    files: tuple[bytes, bytes, bytes] | None,
    node: str | None = None,
    options: Sequence[tuple[str, int | str]] = (),
) -> grpc.aio.Channel:
    """The same with the contents of (ca, cert, key)."""
    merged: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, *options]
    if files is None or endpoint.startswith("unix:"):
        return grpc.aio.insecure_channel(endpoint, options=merged)
    if node is not None:
        merged.append(("grpc.ssl_target_name_override", node))
    ca, cert, key = files
    shown = grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
    return grpc.aio.secure_channel(endpoint, shown, options=merged)


class GrpcChannel:
    """A `calls.Channel` over one gRPC connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.grpc = channel

    async def unary(self, method: str, request: bytes, timeout_s: float | None) -> bytes:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.grpc.unary_unary(method)
        try:
            return await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from error

    def stream(
        self, method: str, timeout_s: float | None = None, metadata: Mapping[str, str] = NO_METADATA
    ) -> GrpcStream:
        call: Any = self.grpc.stream_stream(method)
        return GrpcStream(call(timeout=timeout_s, metadata=grpc.aio.Metadata(*metadata.items())))

    async def close(self) -> None:
        await self.grpc.close()


class GrpcStream:
    """A `calls.StreamCall`.

    gRPC's own reader for iterators is not used: it would keep waiting for the next request after the call broke.
    """

    def __init__(self, call: Any) -> None:
        call._cython_call = _PeersStatus(call._cython_call)
        self._call = call

    async def write(self, message: bytes | memoryview) -> None:
        try:
            await self._call.write(bytes(message))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise CallEnded from error

    async def done_writing(self) -> None:
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
            raise CallEnded from error

    async def read(self) -> bytes | None:
        try:
            message: Any = await self._call.read()
            if message is not grpc.aio.EOF:
                return bytes(message)
            code = await self._call.code()
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from error
        except asyncio.CancelledError:
            # gRPC cancels the reader of a call that was cancelled; only a cancellation of this task is passed on.
            task = asyncio.current_task()
            if not self._call.cancelled() or (task is not None and task.cancelling()):
                raise
            raise CallFailed("CANCELLED", "the call was cancelled") from None
        if code is not grpc.StatusCode.OK:
            raise CallFailed(code.name, await self._call.details() or "")
        return None

    def cancel(self) -> None:
        self._call.cancel()


class _PeersStatus:
    """A call of gRPC's core that keeps the status which the peer sends.

    If a message cannot be sent because the peer has ended the call, grpc.aio would replace the peer's status, which says
    why, by "Internal error from Core", and then wait for it. The core delivers the status only after the peer's messages
    have been read, so the writer must not wait. The reader gets the status.
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def set_internal_error(self, _reason: str) -> None:
        raise CallEnded


def _failed(error: grpc.aio.AioRpcError) -> CallFailed:
    wire = b""
    for key, value in error.trailing_metadata() or ():
        if key == WIRE_KEY:
            wire = value if isinstance(value, bytes) else value.encode()
    return CallFailed(error.code().name, error.details() or "", wire)
