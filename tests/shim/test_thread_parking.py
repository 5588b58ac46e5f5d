"""Tests of parking: no thread of a process runs, whatever it was doing, and all continue unaffected."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed, RankGone, Timeout
from snapshotd.inprocess import shimctl
from snapshotd.inprocess.abi import Command
from snapshotd.proc import tree
from tests.descriptors import open_links
from tests.sampling import Sampler
from tests.shim.jobs import Job, Work, compile_c, python, stop, until

Start = Callable[..., Job]
StartWork = Callable[..., Work]

KINDS = [
    "spin",
    "allocate",
    "doze",
    "exchange",
    "turns",
    "churn",
    "churn-pinned",
    "spawn",
    "fork",
    "signal",
    "mask",
    "small",
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_runs_while_parked(work: StartWork, kind: str) -> None:
    job = work(kind)
    job.moves()
    box = job.mailbox()
    assert shimctl.problems(job.pid) == []
    for _ in range(5):
        box.park(20)
        assert box.state().parked
        assert box.state().threads >= 3
        job.stands_still()
        box.release(20)
        assert not box.state().parked
        job.moves()
    assert job.finish() == ("", "", 0)


def test_all_kinds_of_threads_are_parked_in_one_process(work: StartWork) -> None:
    job = work(*KINDS)
    job.moves()
    box = job.mailbox()
    for _ in range(3):
        box.park(120)
        job.stands_still()
        box.release(30)
        job.moves()
    assert job.finish() == ("", "", 0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_threads_that_allocate_are_parked_two_hundred_times(work: StartWork, sampled: Sampler) -> None:
    job = work("allocate", "allocate", "allocate")
    job.moves()
    box = job.mailbox()
    for _ in sampled(range(200), 30):
        box.park(120)
        before = job.counters()
        assert job.counters() == before
        box.release(30)
    job.moves()
    assert job.finish() == ("", "", 0)


def test_park_and_release_are_idempotent(work: StartWork) -> None:
    job = work("spin")
    job.moves()
    box = job.mailbox()
    box.release(5)
    box.park(5)
    first = box.state()
    box.park(5)
    assert box.state() == first
    assert first == shimctl.ShimState(parked=True, threads=3, managed=0, exports=0, imports=0)
    job.stands_still()
    box.release(5)
    box.release(5)
    job.moves()


def test_blocking_calls_continue_to_block_after_parking(work: StartWork) -> None:
    job = work("block")
    until(lambda: job.counters()[1:] == (1, 1))
    box = job.mailbox()
    for _ in range(10):
        box.park(10)
        box.release(10)
    assert job.counters()[1:] == (1, 1)
    assert job.finish() == ("", "", 0)


SLEEPERS = """
import os, select, socket, threading, time
ours, theirs = socket.socketpair()
def timed(name, call):
    before = time.monotonic()
    call()
    os.write(1, f"{name} {time.monotonic() - before >= 1.0}\\n".encode())
theirs.settimeout(1.0)
def receive():
    try: theirs.recv(1)
    except TimeoutError: pass
calls = {"sleep": lambda: time.sleep(1.0), "select": lambda: select.select([theirs], [], [], 1.0), "recv": receive,
         "wait": lambda: threading.Event().wait(1.0)}
