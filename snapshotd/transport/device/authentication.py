"""Proves on both nodes that the peer holds the channel's key, and derives the keys of a connection.

The target creates the channel's key for one move. The source receives it in the reply of OpenDeviceChannel, inside the mutual
TLS 1.3 of gRPC, after both daemons have presented their certificates and the target has checked that the caller is this
move's source. Neither daemon writes it anywhere. So a peer that holds the key is the one that TLS authenticated, and no
certificate is needed again.

The key itself is not sent here. Each side answers the other's nonce with a keyed digest that includes its role and the
stripe's name, so an answer is valid for nothing else and both sides agree on the file. The keys that encrypt what follows
(sealed.py) are keyed digests of the same data, one per direction. Both nonces are fresh, so a recording opens no other
connection, and a relay that does not hold the channel's key cannot derive them.

This gives what TLS would give on this connection, with these limits. The keys of a channel's connections are as secret as
the channel's key: an attacker who obtains it during the move can read all of them and impersonate either side. Certificates
stolen later open nothing: no key was derived from them, and TLS 1.3 does not let them decrypt the reply that carried it.
Without encryption the proof alone protects the memory of a job, on either side; it does not help against an attacker who
can modify traffic.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from time import monotonic

from snapshotd.api.errors import Damaged, Denied
from snapshotd.transport.keys import Keys

_MAGIC = b"SNSK"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_GREETING = struct.Struct(f">4sBB2x{_NONCE_BYTES}s")  # magic, version, stripe, the source's nonce
_VERSION = 2


class _Derived:
    """What both sides derive from the channel's key and the nonces. Every purpose has a different prefix."""

    def __init__(self, key: bytes, name: str, source_nonce: bytes, target_nonce: bytes) -> None:
        self._key, self._about = key, source_nonce + target_nonce + name.encode()

    def proof_of_source(self) -> bytes:
        return self._for(b"source proves")

    def proof_of_target(self) -> bytes:
        return self._for(b"target proves")

    def keys_of_source(self) -> Keys:
        return Keys(sends=self._for(b"source seals"), reads=self._for(b"target seals"))

    def keys_of_target(self) -> Keys:
        return Keys(sends=self._for(b"target seals"), reads=self._for(b"source seals"))

    def _for(self, use: bytes) -> bytes:
        return hmac.digest(self._key, use + self._about, "sha256")


async def prove_source(connection: socket.socket, key: bytes, stripe: int, name: str) -> Keys:
    """The connection's keys. Denied if the peer does not hold the channel's key, or has another name for the stripe."""
    loop = asyncio.get_running_loop()
    ours = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, _GREETING.pack(_MAGIC, _VERSION, stripe, ours))
    answer = b""
    while len(answer) < _NONCE_BYTES + _PROOF_BYTES:
        part = await loop.sock_recv(connection, _NONCE_BYTES + _PROOF_BYTES - len(answer))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        answer += part
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    derived = _Derived(key, name, ours, theirs)
    if not hmac.compare_digest(proof, derived.proof_of_target()):
        raise Denied(f"the peer does not hold the key of {name}", remedy="a retry is safe: it creates another key")
    await loop.sock_sendall(connection, derived.proof_of_source())
    return derived.keys_of_source()


def prove_target(connection: socket.socket, key: bytes, names: Sequence[str], limit_s: float) -> tuple[int, Keys]:
    """The stripe that the peer, which holds the key, will send, and the connection's keys; Denied, Damaged. Blocks."""
    ends_s = monotonic() + limit_s
    magic, version, stripe, theirs = _GREETING.unpack(_read(connection, _GREETING.size, ends_s))
    if (magic, version) != (_MAGIC, _VERSION):
        raise Damaged(f"{magic + bytes([version])!r} is not a greeting of version {_VERSION}")
    if stripe >= len(names):
        raise Damaged(f"there is no stripe {stripe}: there are {len(names)}")
    name = names[stripe]
    ours = secrets.token_bytes(_NONCE_BYTES)
    derived = _Derived(key, name, theirs, ours)
    connection.sendall(ours + derived.proof_of_target())
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES, ends_s), derived.proof_of_source()):
        raise Denied(f"the peer does not hold the key of {name}")
    return int(stripe), derived.keys_of_target()


def _read(connection: socket.socket, count_bytes: int, ends_s: float) -> bytes:
    blob = b""
    while len(blob) < count_bytes:
        connection.settimeout(max(ends_s - monotonic(), 0.001))
        part = connection.recv(count_bytes - len(blob))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        blob += part
    return blob
