"""Images for which there is no memory lie on a disk: all of one in one place, found again by the next daemon, gone after a
boot. A disk that fails keeps nobody waiting."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import BadConfig, Full, Internal, NotFound
from snapshotd.proc import host
from snapshotd.proc.room import Room
from snapshotd.transport.image import spill
from snapshotd.transport.image.frame import data_frame
from snapshotd.transport.image.spill import KEY, SpillDisk, SpillingStore
from tests.shim.jobs import until
from tests.transport.image.test_store import MOVE, OTHER, listed

pytestmark = pytest.mark.root

FRAME = data_frame(1, "a.img", 0, b"x" * 5000)
MEMORY_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def disk_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests may be in memory."""
    monkeypatch.setattr(host, "is_ram_backed", lambda _path: False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def disk(folder: Path) -> Iterator[SpillDisk]:
    disk = SpillDisk(folder)
    yield disk
    disk.close()


@pytest.fixture
def store(tmp_path: Path, disk: SpillDisk, monkeypatch: pytest.MonkeyPatch) -> SpillingStore:
    store = SpillingStore(tmp_path / "images", disk)
    monkeypatch.setattr(store, "_free_bytes", lambda: MEMORY_BYTES)
    return store


def sealed(store: SpillingStore, move: str = MOVE, size_bytes: int = 2 * MEMORY_BYTES) -> Path:
    store.create_kept(move, size_bytes)
    assert store.write(move, FRAME)
    assert store.seal(move, listed(FRAME)) == []
    return store.path(move)


def test_memory_is_used_first_and_the_disk_for_what_has_no_room(
    store: SpillingStore, folder: Path, tmp_path: Path
) -> None:
    assert sealed(store, OTHER, MEMORY_BYTES // 2) == tmp_path / "images" / OTHER
    assert not store.on_disk(OTHER)
    store.create_kept(MOVE, 2 * MEMORY_BYTES)
    store.create_kept(MOVE, 2 * MEMORY_BYTES)  # idempotent
    assert store.reserved_bytes() == 0, "of the memory"
    assert store.write(MOVE, FRAME)
    assert store.seal(MOVE, listed(FRAME), sync=False) == []
    store.sync(MOVE)
    assert store.sealed(MOVE)
    assert store.moves() == {MOVE, OTHER}
    path = store.path(MOVE)
    assert path == folder / MOVE
    assert (path / "a.img").read_bytes() == b"x" * 5000
    assert {entry.stat().st_mode & 0o777 for entry in (folder, path)} == {0o700}
    assert {entry.stat().st_mode & 0o777 for entry in path.iterdir()} == {0o600}
    store.drop(MOVE)
    assert store.moves() == {OTHER}
    with pytest.raises(NotFound):
        store.path(MOVE)
    until(lambda: not path.exists())


def test_move_that_is_not_kept_never_goes_to_the_disk(store: SpillingStore, folder: Path) -> None:
    with pytest.raises(Full):
        store.create(MOVE, 2 * MEMORY_BYTES)
    assert not (folder / MOVE).exists()


def test_place_is_chosen_for_the_whole_image(store: SpillingStore) -> None:
    assert not store.spill(MOVE, MEMORY_BYTES)
    assert store.moves() == set()
    assert store.spill(MOVE, MEMORY_BYTES + 1)
    store.create_kept(MOVE, 1)  # what is left beside device memory: it has its place
    assert store.on_disk(MOVE)


def test_refusal_has_the_numbers_and_names_the_setting(
    tmp_path: Path, store: SpillingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.disk is not None
    monkeypatch.setattr(store.disk, "_free_bytes", lambda: 3 * MEMORY_BYTES)
    with pytest.raises(Full, match=r"4 MiB for its images, 1 MiB are free; in .*/disk, .* 4 MiB .*, 3 MiB are free"):
        store.create_kept(MOVE, 4 * MEMORY_BYTES)
    store.create_kept(MOVE, 2 * MEMORY_BYTES)
    with pytest.raises(Full, match=r"1 MiB are free$"):  # the rest is reserved
        store.create_kept(OTHER, 2 * MEMORY_BYTES)
    for disk_less, text in (
        (SpillingStore(tmp_path / "more"), "are free"),
        (SpillingStore(tmp_path / "more", None, "it is read-only"), f"{KEY} is not used: it is read-only"),
    ):
        monkeypatch.setattr(disk_less, "_free_bytes", lambda: MEMORY_BYTES)
        assert not disk_less.spill(MOVE, 1 << 40)
        with pytest.raises(Full, match=text) as refused:
            disk_less.create_kept(MOVE, 2 * MEMORY_BYTES)
        assert KEY in refused.value.advice
        assert disk_less.disk_room_bytes() == 0


def test_room_that_was_promised_to_later_files_is_not_given_away(
    store: SpillingStore, disk: SpillDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_free_bytes", lambda: 3 * MEMORY_BYTES)
    sealed(store)
    left = [2 * MEMORY_BYTES]
    store.promise(MOVE, lambda: left[0])
    assert store.disk_room_bytes() == MEMORY_BYTES
    assert store.room_bytes() == MEMORY_BYTES
    left[0] = 0
    assert store.disk_room_bytes() == 3 * MEMORY_BYTES
    left[0] = MEMORY_BYTES
    store.drop(MOVE)
    assert store.disk_room_bytes() == 3 * MEMORY_BYTES


def test_room_in_memory_that_was_promised_is_not_given_away(tmp_path: Path) -> None:
    room = Room(tmp_path / "room", "a")
    store = SpillingStore(tmp_path / "images", room=room)
    store.create_kept(MOVE, MEMORY_BYTES)
    store.promise(MOVE, lambda: 7 << 20)
    assert room.free().reserved_bytes == (7 << 20) + MEMORY_BYTES
    store.withdraw(MOVE)
    assert room.free().reserved_bytes == MEMORY_BYTES
    room.close()


# ---------------------------------------------------------------- restarts and boots


def test_next_daemon_finds_the_images_and_one_after_a_boot_removes_them(
    tmp_path: Path, store: SpillingStore, disk: SpillDisk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed(store)
    store.create_kept(OTHER, 2 * MEMORY_BYTES)
    disk.close()
    (folder / "lost+found").mkdir()
    second = SpillDisk(folder)
    again = SpillingStore(tmp_path / "images", second)
    assert again.sealed(MOVE)
    assert again.on_disk(OTHER)
    assert not again.sealed(OTHER), "it was never whole"
    second.close()
    monkeypatch.setattr(host, "boot_id", lambda: "0" * 36)
    third = SpillDisk(folder)
    assert third.moves() == set()
    assert {path.name for path in folder.iterdir()} == {".boot", "lost+found"}
    third.close()


def test_daemon_that_is_killed_while_it_removes_images_of_before_a_boot_is_followed_by_one_that_goes_on(
    folder: Path, disk: SpillDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for move in (MOVE, OTHER):
        disk.create(move, 1)
    disk.close()
    monkeypatch.setattr(host, "boot_id", lambda: "0" * 36)
    remove = shutil.rmtree

    def killed(path: str) -> None:
        remove(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            SpillDisk(folder)
    assert len(list(folder.glob("m-*"))) == 1
    following = SpillDisk(folder)
    assert following.moves() == set()
    assert not list(folder.glob("m-*"))
    following.close()


def test_directory_of_another_daemon_is_not_used(folder: Path, disk: SpillDisk) -> None:
    with pytest.raises(BadConfig, match="used by another daemon"):
        SpillDisk(folder)
    disk.close()
    SpillDisk(folder).close()


def test_directory_that_is_not_fit_for_images_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("full", "foreign", "open/disk", "empty"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "full" / "thesis.txt").touch()
    os.chown(tmp_path / "foreign", 1, 1)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    expected = {
        "none": "No such file",
        "file": "not a directory",
        "link": "not a directory",
        "full": "not empty",
        "foreign": "another user",
        "open/disk": "users may replace",
        "empty": "",
    }
    for name, text in expected.items():
        found = spill.problem(tmp_path / name)
        assert text in found
        assert bool(text) == bool(found), found
        if text:
            with pytest.raises(BadConfig):
                SpillDisk(tmp_path / name)
    assert (tmp_path / "full" / "thesis.txt").exists()
    monkeypatch.setattr(host, "is_ram_backed", lambda _path: True)
    assert "in memory" in spill.problem(tmp_path / "empty")


# ---------------------------------------------------------------- disks that fail


@pytest.fixture
def make_read_only(folder: Path, disk: SpillDisk) -> Iterator[Callable[[], None]]:
    """A function that makes the disk's directory read-only. Files that are already open stay writable."""
    with contextlib.ExitStack() as after:

        def make() -> None:
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            after.callback(lambda: subprocess.run(["umount", folder], check=True))
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

        yield make


def test_read_only_disk_refuses_images_and_keeps_nobody_waiting(
    store: SpillingStore, folder: Path, make_read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = sealed(store)
    store.create_kept(OTHER, 2 * MEMORY_BYTES)
    make_read_only()
    assert "read-only" in spill.problem(folder)
    with pytest.raises(Internal, match="Read-only file system") as failed:
        store.write(OTHER, FRAME)
    assert "check the disk" in failed.value.advice
    with pytest.raises(Full, match="Read-only file system"):
        store.create_kept("m-000000000003", 2 * MEMORY_BYTES)
    for move in (MOVE, OTHER):
        store.drop(move)
    assert store.moves() == set()
    until(lambda: caplog.text.count("are still in") == 2)
    subprocess.run(["mount", "-o", "remount,bind,rw", folder], check=True)
    assert path.exists()
    store.create_kept("m-000000000003", 2 * MEMORY_BYTES)
    until(lambda: [one.name for one in folder.glob("m-*")] == ["m-000000000003"])


def test_image_does_not_count_if_the_disk_has_lost_it(store: SpillingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_kept(MOVE, 2 * MEMORY_BYTES)
    store.write(MOVE, FRAME)

    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        with pytest.raises(Internal, match="Input/output error"):
            store.seal(MOVE, listed(FRAME))
        assert store.seal(MOVE, listed(FRAME), sync=False) == []
        with pytest.raises(Internal, match="Input/output error"):
            store.sync(MOVE)
    store.sync(MOVE)


def test_full_disk_is_reported_and_free_again_when_the_image_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", folder], check=True)
    try:
        disk = SpillDisk(folder)
        store = SpillingStore(tmp_path / "images", disk)
        monkeypatch.setattr(store, "_free_bytes", lambda: 0)
        store.create_kept(OTHER, 1 << 20)
        store.write(OTHER, FRAME)
        assert store.seal(OTHER, listed(FRAME)) == []
        store.create_kept(MOVE, 3 << 20)
        (folder / "of-somebody-else").write_bytes(bytes(3 << 20))
        with pytest.raises(Full, match="is full"):
            store.write(MOVE, data_frame(1, "a.img", 0, b"x" * (2 << 20)))
        store.drop(MOVE)
        until(lambda: not (folder / MOVE).exists())
        assert (store.path(OTHER) / "a.img").read_bytes() == b"x" * 5000, "the one before is kept"
        (folder / "of-somebody-else").unlink()
        store.create_kept("m-000000000003", 3 << 20)
        disk.close()
    finally:
        subprocess.run(["umount", folder], check=True)
