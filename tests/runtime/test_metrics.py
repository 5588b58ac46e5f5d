"""The metrics, read over HTTP as a scraper does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from snapshotd.api import metrics_http
from snapshotd.api.errors import BadConfig
from snapshotd.network.dispatch import Services
from snapshotd.runtime import metrics
from tests.served import Certificates, Linked, certificates, free_port

__all__ = ["certificates", "free_port"]


@pytest.fixture
async def port(certificates: Certificates, free_port: int) -> AsyncIterator[int]:
    """As in a daemon: the network process asks for them over the link."""
    async with Linked(Services(metrics.exposition), certificates.node).listening("", "", f"127.0.0.1:{free_port}"):
        yield free_port


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await writer.wait_closed()
    return answer


async def scrape(port: int) -> dict[str, float]:
    head, _, body = (await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=")
    assert f"Content-Length: {len(body)}".encode() in head
    rows = (line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


async def test_metrics_are_served(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.Exposition, "KEPT_S", 0.0)
    monkeypatch.setattr(metrics_http, "KEPT_S", 0.0)
    monkeypatch.setattr(metrics.exposition, "_until_s", 0.0)
    before = await scrape(port)
    assert before['snapshotd_moves_total{outcome="ABORT"}'] >= 0, "shown before the first one happens"
    metrics.move_ended("COMMIT")
    metrics.phase("stream", 2.0, 4096)
    metrics.phase("freeze", 0.02)
    held = [123.0]
    metrics.watch(ranks=lambda: 2, image_bytes=lambda: held[0])
    after = await scrape(port)
    name = 'snapshotd_moves_total{outcome="COMMIT"}'
    assert after[name] - before[name] == 1
    assert after['snapshotd_phase_seconds_count{phase="stream"}'] >= 1
    assert after['snapshotd_phase_bytes_total{phase="stream"}'] >= 4096
    assert 'snapshotd_phase_bytes_total{phase="freeze"}' not in after
    assert after["snapshotd_ranks"] == 2
    assert after["snapshotd_image_held_bytes"] == 123
    held[0] = 0
    assert (await scrape(port))["snapshotd_image_held_bytes"] == 0


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 405"),
        (b"x" * 100_000, b""),
    ],
)
async def test_bad_requests(port: int, request_bytes: bytes, status: bytes) -> None:
    try:
        answer = await ask(port, request_bytes)
    except ConnectionError:
        answer = b""
    assert answer.startswith(status)
    assert not (status == b"" and answer)
    assert await scrape(port)


async def test_address_in_use_is_bad_config(port: int, certificates: Certificates) -> None:
    ends = Linked(Services(metrics.exposition), certificates.node)
    with pytest.raises(BadConfig, match=f"metrics_listen: cannot listen on 127.0.0.1:{port}"):
        async with ends.listening("", "", f"127.0.0.1:{port}"):
            pass


# ---------------------------------------------------------------- floods


async def test_flood_of_scrapes_does_not_reach_the_daemon(certificates: Certificates, free_port: int) -> None:
    asked = 0

    def render() -> tuple[str, bytes]:
        nonlocal asked
        asked += 1
        return "text/plain; version=0", b"text 1\n"

    started_s = asyncio.get_running_loop().time()
    async with Linked(Services(render), certificates.node).listening("", "", f"127.0.0.1:{free_port}"):
        for _ in range(20):
            assert all(await asyncio.gather(*(scrape(free_port) for _ in range(20))))
    assert asked <= 2 + asyncio.get_running_loop().time() - started_s, "about one in a second"


def test_daemon_renders_them_once_a_second() -> None:
    now_s, rendered = 100.0, 0

    def ranks() -> float:
        nonlocal rendered
        rendered += 1
        return rendered

    metrics.watch(ranks=ranks, image_bytes=lambda: 0)
    exposition = metrics.Exposition(lambda: now_s)
    texts = {exposition() for _ in range(1000)}
    assert (len(texts), rendered) == (1, 1)
    now_s += 1.1
    assert exposition() not in texts
    metrics.watch(ranks=lambda: 0, image_bytes=lambda: 0)


async def test_idle_connections_do_not_keep_a_scraper_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "_REQUEST_TIMEOUT_S", 600.0)  # not only because their time is over
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(400)]
    assert await scrape(port)
    closed = 0
    for reader, _ in idle[:200]:
        closed += await asyncio.wait_for(reader.read(), 30) == b""
    assert closed == 200, "the oldest ones are closed"
    for _, writer in idle:
        writer.close()
