"""A node as the keepers see it: the real `KeeperLinks` on a socket, whose events are recorded."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshotd.api.errors import SnapshotError
from snapshotd.keepers.hello import Hello
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.listener import KeeperEvents, KeeperLinks, Welcome
from snapshotd.proc import tree

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCH = """
import os, sys
import shim.keeper.start
from shim.keeper import library
shim.keeper.home.DAEMON_WAIT_S = float(sys.argv[3])
path = library.wanted(os.environ)
preload = library.read(path) if path.exists() else None
sys.exit(shim.keeper.start.run(sys.argv[4:], sys.argv[1], 0, sys.argv[2], preload=preload))
"""


class Node:
    """`events` are the recorded events, in order, as ("connected",), ("closed", alive), ("exited", status) …"""

    def __init__(self, folder: Path, name: str = "node-1") -> None:
        self.folder = folder
        self.name = name
        self.socket = folder / f"{name}.sock"
        self.events: list[tuple[KeeperLink, tuple[Any, ...]]] = []
        self.hellos: list[tuple[Hello, tree.Process, tree.Process | None]] = []
        self._changed = asyncio.Condition()
        self._keepers: list[Process] = []
        self.refusal: SnapshotError | None = None  # if set, every keeper is refused with it
        self.links: KeeperLinks

    async def start(self) -> Node:
        self.links = KeeperLinks(
            self.socket,
            self._adopt,
            KeeperEvents(
                connected=lambda link: self._note(link, "connected"),
                closed=lambda link, alive: self._note(link, "closed", alive),
                exited=lambda link, status: self._note(link, "exited", status),
                died=lambda link, move, status: self._note(link, "died", move, status),
                failed=lambda link, status: self._note(link, "failed", status),
            ),
        )
        await self.links.start()
        return self

    async def stop(self) -> None:
        await self.links.stop()

    async def clean(self) -> None:
        """Ends all processes that a test has left, also after it failed.

        Ranks first: one that was stopped right after its fork does not end with its keeper, and has the keeper's pipes.
        """
        for _, _, rank in self.hellos:
            if rank is not None:
                rank.signal(signal.SIGKILL)
        for keeper in self._keepers:
            if keeper.returncode is None:
                keeper.kill()
            await keeper.wait()
            keeper._transport.close()  # type: ignore[attr-defined]
        await self.stop()
        for hello, keeper_process, _ in self.hellos:
            if hello.role == "guest":
                keeper_process.signal(signal.SIGKILL)

    def keep(self, process: Process) -> None:
        """Ends this process too when the test is over."""
        self._keepers.append(process)

    async def _adopt(self, hello: Hello, keeper: tree.Process, rank: tree.Process | None) -> Welcome:
        self.hellos.append((hello, keeper, rank))
        if self.refusal is not None:
            raise self.refusal
        return Welcome(hello.uid or f"{hello.job}-{hello.rank}-0a0b0c0d", self.name, "127.0.0.1:1")

    async def _note(self, link: KeeperLink, *event: Any) -> None:
        async with self._changed:
            self.events.append((link, event))
            self._changed.notify_all()

    async def reported(self, *event: Any, count: int = 1) -> KeeperLink:
        """Waits until `event` has occurred `count` times and returns the link of the last."""

        def seen() -> list[KeeperLink]:
            return [link for link, noted in self.events if noted[: len(event)] == event]

        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: len(seen()) >= count)
        return seen()[count - 1]

    async def launch(
        self,
        *argv: str,
        stdin: int | None = PIPE,
        stdout: int | None = PIPE,
        stderr: int | None = PIPE,
        wait_s: float = 10.0,
        wrap: tuple[str, ...] = (),
        job: str = "job",
        interpreter: str = sys.executable,
        **options: Any,
    ) -> Process:
        """`migrator run`, without the command line around it."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **options.pop("env", {})}
        keeper = await asyncio.create_subprocess_exec(
            *wrap,
            interpreter,
            "-c",
            LAUNCH,
            job,
            str(self.socket),
            str(wait_s),
            *argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            **options,
        )
        self._keepers.append(keeper)
        return keeper


def python(program: str) -> tuple[str, str, str]:
    """A rank that runs this Python program."""
    return sys.executable, "-c", program


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Polls for a condition that has no event, such as a process's state."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - /proc has no event to wait for
            await asyncio.sleep(0.005)
