"""The limit of copies: what a bucket lets through in which time, by a clock that the test turns."""

from __future__ import annotations

import asyncio
import heapq
import itertools

import pytest

from snapshotd.transport.pace import BURST_S, Bucket, Limit


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._numbers), woken))
        await woken.wait()

    async def turn(self, seconds: float) -> None:
        """Wakes those whose time comes, one after the other, and lets each go on until it sleeps again or is done."""
        until_s = self.now_s + seconds
        await settled()
        while self._sleepers and self._sleepers[0][0] <= until_s:
            self.now_s, _, woken = heapq.heappop(self._sleepers)
            woken.set()
            await settled()
        self.now_s = until_s


async def settled() -> None:
    """Until all that is ready has run: a task that waits takes a few rounds of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


class Copy:
    """Sends chunks as fast as the bucket lets it."""

    def __init__(self, bucket: Bucket, chunk_bytes: int) -> None:
        self.sent_bytes, self.waited_s, self.lifted = 0, 0.0, asyncio.Event()
        self._bucket, self._chunk_bytes, self.most_bytes = bucket, chunk_bytes, 10**12
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self.sent_bytes < self.most_bytes:
            self.waited_s += await self._bucket.take(self._chunk_bytes, self.lifted)
            self.sent_bytes += self._chunk_bytes
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.mark.parametrize(
    ("text", "link", "bytes_per_s"),
    [
        ("2GB/s", 0, 2e9),
        ("1.5 GB/s", 1e9, 1.5e9),
        ("500MB/s", 0, 5e8),
        ("2000kB/s", 0, 2e6),
        ("30%", 12.5e9, 3.75e9),
        ("30 %", 0, 0),
        ("100%", 1e9, 1e9),
        ("1%", 1e6, 1e6),  # never less than 1 MB/s
    ],
)
def test_limit_is_a_speed_or_a_part_of_the_link(text: str, link: float, bytes_per_s: float) -> None:
    assert Limit.parse(text).of_link(link) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text", ["2", "2GB", "2Gb/s", "-1GB/s", "0GB/s", "1kB/s", "0%", "101%", "fast", "٣GB/s", "1e9B/s"]
)
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Limit.parse(text)


@pytest.mark.parametrize("copies", [1, 3])
async def test_all_copies_together_keep_to_the_limit(copies: int) -> None:
    clock = Clock()
    bucket = Bucket(1000.0, clock, clock.sleep)
    sending = [Copy(bucket, 10) for _ in range(copies)]
    for seconds in (1.0, 4.0, 0.5):
        before = sum(one.sent_bytes for one in sending)
        await clock.turn(seconds)
        sent = sum(one.sent_bytes for one in sending) - before
        assert sent == pytest.approx(1000 * seconds, abs=1000 * BURST_S + 10 * copies)
    shares = [one.sent_bytes for one in sending]
    assert max(shares) - min(shares) <= 10 * copies, "each gets its share"
    for one in sending:
        await one.stop()


async def test_time_in_which_nothing_was_sent_is_not_saved_up() -> None:
    clock = Clock()
    bucket = Bucket(1000.0, clock, clock.sleep)
    await clock.turn(3600.0)
    copy = Copy(bucket, 10)
    await clock.turn(0.0)
    assert copy.sent_bytes <= 1000 * BURST_S + 20
    await copy.stop()


async def test_lifted_copy_goes_at_once_and_does_not_slow_others_down() -> None:
    clock = Clock()
    bucket = Bucket(1000.0, clock, clock.sleep)
    urgent, other = Copy(bucket, 10), Copy(bucket, 10)
    await clock.turn(1.0)
    urgent.most_bytes = urgent.sent_bytes + 100_000
    urgent.lifted.set()
    await asyncio.wait([urgent.task])
    assert clock.now_s == 101.0, "no time has passed"
    before = other.sent_bytes
    await clock.turn(1.0)
    assert other.sent_bytes - before == pytest.approx(1000, abs=1000 * BURST_S + 20)
    assert (urgent.waited_s > 0, other.waited_s > 0) == (True, True)
    await other.stop()


async def test_sender_that_is_cancelled_leaves_no_task_behind() -> None:
    clock = Clock()
    copy = Copy(Bucket(1.0, clock, clock.sleep), 1000)
    await settled()
    before = len(asyncio.all_tasks())
    await copy.stop()
    await settled()
    assert len(asyncio.all_tasks()) < before
    assert asyncio.all_tasks() == {asyncio.current_task()}
