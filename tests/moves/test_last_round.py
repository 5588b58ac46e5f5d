"""After the last round the target has every page as the frozen process has it, whatever the rounds before have left there."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api.errors import RankGone
from snapshotd.criu import page_ranges
from snapshotd.criu.below import Layer
from snapshotd.criu.page_ranges import Range
from snapshotd.moves.precopied import Followed, Precopied, SentMemory
from snapshotd.moves.source import large_memory, last_round, precopy
from snapshotd.moves.source.last_round import LastRound
from snapshotd.precopy.layout import Layout
from snapshotd.precopy.messages import CHUNK_BYTES as ROUND_CHUNK_BYTES
from snapshotd.precopy.tracker import Chunk
from snapshotd.proc.page_frames import PAGE_BYTES
from snapshotd.transport.image.frame import Frame, Kind
from snapshotd.transport.image.local_stream import LocalStream
from snapshotd.transport.image.overlay import round_name
from snapshotd.transport.image.sender import Sender
from snapshotd.transport.image.store import ImageStore
from tests.kernel import needs_page_scans
from tests.moves.test_large_memory import MOVE, Memory, child

__all__ = ["child"]

pytestmark = [pytest.mark.root, needs_page_scans]


class Rounds:
    """A process whose memory was sent before the freeze, in one round, and what the target has of it."""

    def __init__(self, pid: int, memory: Memory, folder: Path) -> None:
        self.pid, self.memory = pid, memory
        middle = memory.start + (memory.end - memory.start) // 2 // PAGE_BYTES * PAGE_BYTES
        gap = 3 * PAGE_BYTES  # of the layout: left to criu
        self.layout = Layout([(memory.start, middle), (middle + gap, memory.end)])
        self.slots = self.layout.size_bytes // PAGE_BYTES
        self.followed = Followed(cast(Any, SimpleNamespace(process=SimpleNamespace(pid=pid))), 77, rounds=1)
        self.store = ImageStore(folder, on_disk=True)
        self.store.create(MOVE, 1 << 30)

    def chunks(self, sent: dict[int, bytes]) -> list[Chunk]:
        found = []
        for offset, length, _, _ in self.layout.chunks(self.layout.ranges):
            slots = [slot for slot in range(offset // PAGE_BYTES, (offset + length) // PAGE_BYTES) if slot in sent]
            if slots:
                bits = sum(1 << slot - offset // PAGE_BYTES for slot in slots)
                bitmap = bits.to_bytes(-(-length // PAGE_BYTES // 8), "little")
                found.append(Chunk(offset, length, bitmap, b"".join(sent[slot] for slot in slots)))
        return found

    async def send(self, earlier: dict[int, bytes], last: LastRound) -> None:
        async with Sender([LocalStream(self.store, MOVE) for _ in range(3)], 64 << 10) as sender:
            left, at = self.chunks(earlier), 0
            name = round_name(self.followed.file, 1)

            def read(sequence: int) -> Frame | None:
                nonlocal at
                end = left[0].offset if left else self.layout.size_bytes
                if at < end:
                    frame = Frame(Kind.HOLE, sequence, name, at, end - at)
                    at = end
                elif left:
                    chunk = left.pop(0)
                    self.followed.sending(chunk)
                    frame = Frame(
                        *(Kind.DATA, sequence, name, chunk.offset, chunk.length),
                        bitmap=chunk.bitmap,
                        payload_bytes=len(chunk.payload),
                        payload=chunk.payload,
                    )
                    at = chunk.offset + chunk.length
                else:
                    return None
                frame.digest = frame.computed_digest()
                return frame

            await sender.put_frames([name], read)
            await sender.stored()
            await large_memory.send(sender, [last])
            assert self.store.seal(MOVE, await sender.finish()) == []

    def content(self) -> bytes:
        return (self.store.path(MOVE) / self.followed.file).read_bytes()


@pytest.mark.parametrize(
    ("seed", "states"),
    [(0, "old"), (1, "current old never-sent"), (2, "current old never-sent"), (3, "current old")],
    ids=str,
)
def test_target_has_every_page_as_it_is(
    child: tuple[int, Memory, bytes], seed: int, states: str, tmp_path: Path
) -> None:
    pid, memory, content = child
    rounds, chance = Rounds(pid, memory, tmp_path), random.Random(seed)
    assert len(content) > ROUND_CHUNK_BYTES
    addresses = [one for start, end in rounds.layout.ranges for one in range(start, end, PAGE_BYTES)]
    now = [content[one - memory.start :][:PAGE_BYTES] for one in addresses]
    earlier: dict[int, bytes] = {}
    current = bytearray(rounds.slots)
    for slot, page in enumerate(now):
        match chance.choice(states.split()) if any(page) else "old":
            case "current":
                earlier[slot], current[slot] = page, 1
            case "old":
                earlier[slot] = chance.randbytes(PAGE_BYTES)
    sent = SentMemory(rounds.followed, rounds.layout, bytes(current))
    (last,) = last_round.find(Precopied(ahead=[sent]))
    pages = page_ranges.common(last.layer.pages, rounds.layout.ranges)
    assert (pages, last.layer.rounds) == (last.layer.pages, [rounds.layout.ranges])
    hidden = 3  # pages without access: criu's
    assert page_ranges.size_bytes(pages) == (len(addresses) - hidden) * PAGE_BYTES
    assert last.size_bytes == (len(addresses) - hidden - current.count(1)) * PAGE_BYTES
    asyncio.run(rounds.send(earlier, last))
    found = rounds.content()
    for slot, address in enumerate(addresses):
        if page_ranges.common(pages, [(address, address + PAGE_BYTES)]):
            assert found[slot * PAGE_BYTES :][:PAGE_BYTES] == now[slot], f"slot {slot}"


def test_zero_page_that_was_never_sent_takes_no_room(child: tuple[int, Memory, bytes], tmp_path: Path) -> None:
    pid, memory, content = child
    rounds = Rounds(pid, memory, tmp_path)
    (last,) = last_round.find(Precopied(ahead=[SentMemory(rounds.followed, rounds.layout, bytes(rounds.slots))]))
    asyncio.run(rounds.send({}, last))
    zeros = sum(not any(content[at : at + PAGE_BYTES]) for at in range(0, len(content), PAGE_BYTES))
    used = (rounds.store.path(MOVE) / rounds.followed.file).stat().st_blocks * 512
    assert zeros > 0
    assert used <= len(content) - zeros * PAGE_BYTES


def test_process_that_has_ended(child: tuple[int, Memory, bytes], tmp_path: Path) -> None:
    _, memory, _ = child
    rounds = Rounds(2**22 - 1, memory, tmp_path)
    sent = SentMemory(rounds.followed, rounds.layout, bytes(rounds.slots))
    assert last_round.find(Precopied(ahead=[sent])) == [], "criu fails for it"
    ranges: list[Range] = list(rounds.layout.ranges)
    with pytest.raises(RankGone, match="has ended"):
        asyncio.run(rounds.send({}, LastRound(sent, Layer(77, ranges, rounds=[ranges]))))


def test_chunks_of_the_last_round_are_not_taken_for_memory_of_the_sender(
    child: tuple[int, Memory, bytes], tmp_path: Path
) -> None:
    """They have any size; what the sender uses again has that of a chunk."""
    pid, memory, content = child
    rounds = Rounds(pid, memory, tmp_path)
    current = bytearray(b"\1" * rounds.slots)
    current[0] = 0
    (last,) = last_round.find(Precopied(ahead=[SentMemory(rounds.followed, rounds.layout, bytes(current))]))
    runs = [(memory.start, memory.start + (64 << 10) * 2)]
    large = large_memory.LargeMemory(pid, Layer(78, runs, rounds=[runs]))

    async def send() -> None:
        async with Sender([LocalStream(rounds.store, MOVE)], 64 << 10) as sender:
            await large_memory.send(sender, [last, large])
            assert rounds.store.seal(MOVE, await sender.finish()) == []

    asyncio.run(send())
    assert (rounds.store.path(MOVE) / large.files[0]).read_bytes() == content[: 2 * (64 << 10)]


async def test_kernel_with_large_pages_sends_nothing_before_the_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images, and what the kernel says of pages, are in pages of 4 KiB."""
    monkeypatch.setattr(precopy, "PAGE_BYTES", 64 << 10)
    begun = cast(Any, SimpleNamespace(begin=SimpleNamespace(coordinator="")))
    made = await precopy.run(cast(Any, None), begun, cast(Any, None), 5.0, 1 << 30, lambda: False)
    assert (made.followed, made.begun) == ([], set())
    assert "large pages" in made.warnings[0]


def test_process_without_memory_of_that_kind_any_more(child: tuple[int, Memory, bytes], tmp_path: Path) -> None:
    """The target needs nothing of what was sent, and must not be told of it."""
    pid, memory, _ = child
    rounds = Rounds(pid, memory, tmp_path)
    rounds.layout = Layout([(1 << 20, 2 << 20)])
    sent = SentMemory(rounds.followed, rounds.layout, bytes(rounds.layout.size_bytes // PAGE_BYTES))
    assert last_round.find(Precopied(ahead=[sent])) == []