threads = [threading.Thread(target=timed, args=item) for item in calls.items()]
for thread in threads: thread.start()
print("ready", flush=True)
for thread in threads: thread.join()
"""


def test_python_sleeps_take_as_long_as_requested(start: Start) -> None:
    job = start(*python(SLEEPERS))
    assert job.hear() == "ready"
    with contextlib.suppress(RankGone):  # on a busy machine the program ends before the last round
        for _ in range(20):
            job.mailbox().park(10)
            job.mailbox().release(10)
    output, errors, status = job.finish()
    assert sorted(output.splitlines()) == ["recv True", "select True", "sleep True", "wait True"]
    assert (errors, status) == ("", 0)


def test_signals_to_a_parked_process_stay_pending(work: StartWork) -> None:
    job = work("doze")
    job.moves()
    box = job.mailbox()
    box.park(5)
    for _ in range(3):
        os.kill(job.pid, signal.SIGUSR1)
    job.stands_still()
    assert job.handled_signals() == 0
    box.release(5)
    until(lambda: job.handled_signals() == 1)
    box.park(5)
    os.kill(job.pid, signal.SIGTERM)
    job.stands_still()
    assert job.popen.poll() is None
    with contextlib.suppress(RankGone):
        box.release(5)
    assert job.popen.wait(60) == -signal.SIGTERM


def test_a_thread_that_cannot_be_parked_is_named(work: StartWork) -> None:
    job = work("spin", "stubborn")
    job.moves()
    problems = shimctl.problems(job.pid)
    stubborn = [tid for tid in os.listdir(f"/proc/{job.pid}/task") if _name(tid) == "stubborn"]
    assert problems == [
        f"process {job.pid} (work): thread {tid} (stubborn) blocks signal 61 and cannot be parked"
        for tid in sorted(stubborn, key=int)
    ]
    assert len(problems) == 2
    with pytest.raises(
        Timeout, match=r"these threads could not be parked: .*\d+ \(stubborn, state ., blocks signal 61\)"
    ) as failure:
        job.mailbox().park(0.5)
    assert "spin" not in failure.value.message
    assert not job.mailbox().state().parked
    job.moves()


def _name(tid: str) -> str:
    return Path(f"/proc/{tid}/comm").read_text().strip()


def test_thread_in_vfork_delays_parking_and_is_named(work: StartWork) -> None:
    job = work("spin", "vfork")
    children = until_children(job, 2)
    box = job.mailbox()
    with pytest.raises(Timeout, match=r"\d+ \(in-vfork, state D\)"):
        box.park(0.5)
    until(lambda: job.counters()[1] > 0)
    for child in children:
        os.kill(child, signal.SIGUSR1)  # ends pause(): the child of vfork exits, its parent continues
    until_children(job, 2)


def until_children(job: Job, count: int) -> list[int]:
    until(lambda: len(tree.children(job.pid)) == count)
    return tree.children(job.pid)


@pytest.mark.parametrize(("kind", "lock"), [("loader", "the loader's lock"), ("stdout", "the lock of stdout")])
def test_a_lock_that_a_parked_thread_holds_is_named(work: StartWork, kind: str, lock: str) -> None:
    job = work("spin", kind)
    until(lambda: sum(count > 0 for count in job.counters()) == 4, "one thread at a time gets it")
    with pytest.raises(Timeout, match=f"one of them holds {lock}, which the driver needs"):
        job.mailbox().park(0.5)
    before = job.counters()
    until(lambda: job.counters()[1] > before[1])


def test_program_that_is_replaced_while_its_threads_are_parked_is_reported(start: Start, tmp_path: Path) -> None:
    """A thread executes another program between its start and the signal: the daemon neither hangs nor mistakes it."""
    source = tmp_path / "replaced.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <pthread.h>\n#include <unistd.h>\n"
        "static void *spin(void *a) { for (;;) usleep(100); return a; }\n"
        "static void *leave(void *a) { char c; if (read(0, &c, 1) == 1) execl(a, a, (char *)0); return a; }\n"
        "int main(int n, char **v) { pthread_t t; char c;\n"
        "while (n < 2 && read(0, &c, 1) == 1) ;\n"
        "if (n < 2) return 0;\n"
        "for (int i = 0; i < 8; i++) pthread_create(&t, 0, spin, 0);\n"
        "pthread_create(&t, 0, leave, v[0]);\npause();\nreturn 1; }\n"
    )
    program = compile_c(source, tmp_path / "replaced", "-pthread")
    for delay in range(6):
        job = start(program, "threads")
        tasks = Path(f"/proc/{job.pid}/task")
        until(lambda tasks=tasks: len(list(tasks.iterdir())) >= 10)  # type: ignore[misc]
        box = job.mailbox()
        job.say()
        for _ in range(delay * 20):
            os.sched_yield()
        with contextlib.suppress(GpuFailed, RankGone):  # it was parked before, or is not there any more
            box.park(20)
            box.release(20)
        until(lambda tasks=tasks: len(list(tasks.iterdir())) == 1)  # type: ignore[misc]
        assert job.finish()[2] == 0


def test_a_stopped_process_is_not_parked_when_it_is_continued(work: StartWork) -> None:
    job = work("spin")
    job.moves()
    box = job.mailbox()
    stop(job.pid)
    with pytest.raises(Timeout, match="it is stopped"):
        box.park(0.1)
    os.kill(job.pid, signal.SIGCONT)
    box.release(10)  # is handled after every earlier command
    assert not box.state().parked
    job.moves()


def test_process_whose_daemon_died_during_park_counts_as_parked(work: StartWork) -> None:
    """The next daemon sees that parking must be undone, although nothing is parked yet."""
    job = work("spin")
    job.moves()
    box = job.mailbox()
    stop(job.pid)
    box.post(Command.PARK, 30)
    assert box.state().parked
    assert box.state().threads == 0
    os.kill(job.pid, signal.SIGCONT)
    until(lambda: box.state().threads == 3)
    job.stands_still()
    job.mailbox().release(10)
    assert not box.state().parked
    job.moves()


def test_program_ends_with_its_last_thread_after_the_main_thread_exits(start: Start, tmp_path: Path) -> None:
    source = tmp_path / "leave.c"
    source.write_text(
        "#include <pthread.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        "static void *wait_for_input(void *a) { char c; while (read(0, &c, 1) == 1 && c != 'x'); return a; }\n"
        'static void bye(void) { puts("bye"); }\n'
        "int main(void) { pthread_t t; atexit(bye); pthread_create(&t, 0, wait_for_input, 0); pthread_exit(0); }\n"
    )
    job = start(compile_c(source, tmp_path / "leave", "-pthread"))
    until(lambda: tree.state(job.pid) == "Z")
    box = shimctl.Mailbox(job.process, 0, os.getuid())
    with pytest.raises(RankGone):  # to the kernel the process is a zombie
        box.state()
    job.say("x")
    assert job.finish() == ("bye\n", "", 0), "a program ends with its last thread, not with ours"


def test_more_threads_than_can_be_parked_are_reported(start: Start, tmp_path: Path) -> None:
    source = tmp_path / "many.c"
    source.write_text(
        "#include <pthread.h>\n#include <stdio.h>\n#include <unistd.h>\n"
        "static void *stay(void *a) { pause(); return a; }\n"
        "int main(void) { pthread_t t; pthread_attr_t a; pthread_attr_init(&a); pthread_attr_setstacksize(&a, 16384);\n"
        "for (int i = 0; i < 4100; i++) if (pthread_create(&t, &a, stay, 0)) return 9;\n"
        'puts("ready"); fflush(stdout); getchar(); return 0; }\n'
    )
    job = start(compile_c(source, tmp_path / "many", "-pthread"))
    assert job.hear() == "ready"
    with pytest.raises(GpuFailed, match=r"more threads than can be parked \(4096\)"):
        job.mailbox().park(5)
    assert job.finish() == ("", "", 0)


def test_process_in_another_pid_namespace_is_parked(work: StartWork) -> None:
    wrapper = work("spin", "allocate", wrap=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"))
    inner = tree.Process.of(until_children(wrapper, 1)[0])
    wrapper.moves()
    assert tree.inner_pid(inner.pid) == 1
    assert shimctl.problems(inner.pid) == []
    box = shimctl.find(inner)
    assert box is not None
    box.park(10)
    wrapper.stands_still()
    box.release(10)
    wrapper.moves()


def test_a_proc_of_another_pid_namespace_is_reported(work: StartWork) -> None:
    wrapper = work("spin", wrap=("unshare", "--pid", "--fork", "--kill-child"))
    inner = tree.Process.of(until_children(wrapper, 1)[0])
    wrapper.moves()
    box = shimctl.find(inner)
    assert box is not None
    with pytest.raises(GpuFailed, match="belongs to another pid namespace"):
        box.park(5)
    wrapper.moves()


CHILDREN = """
import os, sys, threading, time
def counting(name):
    def count():
        while True:
            time.sleep(0.001)
            os.pwrite(fd, b"%d" % time.monotonic_ns(), 0)
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    threading.Thread(target=count, daemon=True).start()
def say(word):
    os.write(1, b"%s\\n" % str(word).encode())
