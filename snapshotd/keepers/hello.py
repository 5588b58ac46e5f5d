"""The first frame of a keeper, which describes the keeper and its rank. It is not trusted.

Invariant: the identity of the keeper comes from the kernel (SO_PEERCRED), never from the frame. A home keeper can only
register its own child, which must run as the same user; a guest keeper must be root. Every name is validated before it
becomes part of a path. Whether this keeper may claim the uid of a rank is decided by the registry (adoption.py).
"""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass
from typing import Any

from shim.keeper.frames import Frame, FrameError
from snapshotd.api.errors import Denied, RankGone
from snapshotd.proc import status
from snapshotd.proc.files import GONE
from snapshotd.proc.tree import Process, find_child

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_ENDPOINT = re.compile(r"[A-Za-z0-9_.:\[\]-]{0,255}")
_KEY = re.compile(r"[0-9a-f]{32,128}")
_MAX_RANK = 1 << 24


@dataclass(frozen=True)
class Inherit:
    """A descriptor of the rank's stdio: CRIU's name for it in the image, and its number in the guest keeper's criu."""

    key: str
    fd: int


@dataclass(frozen=True)
class Hello:
    """The keeper's description of itself, validated in form. Only `user_id` comes from the kernel."""

    role: str  # "home" or "guest"
    uid: str  # empty: a new rank, which gets one now
    job: str
    rank: int
    pid: int  # the rank's, in the keeper's pid namespace; 0 if not known yet
    user_id: int
    relay_key: str
    home_node: str
    home_endpoint: str
    away_node: str  # home: the node that the rank is on now, if not this one
    held_move: str  # the move for which this keeper still holds back signals and stdin
    move: str  # guest: the move that started it
    activated: bool  # guest: the rank may run
    command: str
    cwd: str
    moves: int
    started_unix_s: float
    stdio: dict[str, Any]  # the layout: channels with their kinds and CRIU keys, see shim/keeper/stdio.py
    inherit: tuple[Inherit, ...]  # guest
    exited: int | None  # wait status of the local rank process, if it has ended
    finished: bool  # the rank has ended; only its launcher does not know yet


def parse_hello(frame: Frame, user_id: int) -> Hello:
    """The hello in `frame`. Raises FrameError if it is malformed, Denied if its user may not have its role."""
    if frame.type != "hello":
        raise FrameError(f"the first frame of a keeper must be a hello, not {frame.type[:20]!r}")
    fields = _Fields(frame.header)
    role = fields.text("role", r"home|guest")
    if role == "guest" and user_id != 0:
        raise Denied(
            f"user {user_id} may not run a guest keeper",
            remedy="use `migrator run`; only the daemon starts guest keepers",
        )
    stdio = fields.header.get("stdio", {})
    inherit = fields.header.get("inherit", [])
    if not isinstance(stdio, dict) or not isinstance(inherit, list) or len(inherit) > 64:
        raise FrameError("stdio or inherit of the hello is malformed")
    return Hello(
        role=role,
        uid=fields.name("uid"),
        job=fields.name("job"),
        rank=fields.number("rank", 0, _MAX_RANK),
        pid=fields.number("pid", 0, 1 << 30),
        user_id=user_id,
        relay_key=fields.text("relay_key", _KEY.pattern),
        home_node=fields.name("home_node"),
        home_endpoint=fields.text("home_endpoint", _ENDPOINT.pattern),
        away_node=fields.name("away_node"),
        held_move=fields.name("held_move"),
        move=fields.name("move"),
        activated=fields.header.get("activated") is True,
        command=fields.prose("command"),
        cwd=fields.prose("cwd"),
        moves=fields.number("moves", 0, 1 << 30),
        started_unix_s=fields.seconds("started_unix_s"),
        stdio=stdio,
        inherit=tuple(_inherit(item) for item in inherit),
        exited=None if fields.header.get("exited") is None else fields.number("exited", 0, 0xFFFF),
        finished=fields.header.get("finished") is True,
    )


def _inherit(item: object) -> Inherit:
    match item:
        case {"key": str(key), "fd": int(fd)} if len(key) <= 64 and 3 <= fd < 1024:
            return Inherit(key, fd)
    raise FrameError("an inherited descriptor of the hello is malformed")


class _Fields:
    """Validates the values of a header, each of which may be anything."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header

    def text(self, key: str, pattern: str) -> str:
        value = self.header.get(key)
        value = "" if value is None else value
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise FrameError(f"{key} of the hello is invalid: {str(value)[:40]!r}")
        return value

    def name(self, key: str) -> str:
        return self.text(key, f"({_NAME.pattern})?")

    def prose(self, key: str) -> str:
        """Text to display: unprintable characters are replaced, and long text is truncated."""
        value = self.header.get(key)
        text = value if isinstance(value, str) else ""
        return "".join(sign if sign.isprintable() else "?" for sign in text[:4096])

    def number(self, key: str, low: int, high: int) -> int:
        value = self.header.get(key, 0)
        if type(value) is not int or not low <= value <= high:
            raise FrameError(f"{key} of the hello is invalid: {str(value)[:40]!r}")
        return value

    def seconds(self, key: str) -> float:
        value = self.header.get(key, 0.0)
        if type(value) not in (int, float) or not 0 <= value < 1e12:
            raise FrameError(f"{key} of the hello is invalid: {str(value)[:40]!r}")
        return float(value)


def peer_of(connection: socket.socket) -> tuple[Process, int]:
    """The peer process of a unix socket, and its user. Raises RankGone if it has already ended."""
    # struct ucred { pid_t pid; uid_t uid; gid_t gid; }
    pid, user_id, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        return Process.of(pid), user_id
    except ProcessLookupError as error:
        raise RankGone(f"the keeper (pid {pid}) has already ended") from error


def rank_process(hello: Hello, keeper: Process) -> Process | None:
    """The rank's process in this daemon's pid namespace; None if it has none on this node. Raises Denied or RankGone.

    It must be a child of the keeper. The child of a home keeper must also run as the keeper's user, so that users can only
    register their own processes. (A registered child may change its user later, which needs privileges.)
    """
    if hello.pid == 0 or hello.away_node or hello.exited is not None:
        return None
    # Searched by NSpid among the keeper's children, because the keeper may be in another pid namespace.
    process = find_child(keeper.pid, hello.pid)
    if hello.role == "home" and not hello.uid and _real_user(process.pid) != hello.user_id:
        raise Denied(f"process {hello.pid} belongs to another user", remedy="start the rank with `migrator run`")
    return process


def _real_user(pid: int) -> int:
    try:
        return status.read(pid).user_id
    except GONE as error:
        raise RankGone(f"process {pid} has ended") from error
