"""What a keeper says of itself and its rank when it connects, read with suspicion.

Invariant: who the keeper is comes from the kernel (SO_PEERCRED), never from the frame. A home keeper can only register
a child of its own that runs under its own user; a guest keeper is root's. Every name is validated before anyone
makes a path of it. Whether this keeper may claim this rank's uid is the registry's question, asked in `adopt`.
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
    """One end of the rank's stdio: CRIU's name for it in the image, and its number in the criu process of the guest."""

    key: str
    fd: int


@dataclass(frozen=True)
class Hello:
    """A keeper's own words, checked for shape. `user_id` alone is the kernel's."""

    role: str  # "home" or "guest"
    uid: str  # empty: a new rank, to be given one
    job: str
    rank: int
    pid: int  # the rank's, in the keeper's pid namespace; 0 while not known
    user_id: int
    relay_key: str
    home_node: str
    home_endpoint: str
    away_node: str  # home: where the rank is now, if not here
    held_move: str  # a move this keeper still holds signals and stdin for
    move: str  # guest: the move it was made for
    activated: bool  # guest: the rank has been allowed to run
    command: str
    cwd: str
    moves: int
    started_unix_s: float
    stdio: dict[str, Any]  # the layout: channels with their kinds and CRIU keys, see shim/keeper/stdio.py
    inherit: tuple[Inherit, ...]  # guest
    exited: int | None  # wait status of the local rank process, if it has ended
    finished: bool  # the rank has ended for good: all that is left is telling whoever started it


def parse_hello(frame: Frame, user_id: int) -> Hello:
    """The hello in `frame`. Raises FrameError for anything that is not one, Denied for a role its user cannot have."""
    if frame.type != "hello":
        raise FrameError(f"the first frame is {frame.type[:20]!r}, not a hello")
    fields = _Fields(frame.header)
    role = fields.text("role", r"home|guest")
    if role == "guest" and user_id != 0:
        raise Denied(f"user {user_id} cannot run a guest keeper", remedy="only the daemon starts guest keepers")
    stdio = fields.header.get("stdio", {})
    inherit = fields.header.get("inherit", [])
    if not isinstance(stdio, dict) or not isinstance(inherit, list) or len(inherit) > 64:
        raise FrameError("the hello's stdio or inherit is not what it should be")
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
    raise FrameError("an inherited descriptor of the hello is not what it should be")


class _Fields:
    """Typed reading of a header whose every value may be anything."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header

    def text(self, key: str, pattern: str) -> str:
        value = self.header.get(key)
        value = "" if value is None else value
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise FrameError(f"the hello's {key} is {str(value)[:40]!r}")
        return value

    def name(self, key: str) -> str:
        return self.text(key, f"({_NAME.pattern})?")

    def prose(self, key: str) -> str:
        """Text for people: what cannot be shown is replaced, what is too long is cut."""
        value = self.header.get(key)
        text = value if isinstance(value, str) else ""
        return "".join(sign if sign.isprintable() else "?" for sign in text[:4096])

    def number(self, key: str, low: int, high: int) -> int:
        value = self.header.get(key, 0)
        if type(value) is not int or not low <= value <= high:
            raise FrameError(f"the hello's {key} is {str(value)[:40]!r}")
        return value

    def seconds(self, key: str) -> float:
        value = self.header.get(key, 0.0)
        if type(value) not in (int, float) or not 0 <= value < 1e12:
            raise FrameError(f"the hello's {key} is {str(value)[:40]!r}")
        return float(value)


def peer_of(connection: socket.socket) -> tuple[Process, int]:
    """The process and the user at the other end of a unix socket. Raises RankGone when it is already gone."""
    # struct ucred { pid_t pid; uid_t uid; gid_t gid; }
    pid, user_id, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        return Process.of(pid), user_id
    except ProcessLookupError as error:
        raise RankGone(f"the keeper (pid {pid}) is already gone") from error


def rank_process(hello: Hello, keeper: Process) -> Process | None:
    """The rank's process as this daemon numbers it; None while there is none here. Raises Denied, RankGone, Usage.

    It must be the keeper's own child: for a home keeper also of the keeper's user, since a user registers only what is
    theirs. (A child that has changed its user since, which needs privilege, was checked when it was registered.)
    """
    if hello.pid == 0 or hello.away_node or hello.exited is not None:
        return None
    # By NSpid among the keeper's own children: the keeper may number them in another pid namespace than ours.
    process = find_child(keeper.pid, hello.pid)
    if hello.role == "home" and not hello.uid and _real_user(process.pid) != hello.user_id:
        raise Denied(f"process {hello.pid} belongs to another user", remedy="use `migrator run`")
    return process


def _real_user(pid: int) -> int:
    try:
        return status.read(pid).user_id
    except GONE as error:
        raise RankGone(f"process {pid} has ended") from error