counting(sys.argv[1] + "/parent")
child = os.fork()
if child == 0:
    say("alone")
    sys.stdin.readline()
    counting(sys.argv[1] + "/child")
    say("two")
    sys.stdin.readline()
    os._exit(5)
say(child)
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_child_is_parked_separately(start: Start, tmp_path: Path) -> None:
    job = start(*python(CHILDREN), tmp_path)
    said = {job.hear(), job.hear()}
    child = tree.Process.of(int((said - {"alone"}).pop()))
    (problem,) = shimctl.problems(child.pid)
    assert problem.startswith(f"process {child.pid} (python) has no control thread of libsnapshim.so")
    orphan = shimctl.find(child)
    assert orphan is not None
    with pytest.raises(GpuFailed, match="no control thread"):
        orphan.park(1)
    job.mailbox().park(5)
    job.say()
    assert job.hear() == "two", "the child runs while its parent is parked"
    assert shimctl.problems(child.pid) == []
    orphan.park(5)
    contents = {name: (tmp_path / name).read_bytes() for name in ("parent", "child")}
    job.mailbox().release(5)
    until(lambda: (tmp_path / "parent").read_bytes() != contents["parent"])
    assert (tmp_path / "child").read_bytes() == contents["child"]
    orphan.release(5)
    job.say()
    assert job.hear() == "5"
    assert job.finish() == ("", "", 0)


