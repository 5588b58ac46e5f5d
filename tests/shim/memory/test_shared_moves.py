"""Memory that processes share is closed before a checkpoint of the driver, and opened again at the same addresses."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.cuda.driver import Gpus
from snapshotd.inprocess.devmem import Caught
from snapshotd.inprocess.sharing import OwnerGone, Shared
from tests.descriptors import open_links
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import STUCK_S
from tests.shim.memory.conftest import Room, Start
from tests.shim.memory.jobs import MIB, OFFLOAD, SLOT_BYTES, STRIPES, DeviceJob
from tests.shim.memory.test_holding import Held, hand_over, holding, own, take_back
from tests.shim.memory.test_with_the_driver import caught_at_the_lock

FIRST_WORD = str(1 << 32)


@pytest.fixture
def usual_library() -> str:
    return "shared"


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.close()


@pytest.fixture
async def gpus(node: GpuNode) -> AsyncIterator[Gpus]:
    gpus = Gpus(node.library_dir)
    yield gpus
    await gpus.close()


def said(job: DeviceJob, line: str) -> str:
    return job.do(line).removesuffix("done").strip()


def shared(job: DeviceJob) -> Shared:
    return Shared(job.mailbox())


def share(owner: DeviceJob, *guests: DeviceJob) -> list[str]:
    """The address of the owner's first block in each guest."""
    handle = said(owner, "share 0")
    return [said(guest, f"open {handle}") for guest in guests]


def close(*jobs: DeviceJob) -> None:
    """As for a move: everything is tried while the jobs run, and again when they are parked."""
    for job in jobs:
        shared(job).attempt()
        if not job.mailbox().state().parked:
            job.park_threads()
    for job in jobs:
        shared(job).attempt()
    for job in jobs:
        shared(job).close()


def reopen(*jobs: DeviceJob) -> None:
    for job in jobs:
        shared(job).offer()
    for job in jobs:
        shared(job).open()
    for job in jobs:
        assert not job.mailbox().state().shared_closed
        job.release()


def descriptors(job: DeviceJob) -> list[str]:
    return [link for link in open_links(job.pid).values() if "zero" in link]


async def checkpoint(gpus: Gpus, job: DeviceJob) -> None:
    """The driver's part of a move. With memory of another process it cannot be restored."""
    await gpus.lock(job.process, STUCK_S)
    await gpus.checkpoint(job.process, STUCK_S)
    await gpus.restore(job.process, (), STUCK_S)
    await gpus.unlock(job.process, STUCK_S)


def write_and_compare(owner: DeviceJob, guests: list[DeviceJob], addresses: list[str]) -> None:
    """Every process sees what another one writes, and at the former addresses."""
    handle = said(owner, "share 0")
    for guest, address in zip(guests, addresses, strict=True):
        assert said(guest, f"open {handle}") == address
    for number, guest in enumerate(guests):
        assert guest.do(f"poke {number + 7}") == "done"
        assert [said(other, "peek") for other in guests] == [str(number + 7)] * len(guests)
    assert owner.do("check").endswith("differ")


async def test_guests_find_what_the_owner_has_after_its_memory_was_in_files(start_job: Start, gpus: Gpus) -> None:
    owner, guests = start_job("fill 4", "fill 8"), [start_job("fill 2"), start_job()]
    addresses = share(owner, *guests)
    assert owner.state().bytes == 12 * MIB, "what is shared is offloaded, too"
    owner.ready()
    close(owner, *guests)
    owner.ask(OFFLOAD)
    for job in (owner, *guests):
        assert not descriptors(job)
        await checkpoint(gpus, job)
    owner.fill()
    reopen(owner, *guests)
    assert [said(guest, "peek") for guest in guests] == [FIRST_WORD] * 2
    write_and_compare(owner, guests, addresses)
    assert guests[0].do("check") == "same"


@pytest.mark.parametrize("owned", [True, False], ids=["its-own", "imported"])
async def test_guests_find_what_the_owner_took_back(start_job: Start, held: Held, gpus: Gpus, owned: bool) -> None:
    """Also what it has not made its own, and cannot export: the guests get the descriptor that it came with."""
    owner, guests = start_job("fill 4", "fill 8"), [start_job(), start_job()]
    addresses = share(owner, *guests)
    for again in range(2):
        close(*guests)
        hand_over(owner, held)
        for job in (owner, *guests):
            assert not descriptors(job)
            await checkpoint(gpus, job)
        take_back(owner, held)
        if owned:
            own(owner)
        for fd in held.fds:
            os.close(fd)
        held.fds.clear()
        held.blocks.clear()
        reopen(owner, *guests)
        expected = FIRST_WORD if not again else "8"
        assert [said(guest, "peek") for guest in guests] == [expected] * 2
        write_and_compare(owner, guests, addresses)


