"""How both nodes of a connection prove who they are, and agree on the keys that encrypt it.

The two daemons shake hands with TLS 1.3, each with the certificate of its node. Inside TLS the source sends the channel's
key, which the target made for this move and only the move's source has received, and what the connection is for. The target
answers with two fresh keys, one for each direction, and both leave TLS. What follows on the same connection are messages that
these keys encrypt (sealed.py).

Invariant: a connection's keys are known to the two daemons alone, because TLS ends in them. The network processes know the
channel's key, so nothing that must be kept from them is derived from it. The peer holds a certificate of the cluster's CA
that was not revoked. Certificates that are stolen later open nothing: TLS 1.3 has forward secrecy.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import ssl
import struct
from time import monotonic

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig, Damaged, Denied, SnapshotError, from_wire
from snapshotd.api.revocation import peer_of, revocations_of
from snapshotd.transport.keys import Keys
from snapshotd.transport.routes import Route
from snapshotd.transport.sockets import CONNECT_S, fill, tune

_LENGTH = struct.Struct(">I")
_REPLY = struct.Struct(">cI")  # kind, length of what follows
_WELCOME, _REFUSED = b"K", b"E"
_SEAL_BYTES = 32
_MAX_PURPOSE_BYTES = 255
_MAX_REASON_BYTES = 16 << 10
_SKIP_BYTES = 64 << 10


def tls_context(credentials: Credentials, *, server_side: bool) -> ssl.SSLContext:
    """Both sides must present a certificate of the same CA. BadConfig if the files cannot be used.

    OpenSSL chooses the cipher (AES-256-GCM): this Python cannot choose among those of TLS 1.3.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Some Python versions set this option. With it, a connection that is cut would look like a proper end of TLS.
    # OpenSSL 1.1.1 does not have it.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    if server_side:
        context.num_tickets = 0  # sessions are never resumed
    try:
        context.load_cert_chain(credentials.cert, credentials.key)
        context.load_verify_locations(credentials.ca)
    except OSError as error:  # includes ssl.SSLError
        raise BadConfig(f"{credentials.cert}, {credentials.key} or {credentials.ca} cannot be used: {error}") from error
    return context


def peer_node(connection: ssl.SSLSocket, credentials: Credentials) -> str:
    """The common name of the peer's certificate. Raises Denied if it has not exactly one, or was revoked."""
    peer = peer_of(ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode())
    if len(peer.common_names) != 1:
        raise Denied(f"the peer's certificate has {len(peer.common_names)} common names: {peer.common_names!r}")
    if revocations_of(credentials.ca).revoked(peer.serial):
        raise Denied(f"the certificate of {peer.common_names[0]} with serial number {peer.serial:x} has been revoked")
    return peer.common_names[0]


# ---------------------------------------------------------------- the source's side


def connect(
    route: Route,
    key: bytes,
    context: ssl.SSLContext,
    credentials: Credentials,
    node: str,
    limit_s: float = CONNECT_S,
) -> tuple[socket.socket, Keys]:
    """A connection to the target `node`, and its keys. Blocks; `limit_s` is that of connecting alone.

    Raises OSError if the target cannot be reached or shows no certificate of that name, Denied if its certificate was
    revoked, and what the target answers if it refuses the connection.
    """
    own = (route.own, 0) if route.own else None
    plain = socket.create_connection((route.host, route.port), timeout=limit_s, source_address=own)
    try:
        plain.settimeout(CONNECT_S)
        tune(plain)
        return join(plain, key, context, credentials, node)
    except BaseException:
        plain.close()
        raise


def join(
    plain: socket.socket,
    key: bytes,
    context: ssl.SSLContext,
    credentials: Credentials,
    node: str,
    purpose: bytes = b"",
) -> tuple[socket.socket, Keys]:
    """The same for a socket that is connected, has a time limit and is tuned. Takes it over."""
    connection = context.wrap_socket(plain, server_hostname=node)
    try:
        peer_node(connection, credentials)
        connection.sendall(_LENGTH.pack(len(key) + len(purpose)) + key + purpose)
        keys = _welcomed(connection, node)
        connection.unwrap()
    except BaseException:
        connection.close()
        raise
    left = socket.socket(fileno=connection.detach())
    left.settimeout(None)
    return left, keys


def _welcomed(connection: ssl.SSLSocket, node: str) -> Keys:
    kind, length = _REPLY.unpack(_read(connection, _REPLY.size))
    if kind == _WELCOME and length == 2 * _SEAL_BYTES:
        return Keys(sends=_read(connection, _SEAL_BYTES), reads=_read(connection, _SEAL_BYTES))
    if kind == _REFUSED and length <= _MAX_REASON_BYTES:
        raise from_wire(_read(connection, length), node)
    raise Damaged(f"the target sent an invalid answer: kind {kind!r}, {length} bytes")


# ---------------------------------------------------------------- the target's side


def prove_source(
    connection: ssl.SSLSocket, key: bytes, credentials: Credentials, source_node: str, channel: str
) -> bytes:
    """What the connection is for. Denied unless the peer has the certificate of `source_node` and the channel's key.

    Blocks."""
    name = peer_node(connection, credentials)
    if name != f"node:{source_node}":
        raise Denied(f"{name} is not the source of the {channel}")
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    purpose_bytes = length - len(key)
    if not 0 <= purpose_bytes <= _MAX_PURPOSE_BYTES or not hmac.compare_digest(_read(connection, len(key)), key):
        raise Denied(f"that is not the key of the {channel}")
    return _read(connection, purpose_bytes)


def welcome(connection: ssl.SSLSocket) -> Keys:
    """Gives the peer the keys of this connection, and leaves TLS. Blocks. From now on the socket is a plain one."""
    keys = Keys(sends=secrets.token_bytes(_SEAL_BYTES), reads=secrets.token_bytes(_SEAL_BYTES))
    connection.sendall(_REPLY.pack(_WELCOME, 2 * _SEAL_BYTES) + keys.reads + keys.sends)
    connection.unwrap()
    return keys


def refuse(connection: ssl.SSLSocket, error: SnapshotError, limit_s: float) -> None:
    """Sends the reason instead of keys. Waits until the peer closes: a reset for unread data would overtake the reason."""
    reason = error.to_wire()[:_MAX_REASON_BYTES]
    ends_s = monotonic() + limit_s
    with contextlib.suppress(OSError):  # includes TimeoutError, and that the peer has gone
        connection.sendall(_REPLY.pack(_REFUSED, len(reason)) + reason)
        while (left_s := ends_s - monotonic()) > 0:
            connection.settimeout(left_s)
            if not connection.recv(_SKIP_BYTES):
                break


def _read(connection: ssl.SSLSocket, count_bytes: int) -> bytes:
    blob = bytearray(count_bytes)
    fill(connection, memoryview(blob))
    return bytes(blob)
