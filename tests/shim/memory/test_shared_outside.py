"""Processes of other ranks get memory while nothing moves, which is noted, and wait for the end of a move."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.proc import cgroup
from snapshotd.proc.cgroup import Cgroup
from tests.shim.memory.conftest import Start
from tests.shim.memory.jobs import DeviceJob
from tests.shim.memory.test_shared_moves import FIRST_WORD, close, reopen, said, share, shared, usual_library

__all__ = ["usual_library"]


@contextlib.contextmanager
def outside(job: DeviceJob) -> Iterator[None]:
    """A rank has a cgroup of its own."""
    if os.geteuid() != 0:
        pytest.skip("a cgroup is made by root")
    home = Cgroup(cgroup.of_process(job.pid))
    group = Cgroup(home.path / f"test-outside-{job.pid}").create()
    group.add(job.pid)
    try:
        yield
    finally:
        home.add(job.pid)
        group.path.rmdir()


def test_rank_whose_memory_another_rank_has_got_does_not_move(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job()
    with outside(guest):
        handle = said(owner, "share 0")
        assert said(guest, f"open {handle}").startswith("0x"), "while nothing moves it is served as any process"
    assert said(guest, "peek") == FIRST_WORD
    assert owner.mailbox().state().shared_outside
    for parked in (False, True):
        if parked:
            owner.park_threads()
        with pytest.raises(GpuFailed, match="of another rank, or of none"):
            shared(owner).attempt()
    owner.release()
    assert owner.do("shrink") == "done"
    assert not owner.mailbox().state().shared_outside, "nothing of what was shared is left"


@pytest.mark.parametrize("moves", [True, False], ids=["closed", "tried"])
def test_other_ranks_wait_for_the_end_of_a_move(start_job: Start, moves: bool) -> None:
    """Between the check and the freeze of the rank no process of another one gets memory."""
    owner, guest, other = start_job("fill 4"), start_job(), start_job()
    share(owner, guest)
    handle = said(owner, "share 0")
    with outside(other):
        if moves:
            close(owner, guest)
        else:
            owner.park_threads()
            shared(owner).attempt()
        other.say(f"open {handle}")
        time.sleep(0.5)
        assert not owner.mailbox().state().shared_outside
        if moves:
            reopen(owner, guest)
        else:
            owner.release()
        assert other.hear().startswith("0x")
    assert owner.mailbox().state().shared_outside
    assert said(other, "peek") == FIRST_WORD
