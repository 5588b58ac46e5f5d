"""Who may act on the page, and where it is served."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from migrator import pki
from migrator.autopilot.model import NodeState
from migrator.autopilot.page.access import Tokens
from migrator.autopilot.page.serving import Place, _origin
from migrator.autopilot.world import World
from snapshotd.api.errors import BadConfig, Usage
from tests.autopilot.pages import LIMIT_S, TOKEN, Answer, Page, news, served, small
from tests.autopilot.test_engine import until


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


async def test_rank_is_moved_once_with_the_operators_name(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        (rank,) = page.world.ranks
        asked = {"rank": rank.uid, "target": "spare-1"}
        answer = await page.act("move", "node-1", more=asked)
        assert answer.json == {"done": "rank 3 of train is being moved from node-1 to spare-1 (order 1)"}
        (order,) = (await page.store.load()).orders
        assert (order.kind, order.node, order.rank_uid, order.targets) == ("move", "node-1", rank.uid, ("spare-1",))
        assert (order.by, order.reason, await page.state("node-1")) == ("alice (page)", "a test", "healthy")
        again = await page.act("move", "node-1", more=asked)
        assert (again.status, again.json["error"]) == (
            409,
            "move of rank 3 of train on node-1 is in progress (order 1)",
        )
        texts = [one.text for one in await page.store.events() if one.kind == "order"]
        assert texts == ["alice (page) ordered to move rank 3 of train on node-1 to spare-1: a test"]


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"rank": "train-9"}, 409, "is not on node-1"),
        ({"target": "node-1"}, 409, "it is where it is"),
        ({"target": "spare-1"}, 409, "it is tainted"),
        ({"target": "spare-9"}, 404, "no such node"),
        ({"rank": 3}, 400, "cannot be read"),
    ],
)
async def test_move_that_cannot_be_is_refused(tmp_path: Path, asked: dict[str, Any], status: int, words: str) -> None:
    async with served(tmp_path, small()) as page:
        await page.store.set_node("spare-1", NodeState.TAINTED, "a fan")
        answer = await page.act("move", "node-1", more={"rank": page.world.ranks[0].uid, **asked})
        assert (answer.status, words in answer.json["error"]) == (status, True), answer.body
        assert (await page.store.load()).orders == ()


async def test_action_without_a_valid_token_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        for wrong in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}0", "Bearer é"):
            assert (await page.act("drain", "node-1", Authorization=wrong)).status == 401, wrong
        assert await page.store.events() == []


async def test_action_from_another_origin_is_refused_even_with_the_token(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        elsewhere: list[dict[str, Any]]
        elsewhere = [{"Origin": name} for name in ("https://evil.example", "null", "https://127.0.0.1", "")]
        elsewhere += [{"Sec_Fetch_Site": name} for name in ("cross-site", "same-site")]
        for headers in elsewhere:
            assert (await page.act("drain", "node-1", **headers)).status == 403, headers
        assert await page.store.events() == []


async def test_malformed_actions_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        assert (await page.act("drain", "node-9")).status == 404
        assert (await page.act("format", "node-1")).status == 400
        assert (await page.act("drain", "node-1", Content_Type="text/plain")).status == 415
        assert (await page.act("drain", "n" * 9000)).status == 413
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        assert (await asyncio.to_thread(page.ask, "POST", "/api/actions", headers, b'{"node": "\xff"}')).status == 400
        assert (await page.get("/api/actions")).status == 405
        assert await page.store.events() == []


async def test_token_is_checked_at_login(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        assert (await login(page, f"Bearer {TOKEN}")).json == {"operator": "alice"}
        assert (await login(page, "Bearer wrong")).status == 401
        assert (await login(page, "Certificate")).status == 401
        assert (await page.get("/api/certificate")).json == {"operator": ""}


async def test_page_without_tls_is_not_served_under_other_names(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        for name, status in (("evil.example", 421), ("localhost:80", 200), ("127.0.0.1.evil.example", 421)):
            assert (await page.get("/api/state", Host=name)).status == status, name


# ---------------------------------------------------------------------- where it is served


async def connected(page: Page) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", urlsplit(page.url).port)


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionResetError):
            return await reader.read() == b""
    return True


async def test_silent_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path, small()) as page:
        monkeypatch.setattr("migrator.autopilot.page.serving.FIRST_REQUEST_S", 0.05)
        reader, writer = await connected(page)
        writer.write(b"GET / HTTP/1.1\r\n")
        assert await closed(reader)
        writer.close()
        assert (await page.get("/")).status == 200


@pytest.mark.parametrize("limit", ["CONNECTIONS", "PER_ADDRESS"])
async def test_of_too_many_connections_the_oldest_idle_one_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Viewers who are connected keep their stream, and new ones are served."""
    async with served(tmp_path, small()) as page, news(page) as stream:
        await asyncio.to_thread(stream.until, "state", lambda data: True)
        monkeypatch.setattr(f"migrator.autopilot.page.serving.{limit}", 3)
        first, second = await connected(page), await connected(page)
        assert (await page.get("/")).status == 200
        assert await closed(first[0])
        assert not second[0].at_eof()
        await page.store.note("signal", "it lives")
        await asyncio.to_thread(stream.until, "records", lambda data: True)
        for _, writer in (first, second):
            writer.close()


