"""Serves the page for its tests over real HTTP. The store is real, the world is made up."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.routing import Route

from migrator.autopilot import chain
from migrator.autopilot.pace import Pace
from migrator.autopilot.page.access import Tokens
from migrator.autopilot.page.feed import Feed
from migrator.autopilot.page.serving import Place, serving
from migrator.autopilot.page.view import Phases
from migrator.autopilot.policy import Spares
from migrator.autopilot.store import Store
from migrator.autopilot.world import World
from tests.autopilot import worlds

TOKEN = "0123456789abcdef" * 4
LIMIT_S = 60


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Page:
    url: str
    store: Store
    feed: Feed
    phases: Phases
    world: World
    context: ssl.SSLContext | None = None
    paces: dict[str, Pace] = field(default_factory=dict)  # by job

    def connection(self) -> http.client.HTTPConnection:
        place = urlsplit(self.url)
        assert place.hostname is not None
        if self.context is not None:
            return http.client.HTTPSConnection(place.hostname, place.port, timeout=LIMIT_S, context=self.context)
        return http.client.HTTPConnection(place.hostname, place.port, timeout=LIMIT_S)

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> Answer:
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return Answer(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())

    async def get(self, path: str, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await asyncio.to_thread(self.ask, "GET", path, named, None)

    async def act(
        self, action: str, node: str, token: str = TOKEN, more: dict[str, Any] | None = None, **headers: str
    ) -> Answer:
        named = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        body = json.dumps({"action": action, "node": node, "reason": "a test", **(more or {})}).encode()
        return await asyncio.to_thread(self.ask, "POST", "/api/actions", named, body)

    async def state(self, node: str) -> str:
        known = (await self.store.load()).nodes
        return known[node].state.value if node in known else "healthy"


@contextlib.asynccontextmanager
async def served(
    folder: Path,
    world: World,
    place: Place | None = None,
    context: ssl.SSLContext | None = None,
    more: Callable[[Store], Sequence[Route]] = lambda store: (),
) -> AsyncIterator[Page]:
    file = folder / "tokens"
    file.touch(mode=0o600)
    file.write_text(f"# operators\nalice {TOKEN}\n")
    async with Store.open(folder / "state") as store:
        phases = Phases()

        async def now() -> World:
            known = await store.load()
            nodes = {
                name: replace(node, state=known.nodes[name].state) if name in known.nodes else node
                for name, node in page.world.nodes.items()
            }
            return replace(page.world, nodes=nodes, orders=known.orders, proposals=known.proposals)

        feed = Feed(store, now, Spares(), phases, pace=lambda job: page.paces.get(job))
        store.on_record = lambda record: feed.wake()
        where = place or Place("127.0.0.1", 0)
        async with serving(where, where.listen(), feed, Tokens.read(file), list(world.nodes), more(store)) as url:
            page = Page(url, store, feed, phases, world, context)
            yield page
        assert chain.problems(await store.events()) == []


@contextlib.contextmanager
def autopilot(policy: Path, *more: str) -> Iterator[str]:
    """The address of the page of a running autopilot, as it prints it. At the end SIGTERM must stop it, also with viewers."""
    command = [sys.executable, "-m", "migrator.cli", "autopilot", "--policy", str(policy), "--json"]
    command += ["--page", "127.0.0.1:0", "--page-plain-http", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            records = (json.loads(line) for line in process.stdout)
            found = next(record["data"]["url"] for record in records if record["kind"] == "page")
            with urllib.request.urlopen(f"{found}api/news", timeout=LIMIT_S):
                yield found
                process.terminate()
                assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()


def small() -> World:
    node = worlds.node("node-1", 2)
    rank = worlds.rank(3, "node-1", gpus=(1,))
    return worlds.world(node, worlds.node("spare-1", 2), rank, worlds.alarm("node-1", subject="gpu:GPU-node-1-0"))


class News:
    """A stream of server-sent events, read in a thread."""

    def __init__(self, page: Page, path: str, **headers: str) -> None:
        self.connection = page.connection()
        self.connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        self.reply = self.connection.getresponse()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in self.reply:
            key, _, value = line.decode().rstrip("\n").partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                yield name, json.loads(value)

    def until(self, wanted: str, condition: Callable[[Any], bool]) -> Any:
        return next(data for name, data in self if name == wanted and condition(data))


@contextlib.asynccontextmanager
async def news(page: Page, path: str = "/api/news", **headers: str) -> AsyncIterator[News]:
    stream = await asyncio.to_thread(News, page, path, **headers)
    try:
        yield stream
    finally:
        stream.reply.close()
        stream.connection.close()
