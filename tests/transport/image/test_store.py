"""The store keeps only verified bytes of known moves, and leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import Damaged, Full, NotFound, WrongState
from snapshotd.api.snapshotd_pb2 import ImageFile
from snapshotd.proc.room import Room
from snapshotd.transport.image import sparse_file
from snapshotd.transport.image import store as store_module
from snapshotd.transport.image.chunk_list import Chunks, summary
from snapshotd.transport.image.frame import MAX_FILE_BYTES, PAGE_BYTES, Frame, Kind, data_frame, hole_frame
from snapshotd.transport.image.store import ImageStore
from tests.shim.jobs import until

MOVE = "m-0123456789ab"
OTHER = "m-ba9876543210"


def listed(*frames: Frame) -> list[ImageFile]:
    files: dict[str, Chunks] = {}
    for frame in frames:
        files.setdefault(frame.name, {})[frame.offset] = (frame.length, frame.digest)
    return [summary(name, chunks) for name, chunks in files.items()]


def test_chunks_in_any_order_make_a_complete_file_with_holes(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    data = b"a" * PAGE_BYTES + bytes(3 * PAGE_BYTES) + b"b" * 100
    frames = [
        hole_frame(3, "pages-1.img", len(data), 1 << 24),
        data_frame(2, "pages-1.img", 0, data),
        hole_frame(1, "empty.img", 0, 0),
    ]
    for frame in frames:
        assert store.write(MOVE, frame)
    assert store.seal(MOVE, listed(*frames)) == []
    path = store.path(MOVE) / "pages-1.img"
    assert path.read_bytes() == data + bytes(1 << 24)
    assert path.stat().st_blocks * 512 <= 4 * PAGE_BYTES
    assert (store.path(MOVE) / "empty.img").read_bytes() == b""


def test_images_are_private(store: ImageStore, tmp_path: Path) -> None:
    store.create(MOVE, 1)
    store.write(MOVE, data_frame(1, "a.img", 0, b"secret"))
    modes = [
        path.stat().st_mode & 0o777 for path in (tmp_path / "images", store.path(MOVE), store.path(MOVE) / "a.img")
    ]
    assert modes == [0o700, 0o700, 0o600]


def test_permissions_of_an_existing_directory_are_restricted(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir(mode=0o755)
    ImageStore(tmp_path / "images")
    assert (tmp_path / "images").stat().st_mode & 0o777 == 0o700


def test_damaged_chunk_is_not_written(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    frame = data_frame(1, "a.img", 0, b"whole")
    frame.payload = b"w\x00ole"
    assert not store.write(MOVE, frame)
    assert list(store.path(MOVE).iterdir()) == []


@pytest.mark.parametrize("move", ["m-000000000000", "../etc", "m-0123456789ab/..", "", "m-0123456789AB"])
def test_unknown_move_is_refused_by_every_method(store: ImageStore, move: str) -> None:
    frame = data_frame(1, "a.img", 0, b"x")
    with pytest.raises(NotFound):
        store.write(move, frame)
    with pytest.raises(NotFound):
        store.seal(move, [])
    with pytest.raises(NotFound):
        store.path(move)
    assert not store.sealed(move)


def test_path_is_not_a_valid_move_name(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    for act in (store.drop, lambda move: store.create(move, 1)):
        with pytest.raises(NotFound):
            act("../precious")
    assert (tmp_path / "precious").is_dir()


def test_invalid_names_and_offsets_are_refused(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    for frame in (
        data_frame(1, "../x", 0, b"x"),
        data_frame(1, ".sealed", 0, b"x"),
        data_frame(1, "a.img", MAX_FILE_BYTES, b"x"),
        hole_frame(1, "a.img", 0, MAX_FILE_BYTES + 1),
    ):
        with pytest.raises(Damaged):
            store.write(MOVE, frame)
    assert list(store.path(MOVE).iterdir()) == []


def test_number_of_files_and_chunks_is_limited(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_FILES", 2)
    monkeypatch.setattr(store_module, "MAX_CHUNKS", 3)
    store.create(MOVE, 1 << 20)
    store.write(MOVE, hole_frame(1, "a", 0, 1))
    store.write(MOVE, hole_frame(2, "b", 0, 1))
    with pytest.raises(Damaged, match="more than 2 files"):
        store.write(MOVE, hole_frame(3, "c", 0, 1))
    store.write(MOVE, hole_frame(4, "b", 1, 1))
    with pytest.raises(Damaged, match="more than 3 chunks"):
        store.write(MOVE, hole_frame(5, "b", 2, 1))


def test_write_is_idempotent_and_a_different_chunk_is_damaged(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    frame = data_frame(1, "a.img", 0, b"one")
    assert store.write(MOVE, frame)
    assert store.write(MOVE, frame)
    with pytest.raises(Damaged, match="two different chunks at 0"):
        store.write(MOVE, data_frame(1, "a.img", 0, b"two"))
    assert store.seal(MOVE, listed(frame)) == []
    assert (store.path(MOVE) / "a.img").read_bytes() == b"one"


def test_seal_names_incomplete_files_and_is_idempotent(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    first, second = data_frame(1, "a.img", 0, b"x" * 10), data_frame(2, "a.img", 10, b"y" * 10)
    other, stray = data_frame(3, "b.img", 0, b"z"), data_frame(4, "stray.img", 0, b"z")
    store.write(MOVE, first)
    wanted = listed(first, second, other)
    assert store.seal(MOVE, wanted) == ["a.img", "b.img"]
    assert not store.sealed(MOVE)
    store.write(MOVE, other)
    store.write(MOVE, second)
    assert store.seal(MOVE, [*wanted, *listed(other)]) == ["b.img"]  # named twice
    store.write(MOVE, stray)
    assert store.seal(MOVE, wanted) == ["stray.img"]
    assert store.seal(MOVE, [*wanted, *listed(stray)]) == []
    assert store.seal(MOVE, [*wanted, *listed(stray)]) == []
    assert store.sealed(MOVE)
    with pytest.raises(WrongState, match="already sealed, with a different list"):
        store.seal(MOVE, wanted)


def test_file_that_was_sent_ahead_and_is_not_listed_counts_as_nothing(store: ImageStore) -> None:
    """The source's daemon was restarted since, and sent it again under another name."""
    store.create(MOVE, 1 << 20)
    old, new = data_frame(1, "ahead-1", 0, b"old"), data_frame(2, "ahead-2", 0, b"new")
    stray = data_frame(3, "stray", 0, b"x")
    for frame in (old, new, stray):
        store.write(MOVE, frame)
    assert store.seal(MOVE, listed(new)) == ["stray"]
    assert store.seal(MOVE, listed(new, stray)) == []
    assert {path.name for path in store.path(MOVE).iterdir()} == {"ahead-2", "stray", ".sealed"}


