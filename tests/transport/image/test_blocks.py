"""Images whose blocks the target has in other images: whatever it has, what is sealed equals what was offered, and only the
rest was sent. Over gRPC and over bulk connections."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from snapshotd.api.errors import Damaged
from snapshotd.transport.image import blocks
from snapshotd.transport.image.block_index import BlockIndex
from snapshotd.transport.image.blocks import MIN_OFFER_BYTES, Offer, Offered, block_bytes_of, spans_of
from snapshotd.transport.image.frame import PAGE_BYTES, Answer, Frame, Kind, parse_header, raw_frame
from snapshotd.transport.image.known_blocks import KnownBlocks
from snapshotd.transport.image.sender import Sender
from snapshotd.transport.image.store import ImageStore
from tests.transport.image.targets import MOVE, Serve

CHUNK_BYTES = 256 << 10
HAVE = "m-00000000000a"
#: One digest and one bit in each of two bitmaps for a block, and content where it is missing.
OVERHEAD = 17 / PAGE_BYTES

Files = Mapping[str, bytes]


def pages(seed: int, count: int) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(PAGE_BYTES) for _ in range(count)]


def shuffled(seed: int, of: list[bytes]) -> list[bytes]:
    mixed = list(of)
    random.Random(seed).shuffle(mixed)
    return mixed


def image(folder: Path, files: Files, holes: bool = False) -> list[Path]:
    """Writes the files; zero pages become holes if `holes`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        with (folder / name).open("wb") as file:
            for at in range(0, len(data), PAGE_BYTES):
                if not holes or any(data[at : at + PAGE_BYTES]):
                    file.seek(at)
                    file.write(data[at : at + PAGE_BYTES])
            file.truncate(len(data))
    return sorted(folder / name for name in files)


async def sent(target_store: ImageStore, serve: Serve, paths: list[Path], **serving: object) -> Sender:
    """Offers the files as MOVE and seals them; they must be equal."""
    async with serve(streams=3, **serving) as target:
        target_store.create(MOVE, 1 << 20)
        async with Sender(await target.streams(), CHUNK_BYTES, offers=True) as sender:
            for path in paths:
                await sender.put_file(path.name, path)
            files = await sender.finish()
    assert target_store.seal(MOVE, files) == []
    for path in paths:
        assert (target_store.path(MOVE) / path.name).read_bytes() == path.read_bytes()
    return sender


def knows(store: ImageStore, *folders: Path) -> None:
    store.known_blocks.images_for = lambda _move: ("job", folders)


COMMON = pages(1, 300)
OWN = pages(2, 40)
ZERO = bytes(PAGE_BYTES)
PAIRS: dict[str, tuple[Files, Files]] = {
    "equal": ({"pages-1.img": b"".join(COMMON)}, {"pages-1.img": b"".join(COMMON)}),
    "another order, and some of its own": (
        {"pages-1.img": b"".join(COMMON)},
        {"pages-1.img": b"".join(shuffled(3, COMMON + OWN))},
    ),
    "in other files": (
        {"pages-1.img": b"".join(COMMON[:100]), "pages-2.img": b"".join(COMMON[100:])},
        {"pages-1.img": b"".join(COMMON[50:250]), "pages-7.img": b"".join(COMMON[:50])},
    ),
    "nothing in common": ({"pages-1.img": b"".join(COMMON)}, {"pages-1.img": b"".join(OWN)}),
    "unaligned tails": (
        {"pages-1.img": b"".join(COMMON) + b"t" * 77},
        {"pages-1.img": b"".join(COMMON[::-1]) + b"t" * 77, "pages-2.img": b"".join(COMMON[:99]) + b"u" * 5},
    ),
    "empty and small files": (
        {"core.img": b"", "a.img": b"x"},
        {"core.img": b"", "a.img": b"x", "b.img": b"y" * 70_000},
    ),
    "zero pages": (
        {"pages-1.img": b"".join(COMMON)},
        {"pages-1.img": b"".join(shuffled(4, COMMON + [ZERO] * 200)), "zero.img": bytes(1 << 20)},
    ),
    "device memory": (
        {"device-5-0": b"".join(COMMON) + bytes(1 << 18)},
        {"device-5-0": b"".join(COMMON[:256]) + b"".join(OWN) + ZERO * 30, "device-5-1": b"".join(COMMON[:100])},
    ),
}


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
async def test_any_image_arrives_whatever_the_target_has(
    serve: Serve, store: ImageStore, tmp_path: Path, pair: str, holes: bool
) -> None:
    have, offered = PAIRS[pair]
    image(tmp_path / "have", have, holes)
    knows(store, tmp_path / "have")
    sender = await sent(store, serve, image(tmp_path / "offered", offered, holes))
    total = sum(len(data) for data in offered.values())
    assert sender.chunks_resent == 0
    if pair == "equal":
        assert sender.bytes_found == total
        assert sender.bytes_sent <= total * OVERHEAD + 100
    if pair == "another order, and some of its own":
        assert sender.bytes_found == len(COMMON) * PAGE_BYTES
        assert sender.bytes_sent <= len(OWN) * PAGE_BYTES + 2 * (total * OVERHEAD + 100)
    if pair == "nothing in common":
        assert sender.bytes_found == 0
        assert sender.bytes_sent <= total * (1 + OVERHEAD) + 100
    if pair == "zero pages":
        assert sender.bytes_found == len(COMMON) * PAGE_BYTES


