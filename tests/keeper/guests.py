"""Guest keepers under test, and the connection between two nodes' daemons, with its failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from shim.keeper.frames import decode
from snapshotd.api.errors import RankGone
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.stdio_state import StdioState
from snapshotd.proc import tree
from tests.keeper.nodes import REPOSITORY, Node

ROOMY = {"rank_bytes": 1 << 30, "total_bytes": 1 << 30, "free_bytes": 0}


class Guest:
    """A guest keeper on `node`, whose fake criu waits to become the rank."""

    def __init__(self, node: Node, move: str, link: KeeperLink, criu: socket.socket) -> None:
        self.node = node
        self.move = move
        self.link = link
        self.criu = criu

    @classmethod
    async def start(
        cls,
        node: Node,
        home: KeeperLink,
        move: str,
        state: StdioState,
        *,
        criu: str = "",
        identity: dict[str, Any] | None = None,
        spool: dict[str, int] | None = None,
    ) -> Guest:
        known = len([1 for _, event in node.events if event == ("connected",)])
        starter, orders, ours = await cls.begin(node, home, move, state, criu=criu, identity=identity, spool=spool)
        await starter.communicate(orders)
        assert starter.returncode == 0
        link = await node.reported("connected", count=known + 1)
        assert link.role == "guest"
        return cls(node, move, link, ours)

    @staticmethod
    async def begin(
        node: Node,
        home: KeeperLink,
        move: str,
        state: StdioState,
        *,
        criu: str = "",
        identity: dict[str, Any] | None = None,
        spool: dict[str, int] | None = None,
        program: tuple[str, str] = ("-m", "shim.keeper.guest"),
        stderr: int | None = None,
    ) -> tuple[asyncio.subprocess.Process, bytes, socket.socket]:
        """The process that becomes a guest keeper with its orders, those orders, and the daemon's end of criu's socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = node.folder / "criu"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_criu.py")} "$@"\n')
        script.chmod(0o755)
        orders = {
            "uid": home.uid,
            "job": home.info.job,
            "rank": home.info.rank,
            "relay_key": home.info.relay_key,
            "move": move,
            "home_node": "node-1",
            "home_endpoint": "127.0.0.1:1",
            "node": node.name,
            "keeper_sock": str(node.socket),
            "criu": {"argv": [criu or str(script)], "fds": [], "environment": dict(os.environ)},
            "criu_fd": theirs.fileno(),
            "cgroup_procs": "",
            "identity": identity or {"user_id": os.getuid(), "group_id": os.getgid(), "groups": []},
            "stdio": state.to_json(),
            "spool": {"folder": str(node.folder), **(spool or ROOMY)},
            "command": home.info.command,
            "moves": home.info.moves + 1,
            "started_unix_s": home.info.started_unix_s,
        }
        starter = await asyncio.create_subprocess_exec(
            sys.executable,
            *program,
            stdin=PIPE,
            stderr=stderr,
            cwd=REPOSITORY,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        return starter, json.dumps(orders).encode(), ours

    async def restore(self, argv: tuple[str, ...]) -> None:
        """The fake criu becomes the rank, stopped before its first instruction."""
        keys = {channel.key: channel.fd for channel in self.link.info.inherit}
        assert len(keys) == len(self.link.info.inherit)
        ends = {fd: inherit.fd for inherit, fds in zip(self.link.info.inherit, self._fds(), strict=True) for fd in fds}
        self.criu.send(json.dumps({"argv": argv, "ends": ends}).encode())
        pid = int(await asyncio.to_thread(self.criu.recv, 100))
        await self.link.restored(pid)

    def _fds(self) -> list[list[int]]:
        return [channel["fds"] for channel in self.link.info.stdio["channels"]]

    async def activate(self) -> None:
        await self.link.activated(self.move)
        self.let_go()

    def let_go(self) -> None:
        """Lets the rank run, as SIGCONT does for a rank that criu restored."""
        self.criu.send(b"!")
        self.criu.close()

    @property
    def keeper_pid(self) -> int:
        return self.link.keeper.pid


class Way:
    """Carries relay frames between the home keeper's daemon and the guest keeper's, as the two daemons do.

    `cut` loses everything in transit, as a broken connection does; `lose_every` silently drops every n-th frame, and
    `lose_once` the next frame with one of these types (and, of "out", this channel).
    """

    def __init__(self, home: Node, guest: Node, uid: str) -> None:
        self.home, self.guest, self.uid = home, guest, uid
        self.lose_every = 0
        self.lose_once: set[str] = set()
        self.carried = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._tasks = [
            asyncio.create_task(self._carry(self.home, "home", self.guest, "guest")),
            asyncio.create_task(self._carry(self.guest, "guest", self.home, "home")),
        ]
        link = self.guest.links.find(self.uid, "guest")
        if link is not None:
            await link.relay(up=True)

    async def cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        link = self.guest.links.find(self.uid, "guest")
        if link is not None:
            with contextlib.suppress(RankGone):  # its guest has ended, too
                await link.relay(up=False)

    async def _carry(self, source: Node, source_role: str, target: Node, target_role: str) -> None:
        while True:
            link = source.links.find(self.uid, source_role)
            if link is None:
                await asyncio.sleep(0.01)
                continue
            async for frame in link.relay_frames():
                self.carried += 1
                if self.lose_every and self.carried % self.lose_every == 0:
                    continue
                if self.lose_once:
                    header = decode(frame)
                    kind = header.type + (f":{header.header['c']}" if header.type == "out" else "")
                    if kind in self.lose_once:
                        self.lose_once.discard(kind)
                        continue
                other = target.links.find(self.uid, target_role)
                if other is not None:
                    try:
                        await other.send_relay(frame)
                    except RankGone:
                        continue
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not: reaping it is not the keeper's task."""
    return tree.state(pid) not in ("", "Z", "X")