async def test_one_address_cannot_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with requests that do not end: those beyond its limit are refused."""
    monkeypatch.setattr("migrator.autopilot.page.serving.PER_ADDRESS", 2)
    async with served(tmp_path, small()) as page, news(page), news(page):
        reader, writer = await connected(page)
        assert await closed(reader)
        writer.close()
        elsewhere = http.client.HTTPConnection("127.0.0.1", urlsplit(page.url).port, LIMIT_S, ("127.0.0.2", 0))
        with contextlib.closing(elsewhere):
            await asyncio.to_thread(elsewhere.request, "GET", "/")
            assert (await asyncio.to_thread(elsewhere.getresponse)).status == 200


async def test_handshakes_that_do_not_end_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pki.init(tmp_path / "pki")
    made = pki.issue_node(tmp_path / "pki", "node-1", ["127.0.0.1"])
    context = ssl.create_default_context(cafile=str(made.ca))
    place = Place.of("127.0.0.1", 0, made.cert, made.key, plain=False)
    monkeypatch.setattr("migrator.autopilot.page.serving.PER_ADDRESS", 2)
    async with served(tmp_path, small(), place, context) as page:
        opened = [await connected(page) for _ in range(5)]
        assert await closed(opened[4][0])
        assert not any(reader.at_eof() for reader, _ in opened[:4])
        port = urlsplit(page.url).port
        elsewhere = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=LIMIT_S, source_address=("127.0.0.2", 0), context=context
        )
        with contextlib.closing(elsewhere):
            await asyncio.to_thread(elsewhere.request, "GET", "/")
            assert (await asyncio.to_thread(elsewhere.getresponse)).status == 200
        for _, writer in opened:
            writer.close()

        async def free() -> bool:
            with contextlib.suppress(OSError):
                return (await page.get("/")).status == 200
            return False

        await until("a free place", free)


def test_addresses_of_one_network_of_ipv6_are_one() -> None:
    assert _origin(("2001:db8::1", 1)) == _origin(("2001:db8::ffff:2", 2)) != _origin(("2001:db8:0:1::1", 1))
    assert _origin(("::ffff:10.0.0.1", 1)) == _origin(("10.0.0.1", 1)) != _origin(("10.0.0.2", 1))


async def test_page_that_gets_no_news_any_more_is_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would look as if it were live."""

    async def defect() -> World:
        raise KeyError("a defect")

    async with served(tmp_path, small()) as page:
        async with news(page) as stream:
            await asyncio.to_thread(stream.until, "state", lambda data: True)
            page.feed.world = defect
            page.feed.wake()
            await asyncio.to_thread(list, stream)  # it ends

        async def refused() -> bool:
            try:
                return (await page.get("/")).status == 0
            except ConnectionError:
                return True

        await until("the end of the page", refused)
    assert "the page is not served any more, the autopilot goes on: KeyError" in caplog.text


