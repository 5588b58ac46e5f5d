"""Processes whose memory a device may write are recognised, by their descriptors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotd.precopy import devices
from snapshotd.precopy.mappings import eligible
from snapshotd.precopy.waiting import Waiting


def test_ordinary_files_pipes_and_terminals_are_harmless(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb"), open("/dev/null", "rb"), open("/dev/zero", "rb"):
        assert devices.writers_of(os.getpid()) == ""


def test_a_file_that_bypasses_the_page_cache_is_found(tmp_path: Path) -> None:
    path = tmp_path / "direct"
    path.touch()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"needs a file system with O_DIRECT: {error}")
    try:
        assert "past the page cache" in devices.writers_of(os.getpid())
    finally:
        os.close(fd)
    assert devices.writers_of(os.getpid()) == ""


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="needs /dev/fuse, and the right to open it")
def test_a_device_is_found() -> None:
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        assert "/dev/fuse" in devices.writers_of(os.getpid())
    finally:
        os.close(fd)


def test_a_process_that_has_ended_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        devices.writers_of(1 << 22)


def test_the_time_that_a_process_waits_is_a_part_of_it() -> None:
    waiting = Waiting([os.getpid(), 1 << 22])
    sum(range(100_000))
    assert 0 <= waiting.part() <= 1


def mapping(first: str, flags: str, anonymous_kib: int = 2048) -> str:
    sizes = f"Rss: 4096 kB\nShared_Clean: 0 kB\nShared_Dirty: 12 kB\nAnonymous: {anonymous_kib} kB\n"
    return f"{first}\n{sizes}VmFlags: {flags} \n"


@pytest.mark.parametrize(
    ("first", "flags", "sent"),
    [
        ("1000-900000 rw-p 00000000 00:00 0 ", "rd wr mr mw me ac", True),
        ("1000-900000 rw-p 00000000 00:00 0                [heap]", "rd wr mr mw me ac", True),
        ("1000-900000 rw-p 00000000 00:00 0                [anon:torch]", "rd wr mr mw me ac", True),
        ("1000-900000 rw-p 00000000 00:00 0 ", "rd wr mr mw me ac uw", True),
        ("1000-900000 rw-p 00000000 00:00 0                [stack]", "rd wr mr mw me gd ac", False),
        ("1000-900000 r--p 00000000 00:00 0 ", "rd mr mw me ac", False),
        ("1000-900000 rw-s 00000000 00:01 7                /dev/zero (deleted)", "rd wr sh mr mw me ms", False),
        ("1000-900000 rw-p 00000000 08:01 7                /usr/lib/x.so", "rd wr mr mw me ac", False),
        *(
            ("1000-900000 rw-p 00000000 00:00 0 ", f"rd wr mr mw me ac {flag}", False)
            for flag in ("lo", "ht", "dc", "wf", "um", "ui")
        ),
    ],
)
def test_only_large_private_anonymous_memory_is_eligible(first: str, flags: str, sent: bool) -> None:
    found = list(eligible(mapping(first, flags).encode()))
    assert [(one.start, one.end, one.shared_bytes, one.tracked) for one in found] == (
        [(0x1000, 0x900000, 12 << 10, "uw" in flags)] if sent else []
    )
    assert not list(eligible(mapping(first, flags, anonymous_kib=1000).encode()))


def test_numbers_do_not_leak_from_one_mapping_into_the_next() -> None:
    text = mapping("1000-2000 rw-p 00000000 00:00 0 ", "rd wr") + "3000-4000 rw-p 00000000 00:00 0 \nVmFlags: rd wr \n"
    assert [one.start for one in eligible(text.encode())] == [0x1000]
