"""Real processes with the shim: which of their pages are found, and that nothing of the tracking is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.api.errors import SnapshotError
from snapshotd.inprocess.abi import Command
from snapshotd.precopy.messages import PAGE_BYTES
from tests.descriptors import open_links
from tests.kernel import needs_page_scans
from tests.precopy.followed import Copy, Pages
from tests.shim.jobs import stop, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="other processes' memory needs root"),
    needs_page_scans,
]

Follow = Callable[[Pages], Copy]
PAGES = 1024


@pytest.fixture
def copy(job: Pages, follow: Follow) -> Copy:
    """After the first round, with all of mapping a."""
    job.do(f"map a {PAGES}")
    job.do(f"write a 0 {PAGES} 7")
    made = follow(job)
    assert made.pages("a", made.round(), PAGES * PAGE_BYTES) == list(range(PAGES))
    return made


def test_exactly_the_written_pages_are_found(job: Pages, copy: Copy) -> None:
    assert copy.pages("a", copy.round()) == []
    for page in (0, 3, 4, 511, 512, PAGES - 1):
        job.do(f"write a {page} 1 8")
    job.do(f"read a 0 {PAGES}")
    assert copy.pages("a", copy.round()) == [0, 3, 4, 511, 512, PAGES - 1]
    assert copy.pages("a", copy.round()) == []
    job.do("write a 100 20 9")
    stop(job.pid)
    assert copy.pages("a", copy.finish()) == [page for page in range(PAGES) if not 100 <= page < 120]


def test_a_page_that_was_written_after_the_last_round_is_not_below(job: Pages, copy: Copy) -> None:
    job.do("write a 5 1 8")
    copy.tracker.scan()  # its new content was not taken
    stop(job.pid)
    below = copy.pages("a", copy.finish())
    assert below == [page for page in range(PAGES) if page != 5]


def test_memory_that_was_written_here_and_there_is_found_once_and_in_order(job: Pages, follow: Follow) -> None:
    """More ranges than the kernel reports at a time."""
    pages = 40_000
    job.do(f"map a {pages}")
    job.do(f"write a 0 {pages} 7")
    copy = follow(job)
    copy.round()
    job.do(f"comb a 0 {pages} 8")
    assert copy.pages("a", copy.round()) == list(range(0, pages, 2))
    assert copy.scanned < pages * 0.6
    job.do(f"comb a 0 {pages} 9")
    stop(job.pid)
    assert copy.pages("a", copy.finish(), pages * PAGE_BYTES) == list(range(1, pages, 2))


def test_a_huge_page_is_found_by_the_pages_that_were_written(job: Pages, follow: Follow) -> None:
    job.do(f"map a {PAGES} huge")
    job.do(f"write a 0 {PAGES} 7")
    copy = follow(job)
    assert copy.pages("a", copy.round()) == list(range(PAGES))
    job.do("write a 17 2 8")
    assert copy.pages("a", copy.round()) == [17, 18]
    stop(job.pid)
    assert copy.pages("a", copy.finish()) == list(range(PAGES))


def test_zero_pages_are_not_sent_and_pages_that_were_given_back_are_not_below(job: Pages, copy: Copy) -> None:
    job.do("zero a 10 5")
    job.do("forget a 20 5")
    job.do("forget a 30 5")
    job.do("read a 30 5")  # the kernel's zero page
    job.do("forget a 40 5")
    job.do("write a 40 5 3")
    assert copy.pages("a", copy.round()) == list(range(40, 45))
    stop(job.pid)
    gone = {*range(10, 15), *range(20, 25), *range(30, 35)}
    assert copy.pages("a", copy.finish()) == [page for page in range(PAGES) if page not in gone]


def test_a_page_that_becomes_zero_and_then_something_else_is_sent_again(job: Pages, copy: Copy) -> None:
    job.do("zero a 10 1")
    copy.round()
    job.do("write a 10 1 4")
    assert copy.pages("a", copy.round()) == [10]
    stop(job.pid)
    assert 10 in copy.pages("a", copy.finish())


def test_memory_that_is_protected_and_opened_again_stays_tracked(job: Pages, copy: Copy) -> None:
    job.do("protect a 100 50")
    assert copy.pages("a", copy.round()) == []
    job.do("write a 120 2 8")
    assert copy.pages("a", copy.round()) == [120, 121]
    stop(job.pid)
    assert copy.pages("a", copy.finish()) == list(range(PAGES))


def test_unmapped_memory_is_not_below_and_new_memory_in_its_place_is_tracked(job: Pages, copy: Copy) -> None:
    job.do("unmap a 256 512")
    assert copy.pages("a", copy.round()) == []
    job.do("again a 256 512")
    job.do("write a 256 512 5")
    assert copy.pages("a", copy.round()) == list(range(256, 768))
    job.do("unmap a 0 10")
    job.do("again a 20 10")
    job.do("write a 20 3 6")
    stop(job.pid)
    gone = {*range(10), *range(20, 30)}
    assert copy.pages("a", copy.finish()) == [page for page in range(PAGES) if page not in gone]


def test_a_fork_leaves_the_parent_tracked_and_the_child_alone(job: Pages, copy: Copy) -> None:
    child = int(job.do("fork"))
    assert "uw" in job.flags("a")
    assert "uw" not in Path(f"/proc/{child}/smaps").read_text().replace("VmFlags", "").split()
    job.do("write a 9 2 8")
    assert copy.pages("a", copy.round()) == [9, 10]
    os.kill(child, signal.SIGKILL)
    assert copy.pages("a", copy.round()) == []
    stop(job.pid)
    assert copy.pages("a", copy.finish()) == list(range(PAGES))


def test_another_program_is_never_taken_for_the_tracked_one(job: Pages, copy: Copy) -> None:
    job.say("exec")
    until(lambda: os.readlink(f"/proc/{job.pid}/exe") != str(job.popen.args), "exec")
    until(lambda: Path(f"/proc/{job.pid}/comm").read_text() == "sleep\n")
    try:
        assert copy.round() == set()
        assert copy.finish() == set()
    except SnapshotError:
        pass  # the kernel may say that the memory is gone
    assert job.popen.poll() is None


@pytest.mark.parametrize("end", ["finish", "close", "kill"])
def test_nothing_of_the_tracking_is_left(job: Pages, copy: Copy, end: str) -> None:
    assert "uw" in job.flags("a")
    assert job.do("descriptors") == "0"
    if end == "finish":
        stop(job.pid)
        copy.finish()
        assert "uw" not in job.flags("a")
        os.kill(job.pid, signal.SIGCONT)
    elif end == "close":
        copy.tracker.close()
    else:
        os.kill(copy.tracker.child_pid, signal.SIGKILL)
    until(lambda: "uw" not in job.flags("a"), "the kernel has not undone it")
    job.do("write a 0 1024 2")
    assert job.do(f"sum a 0 {PAGES}") == str(2 * PAGES)


def test_a_descriptor_that_no_daemon_took_is_closed_by_the_process_itself(job: Pages) -> None:
    assert job.mailbox().ask(Command.TRACK_OPEN, 5).status == 0
    assert job.do("descriptors") == "1"
    until(lambda: job.do("descriptors") == "0", "it is still open")


def test_a_forked_child_has_no_copy_of_the_descriptor(job: Pages) -> None:
    assert job.mailbox().ask(Command.TRACK_OPEN, 5).status == 0
    child = int(job.do("fork"))
    # The child closes it before its own first instruction, which may be after the parent has answered.
    until(lambda: "anon_inode:[userfaultfd]" not in open_links(child).values())
    assert job.do("descriptors") == "1"
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(("how", "advice"), [("lock", 0), ("madvise", 10), ("madvise", 18)])
def test_locked_memory_and_memory_with_rules_for_forks_is_left_alone(
    job: Pages, follow: Follow, how: str, advice: int
) -> None:
    job.do(f"map a {PAGES}")
    job.do(f"map b {PAGES}")
    job.do(f"write a 0 {PAGES} 7")
    job.do(f"write b 0 {PAGES} 7")
    job.do(f"{how} b {advice}")
    copy = follow(job)
    got = copy.round()
    assert copy.pages("a", got, PAGES * PAGE_BYTES) == list(range(PAGES))
    assert copy.pages("b", got, PAGES * PAGE_BYTES) == []
    assert "uw" not in job.flags("b")