async def test_page_is_served_with_tls(tmp_path: Path) -> None:
    pki.init(tmp_path / "pki")
    made = pki.issue_node(tmp_path / "pki", "node-1", ["127.0.0.1"])
    context = ssl.create_default_context(cafile=str(made.ca))
    place = Place.of("127.0.0.1", 0, made.cert, made.key, plain=False)
    async with served(tmp_path, small(), place, context) as page:
        assert page.url.startswith("https://127.0.0.1:")
        assert (await page.get("/api/state")).status == 200
        assert (await page.act("taint", "node-1", Origin=page.url.rstrip("/"))).status == 200


async def login(page: Page, authorization: str, **headers: str) -> Answer:
    named = {"Authorization": authorization, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await asyncio.to_thread(page.ask, "POST", "/api/operator", named, b"{}")


async def test_operator_acts_with_a_certificate_until_it_is_revoked(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    pki.init(folder)
    made = pki.issue_node(folder, "node-1", ["127.0.0.1"])
    alice = pki.issue_operator(folder, "alice")
    place = Place.of("127.0.0.1", 0, made.cert, made.key, plain=False, client_ca=made.ca)
    contexts = {name: ssl.create_default_context(cafile=str(made.ca)) for name in ("nobody", "alice", "node")}
    contexts["alice"].load_cert_chain(alice.cert, alice.key)
    contexts["node"].load_cert_chain(made.cert, made.key)
    async with served(tmp_path, small(), place) as page:

        async def tried(name: str, authorization: str, **headers: str) -> int:
            page.context = contexts[name]
            return (await login(page, authorization, **headers)).status

        for name, shown in (("nobody", ""), ("alice", "alice"), ("node", "")):
            page.context = contexts[name]
            assert (await page.get("/api/state")).status == 200  # everybody can read
            assert (await page.get("/api/certificate")).json == {"operator": shown}
            assert await tried(name, "Certificate") == (200 if shown else 401), name
            assert await tried(name, f"Bearer {TOKEN}") == 200  # a token works as before
            assert await tried(name, "") == 401  # a browser shows the certificate without being asked to
        assert await tried("alice", "Certificate", Origin="https://evil.example") == 403
        page.context = contexts["alice"]
        assert (await page.act("taint", "node-1", Authorization="Certificate")).status == 200
        (record,) = [one for one in await page.store.events() if one.kind == "page"]
        assert record.data["by"] == "alice (page)"
        revoked, _ = pki.revoke(folder, "operator:alice")
        assert revoked == made.ca.with_suffix(".crl")
        assert await tried("alice", "Certificate") == 401


async def test_certificate_of_another_ca_is_not_accepted(tmp_path: Path) -> None:
    for name in ("pki", "other"):
        pki.init(tmp_path / name)
    made = pki.issue_node(tmp_path / "pki", "node-1", ["127.0.0.1"])
    stranger = pki.issue_operator(tmp_path / "other", "alice")
    context = ssl.create_default_context(cafile=str(made.ca))
    context.load_cert_chain(stranger.cert, stranger.key)
    place = Place.of("127.0.0.1", 0, made.cert, made.key, plain=False, client_ca=made.ca)
    async with served(tmp_path, small(), place, context) as page:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await page.get("/api/state")


async def test_certificates_need_tls_and_a_usable_ca(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="needs TLS"):
        Place.of("127.0.0.1", 0, None, None, plain=True, client_ca=tmp_path / "ca.crt")
    pki.init(tmp_path / "pki")
    made = pki.issue_node(tmp_path / "pki", "node-1", ["127.0.0.1"])
    (tmp_path / "ca.crt").write_text("nothing")
    with pytest.raises(BadConfig, match=r"ca\.crt, cannot be used"):
        async with served(tmp_path, small(), Place("127.0.0.1", 0, made.cert, made.key, tmp_path / "ca.crt")):
            pass


def test_plain_http_is_for_loopback_and_only_when_asked_for() -> None:
    assert Place.of("::1", 7443, None, None, plain=True) == Place("::1", 7443)
    for address, plain in (("10.0.0.1", True), ("0.0.0.0", True), ("127.0.0.1", False), ("::", True)):
        with pytest.raises(Usage):
            Place.of(address, 80, None, None, plain=plain)


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
