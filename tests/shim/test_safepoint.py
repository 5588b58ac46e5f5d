"""Tests that torch's unused memory is released in the interpreter's main thread, in time or not at all, and that the idle
compilers of torch.compile end then."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import pytest

from snapshotd.proc import tree
from tests.shim.jobs import PROGRAMS, Job, until

Start = Callable[..., Job]


@pytest.fixture
def job(start: Start, caplog: pytest.LogCaptureFixture) -> Job:
    caplog.set_level(logging.INFO, "snapshotd.inprocess.shimctl")
    job = start(sys.executable, PROGRAMS / "fake_torch.py")
    assert job.hear() == "ready"
    return job


def _busy(job: Job) -> None:
    job.say("busy_until_told()")
    assert job.hear() == "busy"


def _calls(job: Job) -> str:
    job.say("say(CALLS)")
    return job.hear()


def test_memory_is_released_in_the_main_thread(job: Job) -> None:
    job.say("make()")
    _busy(job)
    assert job.mailbox().empty_cache(20).released_bytes == 550
    assert job.mailbox().empty_cache(20).released_bytes == 0
    job.say()
    assert _calls(job) == "['main', 'main']"
    job.say("end")
    assert job.finish() == ("", "", 0)


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("", "torch is not imported"),
        ("make(initialized=False)", "torch has not used a GPU"),
        ("make(capturing=True)", "a CUDA graph is being captured"),
        ("make(failure=RuntimeError('captures underway'))", "captures underway"),
        ("make(); del sys.modules['torch'].cuda", "no attribute 'cuda'"),
        ("make(); del sys.modules['torch'].cuda.memory_reserved", "no attribute 'memory_reserved'"),
        ("sys.modules['torch'] = None", "no attribute 'cuda'"),
        ("make(failure=UnicodeError(chr(0xd800)))", "cannot be printed"),
        ("make(failure=RuntimeError('ä' * 1000))", "ä" * 100),
    ],
)
def test_release_that_fails_is_skipped_with_a_reason(
    job: Job, torch: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    job.say(torch or "pass")
    _busy(job)
    assert job.mailbox().empty_cache(20).released_bytes is None
    assert reason in caplog.text
    job.say()
    job.say("end")
    assert job.finish() == ("", "", 0)


def test_a_main_thread_in_c_code_is_skipped_and_the_late_call_does_nothing(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.say("make()")
    # Reading the next line is C code: no bytecode runs until it arrives.
    until(lambda: tree.state(job.pid) == "S")
    for _ in range(40):  # more often than the interpreter's queue has entries
        assert job.mailbox().empty_cache(0.01).released_bytes is None
    assert "reached no safe point in time" in caplog.text
    assert "list of pending calls is full" not in caplog.text
    assert _calls(job) == "[]"
    _busy(job)
    assert job.mailbox().empty_cache(20).released_bytes == 550, "and the next one works"
    job.say()
    assert _calls(job) == "['main']"


def test_keyboard_interrupt_propagates_into_the_job(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.say("make(failure=KeyboardInterrupt('theirs'))")
    job.say("exec('try:\\n  busy_until_told()\\nexcept KeyboardInterrupt as e:\\n  say(e)')")
    assert job.hear() == "busy"
    assert job.mailbox().empty_cache(20).released_bytes is None
    assert "interrupted just then" in caplog.text
    assert job.hear() == "theirs"
    job.say()
    job.say("end")
    assert job.finish() == ("", "", 0)


def test_exception_being_handled_is_not_changed(job: Job) -> None:
    job.say("make(failure=RuntimeError('ours'))")
    job.say(
        "exec('try:\\n  1 / 0\\nexcept ZeroDivisionError as e:\\n  busy_until_told()\\n"
        "  say((sys.exc_info()[1] is e, e.__context__, e.__cause__))')"
    )
    assert job.hear() == "busy"
    assert job.mailbox().empty_cache(20).released_bytes is None
    job.say()
    assert job.hear() == "(True, None, None)"


@pytest.mark.parametrize("failure", ["None", "RuntimeError('ours')"])
def test_no_reference_is_leaked(job: Job, failure: str) -> None:
    job.say(f"make(failure={failure})")
    seen = (
        "(sys.modules['torch'], CUDA, RESERVED, *filter(callable, vars(CUDA).values()), *CUDA.empty_cache.__closure__)"
    )
    count = f"say([sys.getrefcount(o) for o in {seen}])".replace("CUDA", "sys.modules['torch'].cuda")
    job.say(count)
    before = job.hear()
    assert len(before.split()) == 9
    _busy(job)
    for _ in range(30):
        assert job.mailbox().empty_cache(20).released_bytes is not None or "ours" in failure
    job.say()
    job.say(count)
    assert job.hear() == before


def test_release_is_skipped_without_an_interpreter(
    start: Start, work_program: object, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "snapshotd.inprocess.shimctl")
    job = start(str(work_program), f"{tmp_path}/counters", "doze")
    until(lambda: len(os.listdir(f"/proc/{job.pid}/task")) == 4)
    assert job.mailbox().empty_cache(5).released_bytes is None
    assert "no Python interpreter" in caplog.text


def test_a_forked_child_does_not_run_its_parents_call(job: Job) -> None:
    job.say("make()")
    # The call is in the interpreter's queue when the main thread forks: it was queued while that was in C code.
    job.say("sys.stdin.readline() and [os.write(1, b'%d\\n' % len(CALLS)) for _ in range(3) if os.fork() == 0]")
    until(lambda: tree.state(job.pid) == "S")
    assert job.mailbox().empty_cache(0.01).released_bytes is None
    job.say("x")
    assert job.hear() == "0"


def test_the_cache_is_not_emptied_while_the_job_is_parked(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.say("make()")
    job.mailbox().park(10)
    assert job.mailbox().empty_cache(1).released_bytes is None
    assert "the job is parked" in caplog.text
    job.mailbox().release(10)
    assert _calls(job) == "[]"


def test_parking_does_not_wait_for_a_thread_that_waits_for_the_interpreter(job: Job) -> None:
    """The main thread holds the interpreter's lock in C code. Our thread that waits for it is not the job's."""
    job.say("import ctypes; say(1); ctypes.PyDLL(None).usleep(3_000_000); say(2)")
    assert job.hear() == "1"
    assert job.mailbox().empty_cache(0.1).released_bytes is None
    job.mailbox().park(2)
    assert job.mailbox().state().parked
    job.mailbox().release(2)
    assert job.hear() == "2"
    job.say("end")
    assert job.finish() == ("", "", 0)


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ("Pool(), Pool()", 2),
        ("object(), Pool(), Pool(RuntimeError('closed'))", 1),  # one forked from the job itself has no such call
        ("Pool(timer=False)", 0),  # TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL=0
        ("Pool(pending=1), Pool()", 1),
        ("", 0),
    ],
)
def test_idle_compilers_are_told_to_end(job: Job, pools: str, told: int) -> None:
    job.say(f"make(); make_pools({pools})")
    _busy(job)
    emptied = job.mailbox().empty_cache(20)
    assert (emptied.released_bytes, emptied.pools_told) == (550, told)
    job.say()
    job.say("end")
    assert job.finish() == ("", "", 0)


@pytest.mark.parametrize("wrong", ["None", "types.ModuleType('x')", "types.SimpleNamespace(_pool_set=7)"])
def test_unknown_compilers_are_left_alone(job: Job, wrong: str) -> None:
    job.say(f"make(); sys.modules['torch._inductor.async_compile'] = {wrong}")
    _busy(job)
    emptied = job.mailbox().empty_cache(20)
    assert (emptied.released_bytes, emptied.pools_told) == (550, 0)
    job.say()
    job.say("end")
    assert job.finish() == ("", "", 0)


def test_main_thread_that_is_talking_to_its_compilers_is_not_blocked(job: Job) -> None:
    job.say("exec('make(); pool = Pool(); make_pools(pool)\\nwith pool.write_lock: busy_until_told()')")
    assert job.hear() == "busy"
    assert job.mailbox().empty_cache(20).pools_told == 0
    job.say()
    assert _calls(job) == "['main']"


def test_keyboard_interrupt_at_the_compilers_propagates_into_the_job(job: Job) -> None:
    job.say("make(); make_pools(Pool(KeyboardInterrupt('theirs')))")
    job.say("exec('try:\\n  busy_until_told()\\nexcept KeyboardInterrupt as e:\\n  say((str(e), CALLS))')")
    assert job.hear() == "busy"
    emptied = job.mailbox().empty_cache(20)
    assert (emptied.released_bytes, emptied.pools_told) == (None, 0)
    assert job.hear() == "('theirs', ['quiesce'])"
    job.say()


def test_workers_of_the_real_torch_end_and_others_compile_later(start: Start) -> None:
    job = start(sys.executable, PROGRAMS / "compilers.py")
    assert job.hear() == "ready"
    job.say("say(compiled())")
    assert job.hear() == "[0, 1, 2, 3]"
    (sidecar,) = tree.children(job.pid)
    workers = tree.children(sidecar)
    assert workers
    _busy(job)
    assert job.mailbox().empty_cache(20).pools_told == 1
    until(lambda: not tree.children(sidecar))
    job.say()
    job.say("say(compiled())")
    assert job.hear() == "[0, 1, 2, 3]"
    assert tree.children(sidecar)
    assert not set(tree.children(sidecar)) & set(workers)
    job.say("end")
    assert job.finish()[2] == 0
