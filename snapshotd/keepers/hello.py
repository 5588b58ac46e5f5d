"""The first frame of a keeper, which describes the keeper and its rank. It is not trusted.

Invariant: the identity of the keeper comes from the kernel (SO_PEERCRED, SO_PEERPIDFD), never from the frame. A keeper can
only register its own child, which must run as the same user with all its ids, at every hello. Every name is validated
before it becomes part of a path. Whether this keeper may claim the uid of a rank is decided by the registry (adoption.py).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import struct
from dataclasses import dataclass
from typing import Any

from shim.keeper.frames import OLDEST_PROTOCOL, PROTOCOL, Frame, FrameError
from snapshotd.api.errors import Denied, RankGone
from snapshotd.proc import credentials, status
from snapshotd.proc.files import GONE
from snapshotd.proc.pidfd import open_pidfd
from snapshotd.proc.status import Status
from snapshotd.proc.tree import Process, find_child

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_ENDPOINT = re.compile(r"[A-Za-z0-9_.:\[\]-]{0,255}")
_KEY = re.compile(r"[0-9a-f]{32,128}")
_BUILD = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_MAX_RANK = 1 << 24
#: Of keepers that were started before hellos named one.
_FIRST_PROTOCOL = 1
_SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module yet


@dataclass(frozen=True)
class Inherit:
    """A descriptor of the rank's stdio: CRIU's name for it in the image, and its number in the guest keeper's criu."""

    key: str
    fd: int


@dataclass(frozen=True)
class Preloaded:
    """The library that the keeper has preloaded into a new rank."""

    build: str  # its build id
    abi: int


@dataclass(frozen=True)
class Hello:
    """The keeper's description of itself, validated in form. Only `user_id` comes from the kernel."""

    role: str  # "home" or "guest"
    protocol: int  # version of its frames
    uid: str  # empty: a new rank, which gets one now
    job: str
    alone: bool  # home: the job has one rank and was named after its command; if that name is taken, it gets a suffix
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
    library: Preloaded | None  # home: None if there is none, or if the keeper is of a version that does not say
    allow_unprotected: bool  # home: the rank is to run even if this daemon cannot talk to its library


def parse_hello(frame: Frame, user_id: int) -> Hello:
    """The hello in `frame`, of a keeper that runs as `user_id`. Raises FrameError if it is malformed."""
    if frame.type != "hello":
        raise FrameError(f"the first frame of a keeper must be a hello, not {frame.type[:20]!r}")
    fields = _Fields(frame.header)
    role = fields.text("role", r"home|guest")
    stdio = fields.header.get("stdio", {})
    inherit = fields.header.get("inherit", [])
    if not isinstance(stdio, dict) or not isinstance(inherit, list) or len(inherit) > 64:
        raise FrameError("stdio or inherit of the hello is malformed")
    return Hello(
        role=role,
        protocol=fields.number("protocol", 1, 1 << 30, _FIRST_PROTOCOL),
        uid=fields.name("uid"),
        job=fields.name("job"),
        alone=fields.header.get("alone") is True,
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
        library=_library(fields.header.get("library")),
        allow_unprotected=fields.header.get("allow_unprotected") is True,
    )


def protocol_problem(protocol: int) -> str:
    """Why this daemon cannot move the rank of a keeper with such frames, or ""."""
    if OLDEST_PROTOCOL <= protocol <= PROTOCOL:
        return ""
    served = f"{OLDEST_PROTOCOL} to {PROTOCOL}" if OLDEST_PROTOCOL < PROTOCOL else str(PROTOCOL)
    return f"its keeper speaks version {protocol} of the keepers' protocol, and snapshotd here {served}"


def _library(item: object) -> Preloaded | None:
    match item:
        case None:
            return None
        case {"build": str(build), "abi": int(abi)} if _BUILD.fullmatch(build) and 0 <= abi < 1 << 31:
            return Preloaded(build, abi)
    raise FrameError("library of the hello is malformed")


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

    def number(self, key: str, low: int, high: int, default: int = 0) -> int:
        value = self.header.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise FrameError(f"{key} of the hello is invalid: {str(value)[:40]!r}")
        return value

    def seconds(self, key: str) -> float:
        value = self.header.get(key, 0.0)
        if type(value) not in (int, float) or not 0 <= value < 1e12:
            raise FrameError(f"{key} of the hello is invalid: {str(value)[:40]!r}")
        return float(value)


@dataclass(frozen=True)
class Peer:
    """The process that connected, as the kernel names it. The owner closes `pidfd`."""

    process: Process
    user_id: int
    pidfd: int


def user_of(connection: socket.socket) -> int:
    """The user that connected a unix socket."""
    return _credentials(connection)[1]


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected a unix socket. Raises RankGone if it has already ended."""
    pid, user_id = _credentials(connection)
    try:
        pidfd = _peer_pidfd(connection, pid)
    except ProcessLookupError as error:
        raise RankGone(f"the keeper (pid {pid}) has already ended") from error
    try:
        process = Process.of(pid)
        signal.pidfd_send_signal(pidfd, 0)  # not reaped: so far the pid has belonged to no other process
    except OSError as error:
        os.close(pidfd)
        raise RankGone(f"the keeper (pid {pid}) has already ended") from error
    return Peer(process, user_id, pidfd)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    # struct ucred { pid_t pid; uid_t uid; gid_t gid; }
    pid, user_id, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user_id


def _peer_pidfd(connection: socket.socket, pid: int) -> int:
    """Raises ProcessLookupError. Before Linux 6.5 a pid that was reused since the connection cannot be told apart here;
    `check_keeper` then finds at most another process of the same user."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise ProcessLookupError(*error.args) from error
    return open_pidfd(pid)


def check_keeper(peer: Peer) -> Status:
    """The ids of the keeper's process, which must all be those of the connection. Raises Denied or RankGone. Blocking."""
    found = _status(peer.process.pid)
    if problem := credentials.mixed(found):
        raise Denied(f"the keeper is a set-uid or set-gid program: {problem}", remedy=_RUN)
    if found.user_id != peer.user_id:
        raise Denied(f"the keeper connected as user {peer.user_id} and is now user {found.user_id}", remedy=_RUN)
    return found


_RUN = "start the rank with `migrator run`, as the user that it should run as"


def rank_process(hello: Hello, keeper: Process, keeper_status: Status) -> Process | None:
    """The rank's process in this daemon's pid namespace; None if it has none on this node. Raises Denied or RankGone.

    It must be a child of the keeper. With all its ids it must belong to the keeper's user, so that users can only register
    their own processes and no set-uid program. Preflight checks that again, because a program can be started later.
    Blocking: a keeper can have any number of children.
    """
    if hello.pid == 0 or hello.away_node or hello.exited is not None:
        return None
    # Searched by NSpid among the keeper's children, because the keeper may be in another pid namespace.
    process = find_child(keeper.pid, hello.pid)
    found = _status(process.pid)
    problem = credentials.foreign(found, keeper_status)
    if not hello.uid and not problem and found.user_id != hello.user_id:
        problem = f"it belongs to user {found.user_id}"  # also root's: it has not started its program yet
    if problem:
        raise Denied(f"process {hello.pid} cannot be a rank of user {hello.user_id}: {problem}", remedy=_RUN)
    return process


def _status(pid: int) -> Status:
    try:
        return status.read(pid)
    except GONE as error:
        raise RankGone(f"process {pid} has ended") from error
