"""After a rollback a guest keeper is behind its home keeper: what the launcher has seen is not repeated, and all goes on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from shim.keeper.frames import Frame
from shim.keeper.relay import BEGIN_MARK, END_MARK, MARK, PASS, SUPPRESS, GuestEnd, HomeEnd
from shim.keeper.tail import Tail


class Ends:
    """A home keeper that has written 10 bytes of output, had 5 of input and 2 signals acknowledged; and a guest keeper from
    a snapshot that is older than that."""

    def __init__(self, written: int = 10) -> None:
        loop: Any = SimpleNamespace(after=lambda seconds, work: None)
        self.out, self.keyboard = Tail(written), Tail(5)
        self.home = HomeEnd(loop, {"1": self.out}, self.keyboard, self._to_guest)
        for number in (10, 12):
            self.home.signal(number)
        self.home._forget_signals(2)
        self.delivered: list[int] = []
        self.fed: list[bytes] = []
        stdio: Any = SimpleNamespace(
            tails={"1": Tail(4)},
            in_offset=1,
            in_written=1,
            is_handed_over=False,
            feed=self._feed,
            shut=lambda name: None,
        )
        self.stdio = stdio
        self.guest = GuestEnd(loop, stdio, self._to_home, self.delivered.append)
        self.guest.last_signal_id = 1
        self.home.open()
        self.guest.open()

    def _feed(self, data: bytes) -> None:
        self.fed.append(data)
        self.stdio.in_offset += len(data)

    def _to_guest(self, kind: str, fields: dict[str, Any] | None = None, payload: bytes = b"") -> bool:
        if hasattr(self, "guest"):
            self.guest.receive(Frame({"t": kind, **(fields or {})}, payload))
        return True

    def _to_home(self, kind: str, fields: dict[str, Any] | None = None, payload: bytes = b"") -> bool:
        self.home.receive(Frame({"t": kind, **(fields or {})}, payload))
        return True


def test_output_that_was_printed_before_the_rollback_is_left_out() -> None:
    ends = Ends()
    ends.stdio.tails["1"].append(b"456")
    ends.guest.pump()
    assert len(ends.out) == 0
    ends.stdio.tails["1"].append(b"789abc")
    ends.guest.pump()
    assert ends.out.read(10, 100) == b"abc"


@pytest.mark.parametrize("stale", [["ack"], ["sync", "ack"], ["sig"], ["sync", "sig"]])
def test_frames_that_were_meant_for_the_former_copy_do_no_harm(stale: list[str]) -> None:
    """They waited in a daemon for a connection to the rank's node. With their offsets, output that had not been sent counted
    as written, and nothing arrived ever after."""
    ends = Ends(0)
    ends.home._printed["1"].add(b"1\n2\n3\n")
    ends.stdio.tails["1"] = Tail(2)
    ends.guest = GuestEnd(ends.guest._loop, ends.stdio, ends._to_home, ends.delivered.append)
    ends.guest.run = "m-0123456789ab"
    ends.stdio.tails["1"].append(b"2\n3\n")
    frames: dict[str, dict[str, Any]] = {"sync": {"out": {"1": 6}, "shut": [], "run": ""}, "ack": {"c": "1", "o": 6}}
    frames["sig"] = {"n": 15, "id": 1}
    for kind in stale:
        ends.guest.receive(Frame({"t": kind, **frames[kind]}, b""))
    ends.guest.open()
    ends.guest.pump()
    ends.stdio.tails["1"].append(b"4\n")
    ends.guest.pump()
    assert ends.out.read(0, 100) == b"4\n"
    assert ends.delivered == [], "the former copy has had it, and said so"
    ends.out.release(2)  # written to the launcher's stdout
    ends.home.pump()
    assert ends.guest.is_settled


def test_rank_that_moves_after_a_rollback_is_in_sync() -> None:
    ends = Ends(0)
    ends.guest.run = "m-0123456789ab"
    ends.guest.sync()
    ends.guest = GuestEnd(ends.guest._loop, ends.stdio, ends._to_home, ends.delivered.append)  # by a move: no rollback
    ends.guest.open()
    assert ends.guest._is_synced


def test_new_input_and_signals_arrive_after_a_rollback() -> None:
    ends = Ends()
    ends.home.signal(15)
    ends.keyboard.append(b"typed")
    ends.home.pump()
    assert (ends.delivered, ends.fed) == ([15], [b"typed"])


def rolled_back(
    default: str, asked: str = "", again: Sequence[bytes] = (b"2\n", b"3\n", b"4\n")
) -> tuple[bytes, list[str]]:
    """What a home keeper prints after a rollback to a snapshot that was taken after the first of three lines, and says."""
    ends = Ends(0)
    ends.home.replayed, said = default, list[str]()
    ends.home.say = said.append
    ends.home._printed["1"].add(b"1\n2\n3\n")
    ends.stdio.tails["1"] = Tail(2)
    ends.guest._begins, ends.guest._sent = {"1": 2}, {"1": 2}
    ends.guest.run, ends.guest.replayed = "m-0123456789ab", asked
    ends.guest.sync()
    shown = b""
    for line in again:
        before = len(ends.out)
        ends.stdio.tails["1"].append(line)
        ends.guest.pump()
        fresh = ends.out.read(ends.out.base + before, 100)
        said.append(fresh.decode())
        shown += fresh
    return shown, said


def test_repeated_output_is_left_out_marked_or_printed() -> None:
    assert rolled_back(SUPPRESS) == (b"4\n", ["", "", "4\n"])
    assert rolled_back(PASS) == (b"2\n3\n4\n", ["2\n", "3\n", "4\n"])
    assert rolled_back(MARK) == (b"2\n3\n4\n", [BEGIN_MARK, "2\n", END_MARK, "3\n", "4\n"])


def test_new_lines_between_repeated_ones_are_printed_and_not_marked() -> None:
    again = (b"2\n", b"a new line\n", b"3\n", b"4\n")
    assert rolled_back(SUPPRESS, again=again)[0] == b"a new line\n4\n"
    shown, said = rolled_back(MARK, again=again)
    assert shown == b"".join(again)
    assert said == [BEGIN_MARK, "2\n", END_MARK, "a new line\n", "3\n", "4\n"]


def test_rollback_may_say_what_is_done_with_repeated_output() -> None:
    assert rolled_back(SUPPRESS, PASS) == rolled_back(PASS)
    assert rolled_back(PASS, SUPPRESS) == rolled_back(SUPPRESS)
    assert rolled_back(MARK, "nonsense") == rolled_back(MARK)