async def test_the_driver_restores_no_process_whose_shared_memory_is_open(start_job: Start, gpus: Gpus) -> None:
    owner, guest = start_job("fill 4"), start_job()
    share(owner, guest)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_NOT_SUPPORTED"):
        await checkpoint(gpus, guest)


def test_undone_close_leaves_everything_as_it_was(start_job: Start, room: Room) -> None:
    owner, guest = start_job("fill 4"), start_job()
    addresses = share(owner, guest)
    before = room()
    for _ in range(3):
        close(owner, guest)
        shared(guest).close()  # idempotent
        reopen(owner, guest)
        shared(guest).open()
    assert room() == before
    assert said(guest, "peek") == FIRST_WORD
    write_and_compare(owner, [guest], addresses)
    assert said(guest, "shut") == "0"


def test_threads_stay_parked_while_shared_memory_is_closed(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job()
    share(owner, guest)
    with pytest.raises(GpuFailed, match="not parked"):
        shared(guest).close()
    close(owner, guest)
    with pytest.raises(GpuFailed, match="open it before a thread may run"):
        guest.release()
    assert guest.mailbox().state().parked
    reopen(owner, guest)


def test_owner_stays_parked_until_its_memory_is_offered_again(start_job: Start) -> None:
    owner = start_job("fill 4")
    handle = said(owner, "share 0")
    owner.offload()
    owner.fill()
    with pytest.raises(GpuFailed, match="open it before a thread may run"):
        owner.release()
    reopen(owner)
    assert said(start_job(), f"open {handle}").startswith("0x")


@pytest.mark.parametrize("operation", ["import", "map", "access"])
def test_memory_that_cannot_be_opened_again_is_opened_by_a_retry(
    start_job: Start, node: GpuNode, operation: str
) -> None:
    owner, guest = start_job("fill 4", "fill 8"), start_job()
    handles = [said(owner, f"share {place}") for place in (0, 1)]
    for handle in reversed(handles):
        assert said(guest, f"open {handle}").startswith("0x")
    close(owner, guest)
    node.fault(operation, "fail:CUDA_ERROR_UNKNOWN", pid=guest.pid)
    with pytest.raises(GpuFailed, match="answers 999"):
        shared(guest).open()
    assert guest.mailbox().state().shared_closed
    reopen(owner, guest)
    assert said(guest, "peek") == FIRST_WORD


def test_memory_that_cannot_be_closed_is_open_again_after_an_undo(start_job: Start, node: GpuNode) -> None:
    owner, guest = start_job("fill 4"), start_job()
    share(owner, guest)
    shared(guest).attempt()
    for job in (owner, guest):
        job.park_threads()
    node.fault("unmap", "fail:CUDA_ERROR_UNKNOWN", pid=guest.pid)
    with pytest.raises(GpuFailed, match="cuMemUnmap answers 999"):
        shared(guest).close()
    reopen(owner, guest)
    assert said(guest, "peek") == FIRST_WORD


def test_memory_cannot_be_offered_while_it_is_offloaded(start_job: Start, node: GpuNode) -> None:
    owner, guest = start_job("fill 4"), start_job()
    share(owner, guest)
    owner.ready()
    close(owner, guest)
    owner.ask(OFFLOAD)
    with pytest.raises(GpuFailed, match="is offloaded"):
        shared(owner).offer()
    with pytest.raises(OwnerGone):
        shared(guest).open()
    owner.fill()
    node.fault("export", "fail:CUDA_ERROR_UNKNOWN", pid=owner.pid)
    with pytest.raises(GpuFailed, match="cuMemExportToShareableHandle answers 999"):
        shared(owner).offer()
    reopen(owner, guest)
    assert said(guest, "peek") == FIRST_WORD


@pytest.mark.parametrize("end", ["shrink", "kill"])
def test_memory_whose_owner_is_gone_is_not_closed(start_job: Start, end: str) -> None:
    """It belongs to the guest alone, which nobody could give it back to."""
    owner, guest = start_job("fill 4"), start_job()
    share(owner, guest)
    if end == "shrink":
        assert owner.do("shrink") == "done"
    else:
        os.kill(owner.pid, signal.SIGKILL)
        owner.popen.wait()
    with pytest.raises(OwnerGone, match="no process offers memory that is open here"):
        shared(guest).attempt()
    assert said(guest, "peek") == FIRST_WORD
    assert said(guest, "shut") == "0"
    shared(guest).attempt()


def test_thread_that_is_opening_memory_is_released_for_a_moment(start_job: Start) -> None:
    """Its owner is stopped, and does not answer: the thread is parked in the middle."""
    owner, guest = start_job("fill 4"), start_job()
    handle = said(owner, "share 0")
    shared(guest).attempt()
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        guest.say(f"open {handle}")
        while not guest.mailbox().state().imports:
            time.sleep(0.01)
        guest.park_threads()
        with pytest.raises(Caught, match="opening or closing"):
            shared(guest).attempt()
        guest.release()
    finally:
        os.kill(owner.pid, signal.SIGCONT)
    assert guest.hear().startswith("0x")
    guest.park_threads()
    shared(guest).attempt()
    guest.release()


def test_thread_that_is_closing_memory_is_released_for_a_moment(start_job: Start, node: GpuNode) -> None:
    owner, guest = start_job("fill 4"), start_job()
    share(owner, guest)
    shared(guest).attempt()
    node.fault("unmap", "slow:1000", pid=guest.pid)
    guest.say("shut")
    while node.faults():
        time.sleep(0.01)
    guest.park_threads()
    with pytest.raises(Caught, match="in the middle of a call that changes device memory"):
        shared(guest).attempt()
    guest.release()
    assert guest.hear().startswith("0")
    close(owner, guest)
    reopen(owner, guest)
    assert guest.mailbox().state().imports == 0


def test_memory_that_is_open_twice_is_mapped_once_and_closed_twice(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job()
    (address,) = share(owner, guest)
    assert share(owner, guest) == [address]
    for left in (2, 1):
        close(owner, guest)
        reopen(owner, guest)
        state = guest.mailbox().state()
        assert (state.imports, state.moving_imports) == (left, left)
        assert said(guest, "peek") == FIRST_WORD
        assert said(guest, "shut") == "0"
    assert guest.mailbox().state().opened_from == ()


async def test_thread_with_a_share_of_the_drivers_lock_is_released_for_a_moment(start_job: Start, gpus: Gpus) -> None:
    """Memory can still be mapped. What needs the lock alone would wait, once nothing may be released."""
    owner, guest = start_job("fill 4"), start_job("calling")
    share(owner, guest)
    await asyncio.to_thread(shared(guest).attempt)
    await caught_at_the_lock(guest, gpus)
    with pytest.raises(Caught, match="with a lock that others wait for"):
        await asyncio.to_thread(shared(guest).attempt)
    await asyncio.to_thread(guest.release)
    assert guest.do("stop") == "done"
    await asyncio.to_thread(close, owner, guest)
    await asyncio.to_thread(reopen, owner, guest)
    assert said(guest, "peek") == FIRST_WORD


def test_job_can_end_its_context_after_a_check_that_took_too_long(start_job: Start, node: GpuNode) -> None:
    """The check may be the last thing that anybody asks of it."""
    owner, guest = start_job("fill 4"), start_job("fill 2")
    share(owner, guest)
    node.fault("create", "hold", once=False, pid=guest.pid)
    with pytest.raises(Caught, match="with a lock that others wait for"):
        shared(guest).attempt()
    node.clear_faults()
    guest.say("reset")
    assert guest.popen.stdout is not None
    assert select.select([guest.popen.stdout], [], [], STUCK_S)[0], "it waits for a lock of the check"
    assert guest.hear() == "done"


def test_memory_that_the_owner_has_lost_is_not_offered(start_job: Start, node: GpuNode, held: Held) -> None:
    """The driver takes the owner's memory away while it is replaced: guests must not get what it was."""
    owner, guest = start_job("fill 4"), start_job()
    share(owner, guest)
    close(guest)
    hand_over(owner, held)
    take_back(owner, held)
    one = holding(owner)
    one.ready(STRIPES, SLOT_BYTES)
    node.fault("map", "slow:0", pid=owner.pid)  # where it is copied to
    for _ in range(2):
        node.fault("map", "fail:CUDA_ERROR_OUT_OF_MEMORY", pid=owner.pid)
    with pytest.raises(GpuFailed, match="cuMemMap"):
        one.own(STUCK_S)
    assert owner.state().offloaded
    with pytest.raises(OwnerGone):
        shared(guest).open()


def test_mailbox_shows_whose_memory_is_open(start_job: Start) -> None:
    owners, guest = [start_job("fill 4"), start_job("fill 4")], start_job()
    for owner in owners:
        share(owner, guest)
    servers = {owner.mailbox().state().server for owner in owners}
    state = guest.mailbox().state()
    assert 0 not in servers
    assert set(state.opened_from) == servers
    assert (state.imports, state.moving_imports) == (2, 2)
    assert said(guest, "shut") == "0"
    state = guest.mailbox().state()
    assert (state.imports, state.moving_imports, state.opened_from) == (1, 1, (owners[0].mailbox().state().server,))
    assert (owners[0].mailbox().state().exports, owners[0].mailbox().state().moving_exports) == (1, 1)


def test_closed_in_a_capture_is_gone_after_a_move(start_job: Start, room: Room) -> None:
    owner, guest = start_job("fill 4"), start_job()
    share(owner, guest)
    assert guest.do("capture") == "done"
    assert said(guest, "shut") == "0"
    close(owner, guest)
    reopen(owner, guest)
    assert guest.mailbox().state().imports == 0
    assert guest.do("captured") == "done"
