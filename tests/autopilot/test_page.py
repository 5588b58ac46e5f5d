"""The page over real HTTP: what it shows, who may act, and that news arrive. The store is real, the world is made up."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from migrator import pki
from migrator.autopilot import chain
from migrator.autopilot.model import MoveState, NodeState, World
from migrator.autopilot.page.access import Tokens
from migrator.autopilot.page.feed import KEPT, Feed
from migrator.autopilot.page.serving import Place, serving
from migrator.autopilot.page.view import Phases
from migrator.autopilot.policy import Spares
from migrator.autopilot.store import Store
from migrator.results import Event
from snapshotd.api.errors import BadConfig, Usage
from tests.autopilot import worlds

TOKEN = "0123456789abcdef" * 4
HOSTILE = "<img src=x onerror=alert(1)></script>"
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
    headers: dict[str, str] = field(default_factory=dict)

    def connection(self) -> http.client.HTTPConnection:
        place = urlsplit(self.url)
        assert place.hostname is not None
        if self.context is not None:
            return http.client.HTTPSConnection(place.hostname, place.port, timeout=LIMIT_S, context=self.context)
        return http.client.HTTPConnection(place.hostname, place.port, timeout=LIMIT_S)

    def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> Answer:
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return Answer(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())

    async def get(self, path: str, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await asyncio.to_thread(self._ask, "GET", path, named, None)

    async def act(self, action: str, node: str, token: str = TOKEN, **headers: str) -> Answer:
        named = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        body = json.dumps({"action": action, "node": node, "reason": "a test"}).encode()
        return await asyncio.to_thread(self._ask, "POST", "/api/actions", named, body)

    async def state(self, node: str) -> str:
        known = (await self.store.load()).nodes
        return known[node].state.value if node in known else "healthy"


@contextlib.asynccontextmanager
async def served(
    folder: Path, world: World, place: Place | None = None, context: ssl.SSLContext | None = None
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
            return replace(page.world, nodes=nodes, orders=known.orders)

        feed = Feed(store, now, Spares(), phases)
        store.on_record = lambda record: feed.wake()
        where = place or Place("127.0.0.1", 0)
        async with serving(where, feed, Tokens.read(file), list(world.nodes)) as url:
            page = Page(url, store, feed, phases, world, context)
            yield page
        assert chain.problems(await store.events()) == []


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


# ---------------------------------------------------------------------- what it shows


async def test_state_has_nodes_ranks_gpus_alarms_and_spares(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        answer = await page.get("/api/state")
        node, spare = answer.json["nodes"]
        assert (node["name"], node["state"], node["gpus"], spare["gpus"]) == ("node-1", "healthy", "!#", "--")
        assert node["ranks"] == [{"job": "train", "rank": 3, "user_id": 1000, "gpus": [1], "moving": False}]
        assert node["alarms"][0]["severity"] == "critical"
        assert answer.json["spares"] == [{"node": "spare-1", "gpus_free": 2, "unusable": ""}]
        again = await page.get("/api/state", If_None_Match=answer.headers["etag"])
        assert (again.status, again.body) == (304, b"")


async def test_running_move_is_shown_with_its_phase_and_rate(tmp_path: Path) -> None:
    world = small()
    move = worlds.move(world.ranks[0], "spare-1", MoveState.INTENDED)
    async with served(tmp_path, replace(world, moves=(move,))) as page:
        page.phases.note(move.id, Event("phase-start", "stream", 0.0, 0, 0, ""))
        page.phases.note(move.id, Event("bytes", "stream", 0.1, 5_000, 20_000, ""))
        (shown,) = (await page.get("/api/state")).json["moves"]
        assert (shown["phase"], shown["bytes"], shown["bytes_expected"]) == ("stream", 5_000, 20_000)
        assert (shown["source"], shown["target"], shown["reason"]) == ("node-1", "spare-1", "a reason")
        assert shown["bytes_per_s"] > 0


async def test_timeline_comes_in_pages_with_the_newest_first(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        assert (await page.get("/api/timeline")).json == {"records": [], "more": False, "last": 0}
        for number in range(1, 151):
            await page.store.note("signal", f"record {number}", node="node-1")
        first = (await page.get("/api/timeline")).json
        assert [one["id"] for one in first["records"]] == list(range(150, 50, -1))
        assert first["more"]
        second = (await page.get("/api/timeline?before=51")).json
        assert [one["id"] for one in second["records"]] == list(range(50, 0, -1))
        assert not second["more"]
        assert len((await page.get("/api/timeline?before=-1%27")).json["records"]) == 100


async def test_thousand_nodes_fit_into_one_small_answer(tmp_path: Path) -> None:
    names = [f"node-{number:04}" for number in range(1024)]
    parts = [worlds.node(name, 8) for name in names]
    ranks = [worlds.rank(8 * at + gpu, name, gpus=(gpu,)) for at, name in enumerate(names) for gpu in range(8)]
    async with served(tmp_path, worlds.world(*parts, *ranks)) as page:
        packed = await page.get("/api/state", Accept_Encoding="gzip")
        body = gzip.decompress(packed.body)
        assert len(packed.body) < 150_000
        assert len(body) < 1_500_000
        nodes = json.loads(body)["nodes"]
        assert (len(nodes), sum(len(node["ranks"]) for node in nodes)) == (1024, 8192)


async def test_hostile_names_stay_data(tmp_path: Path) -> None:
    """They are JSON that no browser takes for HTML; the script has no way to put HTML into the document."""
    rank = worlds.rank(0, "node-1", job=HOSTILE)
    world = worlds.world(worlds.node("node-1", reason=HOSTILE), rank, worlds.alarm("node-1", text=HOSTILE))
    async with served(tmp_path, world) as page:
        await page.store.note("signal", f"{HOSTILE}\n\nevent: state\ndata: forged", node="node-1")
        for path in ("/api/state", "/api/timeline"):
            answer = await page.get(path)
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await page.get("/api/state")).json["nodes"][0]["ranks"][0]["job"] == HOSTILE
        async with news(page) as stream:
            found = await asyncio.to_thread(stream.until, "records", lambda data: bool(data["records"]))
            assert found["records"][0]["text"].endswith("data: forged")
        script = (await page.get("/page.js")).body.decode()
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "srcdoc", "DOMParser"):
            assert sink not in script


async def test_page_loads_nothing_from_elsewhere_and_no_inline_code(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        answer = await page.get("/")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy
        text = answer.body.decode()
        for path in ("/", "/page.js", "/page.css"):
            assert "//" not in (await page.get(path)).body.decode().replace("// ", "").replace("/* ", ""), path
        assert "<style" not in text
        assert " on" not in text.replace(" onto", "").split("<body>")[0]
        for landmark in ("<main>", "<header>", '<html lang="en">', "<h1>", 'aria-live="polite"', '<label for="token">'):
            assert landmark in text
        missing = await page.get("/nothing")
        assert (missing.status, missing.headers["x-frame-options"]) == (404, "DENY")


# ---------------------------------------------------------------------- news


async def test_new_record_and_new_state_arrive(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        await page.store.note("start", "began")
        async with news(page, "/api/news?after=1") as stream:
            first = await asyncio.to_thread(stream.until, "state", lambda data: True)
            await page.store.set_node("node-1", NodeState.TAINTED, "a reason")
            found = await asyncio.to_thread(stream.until, "records", lambda data: True)
            assert [(one["id"], one["kind"], one["by"]) for one in found["records"]] == [(2, "state", "autopilot")]
            assert not found["skipped"]
            changed = await asyncio.to_thread(stream.until, "state", lambda data: True)
            assert changed != first


async def test_record_of_another_process_arrives(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page, news(page) as stream, Store.open(page.store.folder) as other:
        await other.set_node("node-1", NodeState.TAINTED, "by a verb", "bob")
        found = await asyncio.to_thread(stream.until, "records", lambda data: True)
        assert found["records"][0]["by"] == "bob"


async def test_viewer_who_missed_too_much_is_told(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        for number in range(KEPT + 5):
            await page.store.note("signal", f"record {number}")
        async with news(page, Last_Event_ID="3") as stream:
            found = await asyncio.to_thread(stream.until, "records", lambda data: True)
            assert (found["skipped"], len(found["records"])) == (True, KEPT)
        async with news(page, Last_Event_ID=str(KEPT + 3)) as stream:
            found = await asyncio.to_thread(stream.until, "records", lambda data: True)
            assert (found["skipped"], len(found["records"])) == (False, 2)


# ---------------------------------------------------------------------- actions


async def test_every_action_changes_the_node_and_is_recorded_with_the_operator(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        for action, after in (
            ("taint", "tainted"),
            ("untaint", "healthy"),
            ("drain", "draining"),
            ("undrain", "healthy"),
            ("return", "validating"),
        ):
            answer = await page.act(action, "node-1", Origin=page.url.rstrip("/"), Sec_Fetch_Site="same-origin")
            assert (answer.status, await page.state("node-1")) == (200, after), answer.body
        records = [one for one in await page.store.events() if one.kind == "page"]
        assert [one.data["action"] for one in records] == ["taint", "untaint", "drain", "undrain", "return"]
        assert {(one.data["by"], one.data["address"]) for one in records} == {("alice (page)", "127.0.0.1")}
        assert {one.data["by"] for one in await page.store.events() if one.kind == "state"} == {"alice (page)"}
        assert all(TOKEN not in one.text + json.dumps(one.data) for one in await page.store.events())


async def test_action_in_the_wrong_state_is_refused_with_advice(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        assert (await page.act("drain", "node-1")).status == 200
        for action in ("drain", "taint"):
            answer = await page.act(action, "node-1")
            assert answer.status == 409
            assert "migrator undrain node-1" in answer.json["remedy"]


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}0", "Bearer é"]
)
async def test_action_without_a_valid_token_changes_nothing(tmp_path: Path, authorization: str) -> None:
    async with served(tmp_path, small()) as page:
        answer = await page.act("drain", "node-1", Authorization=authorization)
        assert answer.status == 401
        assert await page.store.events() == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
async def test_action_from_another_origin_is_refused_even_with_the_token(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with served(tmp_path, small()) as page:
        assert (await page.act("drain", "node-1", **headers)).status == 403
        assert await page.store.events() == []


async def test_malformed_actions_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        assert (await page.act("drain", "node-9")).status == 404
        assert (await page.act("format", "node-1")).status == 400
        assert (await page.act("drain", "node-1", Content_Type="text/plain")).status == 415
        assert (await page.act("drain", "n" * 9000)).status == 413
        assert (await page.get("/api/actions")).status == 405
        assert await page.store.events() == []


async def test_token_is_checked_at_login(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:

        async def login(token: str) -> Answer:
            headers = {"Authorization": f"Bearer {token}"}
            return await asyncio.to_thread(page._ask, "POST", "/api/operator", headers, b"{}")

        assert (await login(TOKEN)).json == {"operator": "alice"}
        assert (await login("wrong")).status == 401


async def test_page_without_tls_is_not_served_under_other_names(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        for name, status in (("evil.example", 421), ("localhost:80", 200), ("127.0.0.1.evil.example", 421)):
            assert (await page.get("/api/state", Host=name)).status == status, name


# ---------------------------------------------------------------------- where it is served


async def test_page_is_served_with_tls(tmp_path: Path) -> None:
    pki.init(tmp_path / "pki")
    made = pki.issue_node(tmp_path / "pki", "node-1", ["127.0.0.1"])
    context = ssl.create_default_context(cafile=str(made.ca))
    place = Place.of("127.0.0.1:0", made.cert, made.key, plain=False)
    async with served(tmp_path, small(), place, context) as page:
        assert page.url.startswith("https://127.0.0.1:")
        assert (await page.get("/api/state")).status == 200
        assert (await page.act("taint", "node-1", Origin=page.url.rstrip("/"))).status == 200


def test_plain_http_is_for_loopback_and_only_when_asked_for(tmp_path: Path) -> None:
    assert Place.of("[::1]:7443", None, None, plain=True) == Place("::1", 7443)
    for text, plain in (("10.0.0.1:80", True), ("0.0.0.0:80", True), ("127.0.0.1:80", False), ("[::]:80", True)):
        with pytest.raises(Usage):
            Place.of(text, None, None, plain=plain)
    for text in ("", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "localhost:80", ":80"):
        with pytest.raises(Usage, match="ADDRESS:PORT"):
            Place.of(text, None, None, plain=True)


async def test_unusable_certificate_and_used_port_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(BadConfig, match="cannot be used"):
        async with served(tmp_path, small(), Place("127.0.0.1", 0, tmp_path / "empty", tmp_path / "empty")):
            pass
    async with served(tmp_path, small()) as page:
        port = urlsplit(page.url).port
        assert port is not None
        with pytest.raises(BadConfig, match="cannot be served"):
            async with served(tmp_path, small(), Place("127.0.0.1", port)):
                pass


def test_token_file_is_made_once_and_is_private(tmp_path: Path) -> None:
    _, path = Tokens.of_folder(tmp_path)
    name, token = path.read_text().split()
    assert (name, path.stat().st_mode & 0o777) == ("operator", 0o600)
    assert Tokens.of_folder(tmp_path)[0].operator(f"Bearer {token}") == "operator"
    path.chmod(0o640)
    with pytest.raises(BadConfig, match="other users"):
        Tokens.read(path)


@pytest.mark.parametrize("text", ["", "alice short", "alice", f"al ice {TOKEN}", "# nothing\n"])
def test_unusable_token_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(BadConfig):
        Tokens.read(path)
