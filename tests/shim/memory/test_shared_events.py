"""Events that processes share: CUDA's own, except in the library that moves what is shared, where they are complete."""

from __future__ import annotations

import time

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.cuda.driver import Gpus
from tests.shim.memory.conftest import Start
from tests.shim.memory.test_shared_moves import checkpoint, gpus, said, usual_library

__all__ = ["gpus", "usual_library"]

NOT_READY = "600"
INTERPROCESS = 2 | 4  # such events cannot measure time
BUSY_MS = 400


async def test_shared_event_is_complete_and_nothing_of_it_hinders_the_driver(start_job: Start, gpus: Gpus) -> None:
    owner, guest = start_job("fill 4", f"event {INTERPROCESS}"), start_job()
    assert owner.do(f"record-behind {BUSY_MS}") == "done"
    assert said(owner, "event-done") == NOT_READY, "it is not exported yet"
    began = time.monotonic()
    handle = said(owner, "share-event")
    assert time.monotonic() - began > BUSY_MS / 2000
    assert said(guest, f"open-event {handle}") == "0"
    assert said(guest, "event-done") == "0"
    assert (owner.mailbox().state().exports, guest.mailbox().state().imports) == (0, 0)
    assert owner.do(f"record-behind {BUSY_MS}") == "done"
    assert said(owner, "event-done") == "0", "a record is waited for, because a guest may wait for it"
    assert guest.do(f"record-behind {BUSY_MS}") == "done"
    assert said(guest, "event-done") == "0", "it may record it, too"
    for job in (owner, guest):
        job.park_threads()
        await checkpoint(gpus, job)
        job.release()
        assert job.do("no-event") == "done"


def test_events_of_one_process_are_cudas_own(start_job: Start) -> None:
    job = start_job("event 2")
    assert said(job, "share-event") == "error-1"
    assert job.do(f"record-behind {BUSY_MS}") == "done"
    assert said(job, "event-done") == NOT_READY


@pytest.mark.parametrize("chosen", ["driver", "offload"])
async def test_events_of_other_libraries_are_cudas_own_and_counted(start_job: Start, gpus: Gpus, chosen: str) -> None:
    job = start_job("fill 4", f"event {INTERPROCESS}", device_memory=chosen)
    handle = said(job, "share-event")
    assert len(handle) == 128
    assert job.mailbox().state().exports == 1
    with pytest.raises(GpuFailed, match="CUDA_ERROR_NOT_SUPPORTED"):
        await checkpoint(gpus, job)


@pytest.mark.parametrize("chosen", ["driver", "offload"])
def test_other_libraries_wait_for_no_event(start_job: Start, chosen: str) -> None:
    """What the work depends on may come after the call: a wait in the job's thread could last for ever."""
    job = start_job(f"event {INTERPROCESS}", device_memory=chosen)
    for _ in range(2):
        assert job.do(f"record-behind {BUSY_MS}") == "done"
        assert said(job, "event-done") == NOT_READY
        assert len(said(job, "share-event")) == 128
        assert said(job, "event-done") == NOT_READY


def test_record_that_is_captured_through_the_driver_is_not_waited_for(start_job: Start) -> None:
    """It becomes part of a graph; waiting would invalidate the capture."""
    job = start_job(f"event {INTERPROCESS}")
    assert len(said(job, "share-event")) == 128
    assert job.do("driver-capture") == "done"
    assert job.do(f"record-behind {BUSY_MS}") == "done"
    assert said(job, "event-done") == NOT_READY
    assert job.do("driver-captured") == "done"
    assert job.do(f"record-behind {BUSY_MS}") == "done"
    assert said(job, "event-done") == "0"


def test_destroyed_event_is_forgotten(start_job: Start) -> None:
    """Another event gets its address, and is not waited for."""
    job = start_job(f"event {INTERPROCESS}")
    assert len(said(job, "share-event")) == 128
    assert job.do("no-event") == "done"
    assert job.do("event 2") == "done"
    assert job.do(f"record-behind {BUSY_MS}") == "done"
    assert said(job, "event-done") == NOT_READY
