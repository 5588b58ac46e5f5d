"""Compares `Tail` with a plain bytes object, with a spool file and with a disk that fills up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.keeper.spool import Spool
from shim.keeper.tail import Tail

steps = st.lists(st.tuples(st.sampled_from(["append", "release", "read"]), st.integers(0, 60)), max_size=60)


def _spool(folder: str, rank_bytes: int = 1 << 20) -> Spool:
    return Spool(folder, rank_bytes, total_bytes=1 << 30, free_bytes=0)


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Spool:
    return _spool(str(tmp_path_factory.mktemp("spool")))


@pytest.mark.parametrize("spools", [False, True])
@given(steps=steps)
def test_tail_holds_the_bytes_between_base_and_end(spool: Spool, steps: list[tuple[str, int]], spools: bool) -> None:
    tail = Tail(7, spool if spools else None, memory_bytes=50)
    written, base = b"", 7
    for action, size in steps:
        if action == "append":
            data = bytes((len(written) + index) % 251 for index in range(size))
            written += data
            tail.append(data)
        elif action == "release":
            base = max(base, min(base + size, 7 + len(written)))
            tail.release(base)
        assert (tail.base, tail.end, len(tail)) == (base, 7 + len(written), 7 + len(written) - base)
        found = b""
        while piece := tail.read(base + len(found), size + 1):
            found += piece
        assert found == written[base - 7 :]
    if base > 7:
        with pytest.raises(ValueError, match="acknowledged"):
            tail.read(base - 1, 1)
    tail.release(tail.end)
    assert not tail.is_full


def test_full_disk_makes_the_tail_full_and_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Tail(0, _spool(str(tmp_path)), memory_bytes=10)
    tail.append(b"0123456789")
    tail.append(b"spooled.")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _no_space)
        tail.append(b"overflow")
    assert (tail.is_full, len(tail)) == (True, 26)
    tail.append(b"later")
    assert [tail.read(0, 99), tail.read(10, 99), tail.read(18, 99)] == [b"0123456789", b"spooled.", b"overflowlater"]
    assert [path.name for path in tmp_path.iterdir()] == ["ledger"], "the spool file has no name"
    tail.release(18)
    assert (tail.is_full, tail.read(18, 99)) == (False, b"overflowlater")


def _no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_tail_without_a_spool_is_full_at_one_megabyte() -> None:
    tail = Tail()
    tail.append(bytes((1 << 20) - 1))
    assert not tail.is_full
    tail.append(b"x")
    assert tail.is_full
