"""Processes of ordinary users that talk to the keeper's socket by themselves, with whatever they like."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any

from tests.installation import readable_python
from tests.keeper.nodes import Node

ALICE, BOB = 1500, 1501

#: Sends the frames that it reads as JSON lines, and prints the answers. {"$child": …} in a hello becomes that child's pid.
_TALKER = r"""
import ctypes, json, os, socket, struct, subprocess, sys
_libc = ctypes.CDLL(None)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
children = []
def frame(header, payload=b""):
    head = json.dumps(header).encode()
    return struct.pack("!IH", 2 + len(head) + len(payload), len(head)) + head + payload
def exactly(count):
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            sys.exit(0)
        found += piece
    return found
def answer():
    rest = exactly(struct.unpack("!I", exactly(4))[0])
    size = struct.unpack("!H", rest[:2])[0]
    return json.loads(rest[2:2 + size])
for line in sys.stdin:
    order = json.loads(line)
    if "start" in order:
        children.append(subprocess.Popen(order["start"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            preexec_fn=lambda: _libc.prctl(1, 9)))  # PR_SET_PDEATHSIG: it ends with this process
        children[-1].stdout.read(1)
        print(json.dumps({"pid": children[-1].pid}), flush=True)
    elif "again" in order:
        connection.close()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(sys.argv[1])
        print(json.dumps({}), flush=True)
    else:
        try:
            connection.sendall(frame(order["send"], order.get("text", "").encode()))
        except ConnectionError:
            sys.exit(0)
        if order.get("wait", True):
            print(json.dumps(answer()), flush=True)
"""


class Stranger:
    """A process of `user_id` that is connected to the socket of a node."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def connect(cls, node: Node, user_id: int, groups: Sequence[int] = ()) -> Stranger:
        process = await asyncio.create_subprocess_exec(
            *(readable_python(), "-I", "-c", _TALKER, str(node.socket)),
            stdin=PIPE,
            stdout=PIPE,
            cwd="/",
            user=user_id,
            group=user_id,
            extra_groups=list(groups),
        )
        node.keep(process)
        return cls(process)

    async def start(self, *argv: str) -> int:
        """Starts a child, which must print something first. Returns its pid."""
        return int((await self._order({"start": argv}))["pid"])

    async def hello(self, **fields: Any) -> dict[str, Any]:
        """Sends a hello and returns the daemon's answer."""
        known = {"t": "hello", "role": "home", "job": "job", "rank": 0, "relay_key": "0" * 32, "stdio": {}}
        return await self._order({"send": known | fields})

    async def reconnect(self) -> None:
        await self._order({"again": True})

    async def send(self, header: dict[str, Any], text: str = "") -> None:
        """Sends a frame without waiting for an answer."""
        await self._write({"send": header, "text": text, "wait": False})

    async def receive(self, header: dict[str, Any]) -> dict[str, Any]:
        """Sends a frame and returns the next one that arrives."""
        return await self._order({"send": header})

    async def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        await self._write(order)
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            line = await self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line or b'{"t": "closed"}')
        return answer

    async def _write(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