@pytest.mark.parametrize("seed", range(8))
async def test_random_images_arrive(serve: Serve, store: ImageStore, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    pool = [*pages(seed + 100, 60), ZERO, b"\0" * 4095 + b"e"]

    def files() -> Files:
        names = dice.sample(["pages-1.img", "pages-2.img", "device-1-0", "core-1.img", "ghost-1.img"], 3)
        return {
            name: b"".join(dice.choices(pool, k=dice.randrange(300))) + dice.randbytes(dice.randrange(50))
            for name in names
        }

    folders = [tmp_path / f"have-{number}" for number in range(2)]
    for folder in folders:
        image(folder, files(), holes=dice.random() < 0.5)
    knows(store, *folders)
    await sent(store, serve, image(tmp_path / "offered", files(), holes=dice.random() < 0.5))


async def test_target_that_may_use_no_images_finds_nothing(serve: Serve, store: ImageStore, tmp_path: Path) -> None:
    offered = image(tmp_path / "offered", {"pages-1.img": b"".join(COMMON)})
    store.create(HAVE, 1 << 20)
    image(store.path(HAVE), {"pages-1.img": b"".join(COMMON)})
    assert (await sent(store, serve, offered)).bytes_found == 0


async def test_blocks_of_an_image_that_was_dropped_in_the_meantime_are_sent(
    serve: Serve, store: ImageStore, tmp_path: Path
) -> None:
    image(tmp_path / "have", {"pages-1.img": b"".join(COMMON)})
    knows(store, tmp_path / "have")
    find = BlockIndex.find

    def gone(index: BlockIndex, digest: bytes) -> tuple[Path, int] | None:
        shutil.rmtree(tmp_path / "have", ignore_errors=True)
        return find(index, digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockIndex, "find", gone)
        sender = await sent(store, serve, image(tmp_path / "offered", {"pages-1.img": b"".join(COMMON)}))
    assert sender.bytes_found == 0


async def test_block_that_has_changed_since_it_was_indexed_is_noticed(
    serve: Serve, store: ImageStore, tmp_path: Path
) -> None:
    """The digest of the chunk does not match, so it is sent plainly."""
    (have,) = image(tmp_path / "have", {"pages-1.img": b"".join(COMMON)})
    knows(store, tmp_path / "have")
    find = BlockIndex.find

    def changed(index: BlockIndex, digest: bytes) -> tuple[Path, int] | None:
        with have.open("r+b") as file:
            file.seek(70 * PAGE_BYTES)
            file.write(b"changed")
        return find(index, digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockIndex, "find", changed)
        sender = await sent(store, serve, image(tmp_path / "offered", {"pages-1.img": b"".join(COMMON)}))
    assert sender.chunks_resent == 1
    assert sender.bytes_found == len(COMMON) * PAGE_BYTES - CHUNK_BYTES


async def test_target_that_refuses_for_ever_ends_the_sending(
    serve: Serve, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "take", lambda _move, frame: Answer(Kind.MISSING, frame.sequence, b"\xff" * 8))
    with pytest.raises(Damaged):
        await sent(store, serve, image(tmp_path / "offered", {"pages-1.img": b"".join(COMMON)}))


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("name", ["pages-1.img", "device-1-0"])
@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 200_000), (4096, 8192), (8192, 131_072), (100, 99_999)])
def test_blocks_cover_a_chunk_and_end_at_multiples_of_their_size(name: str, offset: int, length: int) -> None:
    spans = spans_of(name, offset, length)
    assert (spans[0][0], spans[-1][1]) == (offset, offset + length)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert all(end % block_bytes_of(name) == 0 for _, end in spans[:-1])


