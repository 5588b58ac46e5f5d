"""The complete state of a TCP connection, read from its socket and saved on a tmpfs before the socket is changed.

Between disconnecting the socket and filling the new connection, the queued bytes exist in this file alone. So a file is
complete or absent (renamed into place, with a digest), and its stage tells what is valid:

    begun   the socket is unchanged, perhaps in repair mode; the file has its options, which repair mode resets
    taken   the socket may be in any state; the file has everything
    whole   the socket is a working connection again; the file has only its former options

Invariant: the saved stage is never behind the socket. It becomes `taken` before the first byte is lost there, and `whole`
after the last one is back.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import xxhash

from snapshotd.api.errors import Damaged, Internal, Refused, Where
from snapshotd.net import repair
from snapshotd.net.flows import Address, Pair
from snapshotd.net.repair import IP, SOL, TCP

_MAGIC = b"snapshot-socket-1\n"
_DIGEST_BYTES = 16
_TRIES = 3

#: Options that a re-point changes (found by comparing all readable options before and after). SO_PEEK_OFF is here because it
#: must be off while the queues are read. Options that a kernel lacks are left out.
_OPTIONS: dict[str, tuple[int, int]] = {
    "reuse_address": (SOL, socket.SO_REUSEADDR),
    "peek_offset": (SOL, repair.SO_PEEK_OFF),
    "send_buffer_bytes": (SOL, socket.SO_SNDBUF),
    "receive_buffer_bytes": (SOL, socket.SO_RCVBUF),
    "buffer_lock": (SOL, repair.SO_BUF_LOCK),
    "port_range": (IP, repair.IP_LOCAL_PORT_RANGE),
    "window_clamp": (TCP, socket.TCP_WINDOW_CLAMP),
    "rto_min_us": (TCP, repair.TCP_RTO_MIN_US),
    "delayed_ack_max_us": (TCP, repair.TCP_DELACK_MAX_US),
}


class Stage(StrEnum):
    BEGUN = "begun"
    TAKEN = "taken"
    WHOLE = "whole"


@dataclass(frozen=True)
class SocketState:
    """One connection. `send` is unacknowledged; its last `unsent_bytes` never left this node."""

    stage: Stage
    local: Address
    remote: Address
    options: Mapping[str, int]
    info: repair.Info
    mss: int = 0
    timestamp: int = 0
    window: repair.Window | None = None
    receive_end: int = 0  # the sequence number after the last byte of each queue
    send_end: int = 0
    unsent_bytes: int = 0
    receive: bytes = b""
    send: bytes = b""

    @property
    def endpoints(self) -> Pair:
        return self.local, self.remote

    @property
    def receive_start(self) -> int:
        return (self.receive_end - len(self.receive)) & 0xFFFFFFFF

    @property
    def send_start(self) -> int:
        return (self.send_end - len(self.send)) & 0xFFFFFFFF

    @property
    def sent_end(self) -> int:
        return (self.send_end - self.unsent_bytes) & 0xFFFFFFFF  # sequence numbers wrap

    @property
    def sent(self) -> bytes:
        return self.send[: len(self.send) - self.unsent_bytes]

    def unsent_after(self, sequence: int) -> bytes:
        """The bytes that the send queue still lacks when it reaches up to `sequence`."""
        missing = (self.send_end - sequence) & 0xFFFFFFFF
        # Sent bytes are back before repair mode ends. So a queue that seems to lack more has in fact grown since.
        return self.send[len(self.send) - missing :] if 0 < missing <= self.unsent_bytes else b""

    def options_alone(self) -> SocketState:
        return replace(self, stage=Stage.WHOLE, receive=b"", send=b"", unsent_bytes=0)


def begin(sock: socket.socket) -> SocketState:
    """Reads the options of a socket that is not in repair mode. Changes nothing."""
    endpoints = repair.pair(sock)
    if endpoints is None:
        raise Internal("a socket that is not connected cannot be captured")
    return SocketState(Stage.BEGUN, *endpoints, _options(sock), repair.info(sock))


def capture(sock: socket.socket, begun: SocketState) -> SocketState:
    """Reads the whole connection of a socket in repair mode whose packets are filtered. Removes nothing from its queues."""
    if begun.options.get("peek_offset", -1) >= 0:
        sock.setsockopt(SOL, repair.SO_PEEK_OFF, -1)
    for _ in range(_TRIES):
        receive, receive_end = _queue(sock, repair.RECV_QUEUE, repair.SIOCINQ)
        send, send_end = _queue(sock, repair.SEND_QUEUE, repair.SIOCOUTQ)
        state = replace(
            begun,
            stage=Stage.TAKEN,
            mss=sock.getsockopt(TCP, socket.TCP_MAXSEG),
            timestamp=sock.getsockopt(TCP, repair.TCP_TIMESTAMP) & 0xFFFFFFFF,
            window=repair.Window.of(sock),
            receive_end=receive_end,
            send_end=send_end,
            unsent_bytes=repair.waiting(sock, repair.SIOCOUTQNSD),
            receive=receive,
            send=send,
        )
        if agrees(sock, state):
            return state
    raise Refused(f"packets of {begun.local} – {begun.remote} still arrive: they are not filtered", where=Where.UNKNOWN)


def agrees(sock: socket.socket, state: SocketState) -> bool:
    """Whether the queues of a socket in repair mode match the state."""
    return (
        repair.waiting(sock, repair.SIOCINQ) == len(state.receive)
        and repair.waiting(sock, repair.SIOCOUTQ) == len(state.send)
        and repair.sequence(sock, repair.RECV_QUEUE) == state.receive_end
        and repair.sequence(sock, repair.SEND_QUEUE) == state.send_end
    )


def _queue(sock: socket.socket, queue: int, request: int) -> tuple[bytes, int]:
    size = repair.waiting(sock, request)
    return repair.peek(sock, queue, size), repair.sequence(sock, queue)


def _options(sock: socket.socket) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, (level, option) in _OPTIONS.items():
        with contextlib.suppress(OSError):
            found[name] = sock.getsockopt(level, option)
    return found


def put_option(sock: socket.socket, state: SocketState, name: str) -> None:
    """Sets one option to its saved value, if this kernel has it and it differs."""
    level, option = _OPTIONS[name]
    wanted = state.options.get(name)
    if wanted is not None and sock.getsockopt(level, option) != wanted:
        sock.setsockopt(level, option, wanted)


# ---------------------------------------------------------------- storage


def save(path: Path, state: SocketState) -> None:
    """When this returns, the state survives the death of this process. The folder is a private tmpfs; the file is 0600."""
    fields = vars(state) | {
        "local": str(state.local),
        "remote": str(state.remote),
        "info": vars(state.info),
        "window": vars(state.window) if state.window else None,
        "receive": len(state.receive),
        "send": len(state.send),
    }
    header = json.dumps(fields).encode()
    content = (struct.pack(">I", len(header)), header, state.receive, state.send)
    put_in_place(path, _MAGIC, _digest(*content), *content)


def put_in_place(path: Path, *parts: bytes) -> None:
    """Writes a file atomically, readable by its owner alone."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.rename(path)


def load(path: Path) -> SocketState | None:
    """None if nothing was saved: the socket is then unchanged. Raises Damaged for a file that `save` did not write."""
    try:
        blob = path.read_bytes()
    except FileNotFoundError:
        return None
    start = len(_MAGIC) + _DIGEST_BYTES
    content = blob[start:]
    if not blob.startswith(_MAGIC) or _digest(content) != blob[len(_MAGIC) : start]:
        raise Damaged(f"{path.name} is not the saved state of a socket")
    size = struct.unpack(">I", content[:4])[0]
    return _from_fields(json.loads(content[4 : 4 + size]), content[4 + size :])


def _from_fields(fields: dict[str, Any], queues: bytes) -> SocketState:
    fields["receive"], fields["send"] = queues[: fields["receive"]], queues[fields["receive"] :]
    fields["stage"] = Stage(fields["stage"])
    fields["local"], fields["remote"] = Address.parse(fields["local"]), Address.parse(fields["remote"])
    fields["info"] = repair.Info(**fields["info"])
    fields["window"] = repair.Window(**fields["window"]) if fields["window"] else None
    return SocketState(**fields)


def _digest(*parts: bytes) -> bytes:
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(part)
    return whole.digest()
