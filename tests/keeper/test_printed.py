"""Output that a rank which was rolled back prints again is left out as long as it is the same, and no longer."""

from __future__ import annotations

import pytest

from shim.keeper.printed import AHEAD_BYTES, MOST_BYTES, NEW_LINES, Printed


def printed(before: bytes, back_to: int) -> Printed:
    made = Printed()
    made.add(before)
    made.rewind(back_to)
    return made


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_identical_output_is_left_out(piece: int) -> None:
    again = b"step 2\nstep 3\nstep 4\n"
    made = printed(b"step 1\nstep 2\nstep 3\n", 7)
    shown = b"".join(made.take(again[start : start + piece]) for start in range(0, len(again), piece))
    assert shown == b"step 4\n"
    assert made.end == 7 + len(again)


def test_what_was_printed_beyond_the_repeated_output_does_not_swallow_new_output() -> None:
    made = printed(b"step 1\nstep 2\nTraceback: connection reset\n", 7)
    assert made.take(b"step 2\nstep 3\n") == b"step 3\n"
    assert made.take(b"step 4\n") == b"step 4\n"


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_lines_of_a_library_that_is_initialised_again_are_printed_and_the_repetition_goes_on(piece: int) -> None:
    again = b"NCCL version 2\nloss of step 2: 0.5\nloss of step 3: 0.4\nloss of step 4: 0.3\n"
    made = printed(b"loss of step 1: 0.6\nloss of step 2: 0.5\nloss of step 3: 0.4\n", 20)
    shown = b"".join(made.take(again[start : start + piece]) for start in range(0, len(again), piece))
    assert shown == b"NCCL version 2\nloss of step 4: 0.3\n"
    assert made.end == 20 + len(again)


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_lines_that_do_not_come_again_are_skipped(piece: int) -> None:
    again = b"loss of step 2: 0.5\nloss of step 3: 0.4\nloss of step 4: 0.3\n"
    made = printed(b"loss of step 1: 0.6\nNCCL version 2\nloss of step 2: 0.5\nloss of step 3: 0.4\n", 20)
    assert b"".join(made.take(again[at : at + piece]) for at in range(0, len(again), piece)) == b"loss of step 4: 0.3\n"


def test_short_and_frequent_lines_are_not_taken_for_a_repetition() -> None:
    made = printed(b"0\nloss 0.51111\n--\na long separator\nloss 0.4\na long separator\n", 2)
    again = b"loss 0.61111\n--\na long separator\n"
    assert made.take(again) == again


def test_program_that_does_something_else_is_printed_from_then_on() -> None:
    made = printed(b"0\nloss of step 1\nloss of step 2\n", 2)
    other = b"".join(b"another line %d\n" % number for number in range(NEW_LINES + 1))
    assert made.take(other) == other
    assert made.take(b"loss of step 1\n") == b"loss of step 1\n"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_output_in_one_long_line_is_left_out(end: bytes) -> None:
    long = b"x" * (2 * AHEAD_BYTES)
    made = printed(b"0\n" + long + end, 2)
    assert made.take(long[:100]) == b""
    assert made.take(long[100:] + end + b"new") == b"new"


def test_line_that_was_begun_when_the_rank_died_is_continued() -> None:
    made = printed(b"step 1\nstep 2\nstep 3 lo", 7)
    assert made.take(b"step 2\nstep 3 loss 0.5\n") == b"ss 0.5\n"


def test_line_that_begins_like_one_that_was_only_begun_is_printed_whole() -> None:
    made = printed(b"0\nstep 101 (10.1 ms)\nstep 102 (9.9 ms)\nste", 2)
    assert made.take(b"step 101 (11.7 ms)\nstep 102 (9.9 ms)\nstep 103\n") == b"step 101 (11.7 ms)\np 103\n"
    made = printed(b"0\na line that repeats\n[", 2)
    assert made.take(b"[rank0] a new line\na line that repeats\n") == b"[rank0] a new line\n"


def test_line_that_was_only_begun_is_printed_at_the_end() -> None:
    made = printed(b"0\ndone in 3 s\n", 2)
    assert made.take(b"done") == b""
    assert (made.rest(), made.rest()) == (b"done", b"")


def test_second_rollback_after_new_lines() -> None:
    made = printed(b"0\nloss of step 1\nloss of step 2\nloss of step 3\n", 2)
    assert made.take(b"a new line\nloss of step 1\nloss of st") == b"a new line\n"
    made.rewind(2)
    assert made.take(b"a new line\nloss of step 1\nloss of step 2\nloss of step 3\nend\n") == b"end\n"


def test_a_line_that_differs_is_printed_whole() -> None:
    made = printed(b"step 1\nloss 0.51\nstep 3\n", 7)
    assert made.take(b"loss 0.5") == b""
    assert made.take(b"2\nstep 3\n") == b"loss 0.52\nstep 3\n"


def test_second_rollback_to_the_same_snapshot() -> None:
    made = printed(b"a\nb\nerror\n", 2)
    assert made.take(b"b\nc\n") == b"c\n"
    made.rewind(2)
    assert made.take(b"b\nc\nd\n") == b"d\n"


@pytest.mark.parametrize("reached", [b"", b"b\n", b"b\nc", b"b\nc\nd\n"])
def test_second_rollback_before_the_rank_has_caught_up(reached: bytes) -> None:
    made = printed(b"a\nb\nc\nd\n", 2)
    assert made.take(reached) == b""
    made.rewind(2)
    assert made.take(b"b\nc\nd\ne\n") == b"e\n"
    assert made.end == 10


def test_snapshot_of_a_rank_that_has_not_caught_up() -> None:
    made = printed(b"a\nb\nc\nd\n", 2)
    assert made.take(b"b\nc\n") == b""
    made.rewind(4)
    assert made.take(b"c\nd\ne\n") == b"e\n"


def test_output_that_is_not_remembered_is_printed_again() -> None:
    made = Printed()
    made.add(b"x" * (MOST_BYTES + 10))
    made.rewind(5)
    assert made.end == 5
    assert made.take(b"xxx") == b"xxx"


def test_output_that_is_not_left_out_is_known_to_be_repeated() -> None:
    made = Printed()
    made.add(b"step 1\nstep 2\nstep 3\n")
    made.rewind(7, leave_out=False)
    assert (made.is_behind, made.is_repeating) == (True, False)
    assert made.take(b"step 2\n") == b"step 2\n"
    assert (made.is_behind, made.is_repeating) == (True, True)
    assert made.take(b"step 3\n") == b"step 3\n"
    assert (made.is_behind, made.is_repeating) == (False, False)
    assert made.take(b"step 4\n") == b"step 4\n"


def test_output_that_differs_is_not_a_repetition() -> None:
    made = Printed()
    made.add(b"step 1\nTraceback ...\nKilled\n")
    made.rewind(7, leave_out=False)
    assert made.take(b"step 2\n") == b"step 2\n"
    assert not made.is_repeating