def test_overlapping_chunks_and_gaps_are_not_complete(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    frames = [
        data_frame(1, "gap", 0, b"x" * 10),
        data_frame(2, "gap", 11, b"y"),
        data_frame(3, "lap", 0, b"x" * 10),
        data_frame(4, "lap", 9, b"y"),
    ]
    for frame in frames:
        store.write(MOVE, frame)
    assert store.seal(MOVE, listed(*frames)) == ["gap", "lap"]


def test_nothing_is_written_after_the_seal(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    store.write(MOVE, data_frame(1, "a.img", 0, b"x"))
    assert store.seal(MOVE, listed(data_frame(1, "a.img", 0, b"x"))) == []
    with pytest.raises(WrongState, match="sealed"):
        store.write(MOVE, data_frame(2, "a.img", 1, b"y"))
    with pytest.raises(WrongState, match="sealed"):
        store.create(MOVE, 1)


def test_drop_removes_everything_and_is_idempotent(store: ImageStore, tmp_path: Path) -> None:
    store.create(MOVE, 1 << 20)
    store.create(OTHER, 1 << 20)
    store.write(MOVE, data_frame(1, "a.img", 0, b"x" * 10_000))
    store.write(OTHER, data_frame(1, "a.img", 0, b"x" * 10_000))
    assert store.held_bytes() == 2 * 3 * PAGE_BYTES
    store.drop(MOVE)
    store.drop(MOVE)
    assert [path.name for path in (tmp_path / "images").iterdir()] == [OTHER]
    assert store.held_bytes() == 3 * PAGE_BYTES
    with pytest.raises(NotFound):
        store.write(MOVE, data_frame(2, "a.img", 0, b"x"))


def test_request_for_memory_waits_for_a_drop(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(MOVE, 1 << 20)
    go_on, asked, order = threading.Event(), threading.Event(), []
    remove = shutil.rmtree

    def slow_remove(path: Path) -> None:
        assert go_on.wait(60)
        remove(path)
        order.append("dropped")

    def ask() -> None:
        asked.set()
        store.create(OTHER, 1 << 20)
        order.append("asked")

    monkeypatch.setattr(shutil, "rmtree", slow_remove)
    store.drop_soon(MOVE)
    assert (tmp_path / "images" / MOVE).exists()
    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(60)
    go_on.set()
    asking.join()
    assert order == ["dropped", "asked"]
    assert not (tmp_path / "images" / MOVE).exists()


def test_memory_can_be_asked_for_inside_a_turn_while_another_move_is_created(tmp_path: Path) -> None:
    """`create` waits for the turn inside the store's lock, so a thread that has the turn must not need that lock."""
    room = Room(tmp_path / "room", "node-1")
    store = ImageStore(tmp_path / "images", room=room)
    creating = threading.Thread(target=store.create, args=(MOVE, 1 << 20), daemon=True)

    def ask() -> None:
        with room.turn():
            creating.start()
            until(store._creating.locked, "the store's lock is taken")
            store.room_bytes()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    assert not asking.is_alive()
    creating.join(60)
    assert not creating.is_alive()
    room.close()


def test_failed_drop_is_tried_again(store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create(MOVE, 1 << 20)

    def fails(path: Path) -> None:
        raise PermissionError(1, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails)
        store.drop_soon(MOVE)
        store.dropped()
    assert (tmp_path / "images" / MOVE).exists()
    store.dropped()
    store.dropped()
    assert not (tmp_path / "images" / MOVE).exists()


def test_drop_waits_for_the_chunk_being_written(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create(MOVE, 1 << 20)
    writing, go_on, order = threading.Event(), threading.Event(), []
    put = sparse_file.put

    def slow_put(path: Path, frame: Frame, *, replaces: bool) -> None:
        writing.set()
        assert go_on.wait(60)
        put(path, frame, replaces=replaces)
        order.append("written")

    def drop() -> None:
        store.drop(MOVE)
        order.append("dropped")

    monkeypatch.setattr(store_module, "put", slow_put)
    writer = threading.Thread(target=store.write, args=(MOVE, data_frame(1, "a.img", 0, b"x")))
    dropper = threading.Thread(target=drop)
    writer.start()
    assert writing.wait(60)
    dropper.start()
    while not store._receiving[MOVE].closed:
        pass
    with pytest.raises(WrongState):
        store.write(MOVE, data_frame(2, "b.img", 0, b"x"))
    go_on.set()
    writer.join(60)
    dropper.join(60)
    assert order == ["written", "dropped"]
    with pytest.raises(NotFound):
        store.path(MOVE)


def test_restarted_daemon_recognises_sealed_images_and_replaces_partial_ones(store: ImageStore, tmp_path: Path) -> None:
    frame = data_frame(1, "a.img", 0, b"x")
    for move in (MOVE, OTHER):
        store.create(move, 1 << 20)
        store.write(move, frame)
    store.seal(MOVE, listed(frame))
    (tmp_path / "images" / "lost+found").mkdir()

    again = ImageStore(tmp_path / "images")
    assert again.path(MOVE).is_dir()
    assert again.path(OTHER).is_dir()
    assert again.sealed(MOVE)
    assert again.seal(MOVE, listed(frame)) == []
    assert (again.path(MOVE) / "a.img").read_bytes() == b"x"
    assert not again.sealed(OTHER)
    with pytest.raises(NotFound):
        again.write(OTHER, frame)
    again.create(OTHER, 1 << 20)  # starts from nothing
    assert list(again.path(OTHER).iterdir()) == []
    assert again.path(MOVE).is_dir()
    again.drop(MOVE)
    with pytest.raises(NotFound):
        again.path(MOVE)
    assert not (tmp_path / "images" / MOVE).exists()


def test_memory_is_reserved_only_once(store: ImageStore) -> None:
    free_bytes = store.capacity_bytes()
    with pytest.raises(Full, match="MiB are free"):
        store.create(MOVE, 2 * free_bytes)
    store.create(MOVE, free_bytes * 2 // 3)
    store.create(MOVE, free_bytes * 2 // 3)  # the same move: reserved already
    with pytest.raises(Full):
        store.create(OTHER, free_bytes * 2 // 3)
    store.drop(MOVE)
    store.create(OTHER, free_bytes * 2 // 3)


def test_memory_for_device_files_is_reserved_until_they_use_it(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes, blob = 100 << 20, b"x" * (40 << 20)
    store.create(MOVE, 60 << 20)
    monkeypatch.setattr(store, "_free_bytes", lambda: free_bytes)
    for _ in range(2):  # opening a channel again reserves nothing more
        store.set_aside(MOVE, ["device-1-0"], len(blob))
        assert store.room_bytes() == 40 << 20
    stripe = store.path(MOVE) / "device-1-0"
    stripe.write_bytes(blob)
    free_bytes -= len(blob)
    assert store.room_bytes() == 40 << 20
    stripe.unlink()  # it arrives with the image instead
    free_bytes += len(blob)
    assert store.room_bytes() == 40 << 20
    free_bytes = 40 << 20
    for number in range(5):  # its own memory
        assert store.write(MOVE, data_frame(number, "follow-device-1-0", number << 23, b"x" * (8 << 20)))
        free_bytes -= 8 << 20


def test_memory_for_rings_is_reserved_where_no_device_memory_was_expected(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_free_bytes", lambda: 100 << 20)
    store.create(MOVE, 30 << 20)
    with pytest.raises(Full, match="80 MiB more for its device memory, 70 MiB are free"):
        store.set_aside(MOVE, ["device-1-0"], 80 << 20, rings=True)
    for _ in range(2):
        store.set_aside(MOVE, ["device-1-0"], 60 << 20, rings=True)
        assert store.room_bytes() == 10 << 20


def test_memory_for_whole_device_files_is_reserved_where_only_rings_were(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_free_bytes", lambda: 100 << 20)
    store.create(MOVE, 30 << 20, rings_bytes=10 << 20)
    store.set_aside(MOVE, ["device-1-0"], 10 << 20)
    assert store.room_bytes() == 70 << 20
    with pytest.raises(Full, match="80 MiB more for its device memory, 70 MiB are free"):
        store.set_aside(MOVE, ["device-1-0"], 90 << 20)
    assert store.room_bytes() == 70 << 20
    for _ in range(2):
        store.set_aside(MOVE, ["device-1-0"], 50 << 20)
        assert store.room_bytes() == 30 << 20


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.root
def test_full_store_is_reported(small_tmpfs: Path) -> None:
    store = ImageStore(small_tmpfs)
    with pytest.raises(Full):
        store.create(OTHER, 2 << 20)
    store.create(MOVE, 1 << 19)
    assert store.write(MOVE, data_frame(1, "a.img", 0, b"x" * (1 << 19)))
    assert store.write(
        MOVE, data_frame(2, "a.img", 1 << 19, b"x" * (1 << 17))
    )  # more than reserved, but there is memory
    with pytest.raises(Full, match="needs more than its"):
        store.write(MOVE, data_frame(3, "a.img", 1 << 20, b"x" * (1 << 20)))
    (small_tmpfs / "another").write_bytes(b"x" * (1 << 18))
    store.create(OTHER, 1 << 16)
    (small_tmpfs / "another-too").write_bytes(b"x" * 100_000)
    with pytest.raises(Full, match="No space left on device"):
        store.write(OTHER, data_frame(1, "a.img", 0, b"x" * (1 << 16)))
    store.drop(OTHER)
    store.drop(MOVE)
    assert store.held_bytes() == 0


def test_hole_writes_nothing() -> None:
    assert list(hole_frame(1, "a", 0, 10).runs()) == []
    assert list(Frame(Kind.DATA, 1, "a", 0, 10, payload_bytes=10).runs()) == [(0, 10)]


def test_chunk_that_is_put_into_a_file_brings_nothing_else_along(tmp_path: Path) -> None:
    """Though the file ends before it: what is between its pages is zero, and not what was in that memory before."""
    page = b"x" * 4096
    every_other = sum(1 << number for number in range(0, 64, 2))
    frame = Frame(
        *(Kind.DATA, 1, "ahead-pages-7-1.img.2", 0, 64 * 4096),
        bitmap=every_other.to_bytes(8, "little"),
        payload_bytes=32 * 4096,
        payload=page * 32,
    )
    (tmp_path / "file").write_bytes(b"y" * 3 * 4096)
    sparse_file.put(tmp_path / "file", frame, replaces=True)
    found = (tmp_path / "file").read_bytes()
    assert found == page + b"y" * 4096 + (page + bytes(4096)) * 31