def test_forked_child_keeps_no_descriptor_of_the_library(work: StartWork) -> None:
    """Children are forked while the control thread has /proc open, and must not keep its descriptors."""
    job = work("fork", "allocate")
    job.moves()
    box = job.mailbox()
    for _ in range(20):
        box.park(20)
        assert {link.partition(":")[0] for link in open_links(job.pid).values()} == {"pipe"}
        box.release(20)
    job.moves()


def test_process_that_replaced_its_program_is_not_parked(start: Start) -> None:
    again = "import os, sys; input(); os.execv(sys.executable, [sys.executable, '-c', 'input()'])"
    job = start(
        *python(
            f"import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); {again}"
        )
    )
    until(lambda: shimctl.find(job.process) and not shimctl.problems(job.pid))
    box = job.mailbox()
    box.park(5)
    box.release(5)
    job.say()
    until(lambda: "input()" in Path(f"/proc/{job.pid}/cmdline").read_text().split("\0"))
    with pytest.raises(GpuFailed, match=r"replaced its program|no control thread"):
        box.park(5)
    job.say()
    assert job.finish()[2] == 0
    with pytest.raises(RankGone):
        box.park(5)


def test_process_without_the_library_is_reported() -> None:
    plain = subprocess.Popen(["sleep", "99"], env={})
    try:
        until(lambda: Path(f"/proc/{plain.pid}/comm").read_text() == "sleep\n")
        assert shimctl.find(tree.Process.of(plain.pid)) is None
        (problem,) = shimctl.problems(plain.pid)
        assert problem.startswith(
            f"process {plain.pid} (sleep) runs without libsnapshim.so: start the rank with `migrator run`"
        )
    finally:
        plain.kill()
        plain.wait()
    assert shimctl.problems(plain.pid) == [f"process {plain.pid} has ended"]
    with pytest.raises(RankGone):
        shimctl.find(tree.Process(plain.pid, 1))


def test_another_version_of_the_library_is_reported(tmp_path: Path, jobs: list[Job]) -> None:
    source = tmp_path / "other.c"
    source.write_text(
        'struct { char magic[8]; unsigned abi; char rest[1000]; } snapshim_mailbox = {"SNAPSHIM", 1, {0}};\n'
    )
    jobs.append(Job(compile_c(source, tmp_path / "libsnapshim.so", "-shared", "-fPIC"), "sleep", "99"))
    until(lambda: "libsnapshim" in Path(f"/proc/{jobs[0].pid}/maps").read_text())
    with pytest.raises(GpuFailed, match=r"another version of libsnapshim\.so"):
        jobs[0].mailbox()
    (problem,) = shimctl.problems(jobs[0].pid)
    assert "restart the job" in problem


@pytest.mark.parametrize("damage", [b"", b"\x7fELF\x02\x01" + b"\xff" * 200, b"\x7fELF\x02\x01" + bytes(5000), b"text"])
def test_invalid_library_file_is_reported(tmp_path: Path, damage: bytes, jobs: list[Job]) -> None:
    file = tmp_path / "libsnapshim.so"
    file.write_bytes(damage.ljust(8192, b"\xff") if damage else bytes(4096))
    text = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
    jobs.append(Job(Path(), *python(f"{text}; print(1, flush=True); input()"), file))
    assert jobs[0].hear() == "1"
    with pytest.raises(GpuFailed, match="another version"):
        shimctl.find(jobs[0].process)


def test_process_is_parked_although_its_library_was_replaced_on_disk(
    library: Path, tmp_path: Path, jobs: list[Job]
) -> None:
    copy = tmp_path / "libsnapshim.so"
    copy.write_bytes(library.read_bytes())
    jobs.append(
        Job(
            copy,
            *python("import threading; threading.Thread(target=input, daemon=True).start(); threading.Event().wait()"),
        )
    )
    until(lambda: shimctl.find(jobs[0].process) and not shimctl.problems(jobs[0].pid))
    copy.unlink()
    copy.write_bytes(b"something else")
    jobs[0].mailbox().park(5)
    assert jobs[0].mailbox().state().parked
