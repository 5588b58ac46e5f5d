"""Both daemons prove that they hold the lane's key, before either gives a connection to its child.

The key itself does not travel: each end answers the other's fresh number with a keyed digest, with its part and the
stripe's name in it, so that no answer serves for anything else and both ends mean the same file. Without encryption this
is all that keeps a stranger from the memory of a job, at either end; who can change what travels is beyond it. With
encryption the certificates follow.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence

from snapshotd.api.errors import Damaged, Denied

KEY_BYTES = 32
_MAGIC = b"SNSK"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_GREETING = struct.Struct(f">4sBB2x{_NONCE_BYTES}s")  # magic, version, stripe, the source's nonce
_VERSION = 1


async def prove_source(connection: socket.socket, key: bytes, stripe: int, name: str) -> None:
    """Denied if the other end does not hold the key, or calls the stripe something else."""
    loop = asyncio.get_running_loop()
    ours = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, _GREETING.pack(_MAGIC, _VERSION, stripe, ours))
    answer = await _read(connection, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"target", name, ours, theirs)):
        raise Denied(
            f"who answers does not hold the key of {name}", remedy="a plain retry is safe: it makes another key"
        )
    await loop.sock_sendall(connection, _proof(key, b"source", name, ours, theirs))


async def prove_target(connection: socket.socket, key: bytes, names: Sequence[str]) -> int:
    """The stripe that the other end, which holds the key, will send; Denied, Damaged."""
    loop = asyncio.get_running_loop()
    magic, version, stripe, theirs = _GREETING.unpack(await _read(connection, _GREETING.size))
    if (magic, version) != (_MAGIC, _VERSION):
        raise Damaged(f"{magic + bytes([version])!r} is no greeting of version {_VERSION}")
    if stripe >= len(names):
        raise Damaged(f"there is no stripe {stripe}: there are {len(names)}")
    name = names[stripe]
    ours = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, ours + _proof(key, b"target", name, theirs, ours))
    if not hmac.compare_digest(await _read(connection, _PROOF_BYTES), _proof(key, b"source", name, theirs, ours)):
        raise Denied(f"who connects does not hold the key of {name}")
    return int(stripe)


def _proof(key: bytes, part: bytes, name: str, source_nonce: bytes, target_nonce: bytes) -> bytes:
    return hmac.digest(key, b"".join((part, source_nonce, target_nonce, name.encode())), "sha256")


async def _read(connection: socket.socket, count_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    blob = b""
    while len(blob) < count_bytes:
        part = await loop.sock_recv(connection, count_bytes - len(blob))
        if not part:
            raise ConnectionResetError("the connection ended without a word")
        blob += part
    return blob
