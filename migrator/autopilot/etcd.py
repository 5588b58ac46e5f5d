"""Calls etcd: the few requests that a shared state needs (shared.py, leader.py). Calls block, so threads make them.

Invariant: no gRPC error leaves this file. A request that can be repeated is sent to the other endpoints too until its time is
up; then Unavailable is raised, and it is not known whether etcd has carried it out.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from snapshotd.api import etcd_pb2 as pb
from snapshotd.api import etcd_pb2_grpc
from snapshotd.api.errors import BadConfig, Denied, Full, Internal, SnapshotError, Unreachable, Usage

T = TypeVar("T")
PREFIX = "/migrator-autopilot"
#: How long a request is tried, and how long at one endpoint.
LIMIT_S = 3.0
TRY_S = 1.0
AGAIN_S = 0.1
_MESSAGE_BYTES = 256 << 20
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
)
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Unavailable(Unreachable):
    """etcd does not answer, or has no majority."""

    remedy = (
        "check `etcdctl endpoint health` and the names, port and certificates of --etcd. It is not known whether the last"
        " change was recorded: `migrator watch` shows it when etcd answers again"
    )


@dataclass(frozen=True)
class Settings:
    """Where etcd is. `cert`, `key` and `ca` are PEM files; without `ca` the system's certificates are used."""

    endpoints: tuple[str, ...]  # URLs
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    prefix: str = PREFIX

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise Usage("--etcd names no endpoint")
        for url in self.endpoints:
            scheme, _, place = url.partition("://")
            port = place.rpartition(":")[2]
            if scheme not in ("http", "https") or not (port.isascii() and port.isdigit()) or "/" in place:
                raise Usage(f"{url[:80]!r} is not an endpoint of etcd, as https://etcd-1:2379")
        if len({url.partition(":")[0] for url in self.endpoints}) > 1:
            raise Usage("some endpoints of etcd are https and others http")
        if (self.cert is None) != (self.key is None):
            raise Usage("--etcd-cert and --etcd-key belong together")

    @property
    def tls(self) -> bool:
        return self.endpoints[0].startswith("https")

    def __str__(self) -> str:
        return ",".join(self.endpoints)


def after(key: bytes) -> bytes:
    """The end of the range of all keys that begin with this one."""
    return key[:-1] + bytes([key[-1] + 1])


class Etcd:
    """One connection for each endpoint. It connects with the first call. Any thread may use it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._channels = [_channel(url, settings) for url in settings.endpoints]
        self._current = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def get(self, key: bytes) -> pb.KeyValue | None:
        found = self.range(pb.RangeRequest(key=key))
        return found[0] if found else None

    def range(self, request: pb.RangeRequest) -> Sequence[pb.KeyValue]:
        return self._call(lambda channel: _kv(channel).Range(request, timeout=TRY_S)).kvs

    def put(self, key: bytes, value: bytes) -> None:
        request = pb.PutRequest(key=key, value=value)
        self._call(lambda channel: _kv(channel).Put(request, timeout=TRY_S * 5), LIMIT_S * 5)

    def delete(self, first: bytes, end: bytes) -> None:
        request = pb.DeleteRangeRequest(key=first, range_end=end)
        self._call(lambda channel: _kv(channel).DeleteRange(request, timeout=TRY_S * 5), LIMIT_S * 5)

    def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """It may be sent more than once: its comparisons must make sure that only the first one has an effect."""
        return self._call(lambda channel: _kv(channel).Txn(request, timeout=TRY_S))

    def compact(self, revision: int) -> None:
        request = pb.CompactionRequest(revision=revision)
        with contextlib.suppress(Compacted):
            self._call(lambda channel: _kv(channel).Compact(request, timeout=TRY_S * 5), LIMIT_S * 5)

    def grant(self, ttl_s: int) -> int:
        """A new lease. One that is granted twice expires by itself."""
        request = pb.LeaseGrantRequest(TTL=ttl_s)
        return self._call(lambda channel: _lease(channel).LeaseGrant(request, timeout=TRY_S)).ID

    def keep_alive(self, lease: int) -> bool:
        """Renews a lease. False if it has expired."""

        def ask(channel: grpc.Channel) -> bool:
            requests: Iterator[pb.LeaseKeepAliveRequest] = iter([pb.LeaseKeepAliveRequest(ID=lease)])
            answers = _lease(channel).LeaseKeepAlive(requests, timeout=TRY_S)
            return next(iter(answers)).TTL > 0

        return self._call(ask)

    def revoke(self, lease: int) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(Gone):
            self._call(lambda channel: _lease(channel).LeaseRevoke(request, timeout=TRY_S))

    def _call(self, act: Callable[[grpc.Channel], T], limit_s: float = LIMIT_S) -> T:
        deadline = time.monotonic() + limit_s
        while True:
            with self._lock:
                current = self._current
            try:
                return act(self._channels[current])
            except StopIteration:
                details = "it ended the call without an answer"
            except grpc.RpcError as error:
                status, details = error.code(), error.details() or ""
                if status not in _GONE:
                    raise _translated(status, details, self.settings.endpoints[current]) from error
            with self._lock:
                if self._current == current:
                    self._current = (current + 1) % len(self._channels)
            if time.monotonic() + AGAIN_S > deadline:
                raise Unavailable(f"etcd at {self.settings} cannot be used: {details or 'no answer'}")
            time.sleep(AGAIN_S)


class Gone(Internal):
    """What the request is about does not exist any more."""


class Compacted(Internal):
    """The revision is forgotten already."""


def _translated(status: grpc.StatusCode, details: str, url: str) -> SnapshotError:
    if status is grpc.StatusCode.NOT_FOUND:
        return Gone(f"etcd at {url}: {details}")
    if status is grpc.StatusCode.OUT_OF_RANGE:
        return Compacted(f"etcd at {url}: {details}")
    if status in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return Denied(
            f"etcd at {url} does not let us do this: {details}",
            remedy="give --etcd-cert and --etcd-key of a user of etcd that may read and write below --etcd-prefix",
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Full(
            f"etcd at {url} has no room: {details}",
            remedy="raise its --quota-backend-bytes, or free space with `etcdctl defrag`, then `etcdctl alarm disarm`",
        )
    return Internal(f"etcd at {url} failed: {status.name}: {details}")


def _kv(channel: grpc.Channel) -> etcd_pb2_grpc.KVStub:
    return etcd_pb2_grpc.KVStub(channel)


def _lease(channel: grpc.Channel) -> etcd_pb2_grpc.LeaseStub:
    return etcd_pb2_grpc.LeaseStub(channel)


def _channel(url: str, settings: Settings) -> grpc.Channel:
    place = url.partition("://")[2]
    if not settings.tls:
        return grpc.insecure_channel(place, options=_OPTIONS)
    ca, key, cert = (_read(path) for path in (settings.ca, settings.key, settings.cert))
    shown = grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
    return grpc.secure_channel(place, shown, options=_OPTIONS)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
