"""Both daemons prove that they hold the lane's key, before either gives a connection to its child; and the connection's keys.

The lane's key is made by the target for one move, and goes to the source in the reply of OpenDeviceChannel, inside the mutual
TLS 1.3 of gRPC, where each daemon has shown its certificate and the target has checked that the caller is this move's
source. Neither writes it anywhere. So who holds it is who TLS said, and no certificate is asked for again.

The key itself does not travel here: each end answers the other's fresh number with a keyed digest, with its part and
the stripe's name in it, so that no answer serves for anything else and both ends mean the same file. The keys that seal
what follows (connection.py) are keyed digests of the same, one for each direction: fresh with either end's number, so
nothing that was recorded opens another connection, and out of reach of who passes on proofs and does not hold the
lane's key.

What that gives is what TLS would give on this connection, with these limits. The keys of a lane's connections are no
better than the lane's: who gets hold of that while the move lasts can read all of them, and be either end. Certificates
that are stolen later open nothing: they never made a key, and TLS 1.3 does not let them open the reply that carried it.
Without encryption the proof is all that keeps a stranger from the memory of a job, at either end; who can change what
travels is beyond it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence

from snapshotd.api.errors import Damaged, Denied
from snapshotd.transport.device.handover import Keys

KEY_BYTES = 32
_MAGIC = b"SNSK"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_GREETING = struct.Struct(f">4sBB2x{_NONCE_BYTES}s")  # magic, version, stripe, the source's nonce
_VERSION = 2


class _Derived:
    """What both ends derive from the lane's key once they have exchanged their nonces. No use begins like another one."""

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
    """The connection's keys. Denied if the other end does not hold the lane's, or calls the stripe something else."""
    loop = asyncio.get_running_loop()
    ours = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, _GREETING.pack(_MAGIC, _VERSION, stripe, ours))
    answer = await _read(connection, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    derived = _Derived(key, name, ours, theirs)
    if not hmac.compare_digest(proof, derived.proof_of_target()):
        raise Denied(
            f"who answers does not hold the key of {name}", remedy="a plain retry is safe: it makes another key"
        )
    await loop.sock_sendall(connection, derived.proof_of_source())
    return derived.keys_of_source()


async def prove_target(connection: socket.socket, key: bytes, names: Sequence[str]) -> tuple[int, Keys]:
    """The stripe that the other end, which holds the key, will send, and the connection's keys; Denied, Damaged."""
    loop = asyncio.get_running_loop()
    magic, version, stripe, theirs = _GREETING.unpack(await _read(connection, _GREETING.size))
    if (magic, version) != (_MAGIC, _VERSION):
        raise Damaged(f"{magic + bytes([version])!r} is no greeting of version {_VERSION}")
    if stripe >= len(names):
        raise Damaged(f"there is no stripe {stripe}: there are {len(names)}")
    name = names[stripe]
    ours = secrets.token_bytes(_NONCE_BYTES)
    derived = _Derived(key, name, theirs, ours)
    await loop.sock_sendall(connection, ours + derived.proof_of_target())
    if not hmac.compare_digest(await _read(connection, _PROOF_BYTES), derived.proof_of_source()):
        raise Denied(f"who connects does not hold the key of {name}")
    return int(stripe), derived.keys_of_target()


async def _read(connection: socket.socket, count_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    blob = b""
    while len(blob) < count_bytes:
        part = await loop.sock_recv(connection, count_bytes - len(blob))
        if not part:
            raise ConnectionResetError("the connection ended without a word")
        blob += part
    return blob