def _offered(data: bytes) -> Frame:
    message = Offer(raw_frame(7, "pages-1.img", 0, data)).message()
    parsed = parse_header(message.header())
    parsed.payload = message.payload
    return parsed


def test_offer_contains_digests_and_no_content() -> None:
    frame = _offered(b"".join(COMMON[:64]))
    parsed = Offered.parse(frame)
    assert (len(parsed.digests), parsed.contents) == (64, {})
    assert frame.payload_bytes == 64 * 16 + 2 * 8


def test_chunk_of_zeros_is_sent_as_a_hole() -> None:
    assert Offer(raw_frame(7, "pages-1.img", 0, bytes(MIN_OFFER_BYTES))).message().kind is Kind.HOLE


@pytest.mark.parametrize("damage", ["shorter", "longer", "a block twice", "a block beyond the chunk"])
def test_offer_that_contradicts_itself_is_refused(damage: str) -> None:
    frame = _offered(b"".join(COMMON[:60]))
    payload = bytearray(frame.payload)
    match damage:
        case "shorter":
            del payload[-1]
        case "longer":
            payload += b"x"
        case "a block twice":
            payload[8] |= 1
            payload += COMMON[0]
        case _:
            payload[7] |= 0x80
            payload += bytes(16)
    frame.payload = payload
    with pytest.raises(Damaged):
        KnownBlocks().put_together(MOVE, frame)


def test_offer_larger_than_its_chunk_is_refused_before_it_is_read() -> None:
    frame = Frame(Kind.BLOCKS, 1, "pages-1.img", 0, PAGE_BYTES, payload_bytes=3 * PAGE_BYTES, digest=bytes(16))
    with pytest.raises(Damaged):
        parse_header(frame.header())


def test_index_finds_each_of_many_blocks_and_no_others(tmp_path: Path) -> None:
    (path,) = image(tmp_path, {"pages-1.img": b"".join(os.urandom(PAGE_BYTES) for _ in range(3000))})
    index = BlockIndex()
    index.add(path)
    index.add(path)
    assert len(index) == 3000
    data = path.read_bytes()
    for at in range(0, len(data), PAGE_BYTES):
        assert index.find(blocks.block_digest(memoryview(data)[at : at + PAGE_BYTES])) == (path, at)
    assert index.find(bytes(16)) is None


def test_index_is_shared_by_the_moves_of_a_job_and_gone_with_the_last(tmp_path: Path) -> None:
    image(tmp_path / "have", {"pages-1.img": b"".join(COMMON)})
    known = KnownBlocks()
    keys: dict[str, str] = {"m-1": "job", "m-2": "job", "m-3": "another user's"}
    asked: list[str] = []

    def images_for(move: str) -> tuple[str, list[Path]]:
        asked.append(move)
        return keys[move], [tmp_path / "have"] if keys[move] == "job" else []

    known.images_for = images_for

    def found(move: str) -> bool:
        return isinstance(known.put_together(move, _offered(b"".join(COMMON[5:40]))), Frame)

    assert [found(move) for move in keys] == [True, True, False]
    known.forget("m-1")
    shutil.rmtree(tmp_path / "have")
    assert not found("m-2"), "it reads the files, which are gone"
    known.forget("m-2")
    known.forget("m-2")
    known.forget("m-3")
    assert asked == ["m-1", "m-2", "m-3"]
    assert known._shared == {}
    assert known._of == {}


def test_streams_of_one_move_wait_for_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image(tmp_path / "have", {"pages-1.img": b"".join(COMMON)})
    known = KnownBlocks()
    known.images_for = lambda _move: ("job", [tmp_path / "have"])
    add, begun, go_on = BlockIndex.add, threading.Event(), threading.Event()

    def slow(index: BlockIndex, path: Path) -> None:
        begun.set()
        go_on.wait()
        add(index, path)

    monkeypatch.setattr(BlockIndex, "add", slow)
    got: list[Frame | bytes] = []

    def ask() -> None:
        got.append(known.put_together("m-1", _offered(b"".join(COMMON[:20]))))

    streams = [threading.Thread(target=ask) for _ in range(3)]
    streams[0].start()
    begun.wait()
    for other in streams[1:]:
        other.start()
    go_on.set()
    for stream in streams:
        stream.join()
    assert [isinstance(one, Frame) for one in got] == [True] * 3
