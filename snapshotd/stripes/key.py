"""Both daemons prove that they hold the lane's key, before either gives a connection to its child.

The key itself does not travel: each end answers the other's fresh number with a keyed digest, and names its part and the
stripe in it, so that no answer serves for anything else. Without encryption this is all that keeps a stranger from the
memory of a job, at either end; who can change what travels is beyond it. With encryption the certificates follow.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct

from snapshotd.api.errors import Damaged, Denied

KEY_BYTES = 32
_MAGIC = b"SNSK"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_GREETING = struct.Struct(f">4sBB2x{_NONCE_BYTES}s")  # magic, version, stripe, the source's nonce
_VERSION = 1


async def prove_source(connection: socket.socket, key: bytes, stripe: int) -> None:
    """Denied if the other end does not hold the key."""
    loop = asyncio.get_running_loop()
    ours = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, _GREETING.pack(_MAGIC, _VERSION, stripe, ours))
    answer = await _read(connection, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"target", stripe, ours, theirs)):
        raise Denied("who answers does not hold the key of these stripes", remedy="try the move again")
    await loop.sock_sendall(connection, _proof(key, b"source", stripe, ours, theirs))


async def prove_target(connection: socket.socket, key: bytes, stripes: int) -> int:
    """The stripe that the other end, which holds the key, will send; Denied, Damaged."""
    loop = asyncio.get_running_loop()
    magic, version, stripe, theirs = _GREETING.unpack(await _read(connection, _GREETING.size))
    if (magic, version) != (_MAGIC, _VERSION):
        raise Damaged(f"{magic + bytes([version])!r} is no greeting of version {_VERSION}")
    if stripe >= stripes:
        raise Damaged(f"there is no stripe {stripe}: there are {stripes}")
    ours = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, ours + _proof(key, b"target", stripe, theirs, ours))
    if not hmac.compare_digest(await _read(connection, _PROOF_BYTES), _proof(key, b"source", stripe, theirs, ours)):
        raise Denied("who connects does not hold the key of these stripes")
    return int(stripe)


def _proof(key: bytes, part: bytes, stripe: int, source_nonce: bytes, target_nonce: bytes) -> bytes:
    return hmac.digest(key, b"".join((part, bytes([stripe]), source_nonce, target_nonce)), "sha256")


async def _read(connection: socket.socket, count_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    blob = b""
    while len(blob) < count_bytes:
        part = await loop.sock_recv(connection, count_bytes - len(blob))
        if not part:
            raise ConnectionResetError("the connection ended without a word")
        blob += part
    return blob
