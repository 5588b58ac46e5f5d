"""The metrics, read over HTTP as a scraper does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from snapshotd.api.errors import BadConfig
from snapshotd.runtime import metrics


@pytest.fixture
async def port() -> AsyncIterator[int]:
    yield await metrics.serve("127.0.0.1", 0)
    await metrics.close()


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    return answer


async def scrape(port: int) -> dict[str, float]:
    head, _, body = (await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=")
    assert f"Content-Length: {len(body)}".encode() in head
    rows = (line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


async def test_metrics_are_served(port: int) -> None:
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


async def test_address_in_use_is_bad_config(port: int) -> None:
    with pytest.raises(BadConfig, match=f"metrics_listen: cannot listen on 127.0.0.1:{port}"):
        await metrics.serve("127.0.0.1", port)
