"""Tests that ordinary programs behave and print the same with the library preloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.inprocess import shimctl
from tests.shim.jobs import Job, compile_c, until

Start = Callable[..., Job]

POOLS = """
import concurrent.futures, multiprocessing, os, subprocess, sys, threading
def square(n): return n * n
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
            print(method, sum(pool.map(square, range(20))))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        print(sum(pool.map(square, range(20))))
    outputs = [subprocess.run(["echo", str(n)], capture_output=True, text=True).stdout.strip() for n in range(5)]
    print(outputs, subprocess.getoutput("echo shell | cat"), os.system("exit 3") >> 8)
    done = threading.Event()
    threading.Timer(0.01, done.set).start()
    print(done.wait(60), os.waitstatus_to_exitcode(os.posix_spawnp("true", ["true"], os.environ) and os.wait()[1]))
"""

SHELL = """
set -e
cd "$1"
git init -q . && git config user.email a@b && git config user.name n
echo 'int main(void) { return 42; }' > a.c
printf 'all: a\\na: a.c\\n\\tcc -o a a.c\\n' > Makefile
make -s -j4 && (./a || echo $?)
git add . && git commit -qm one && git log --format=%s && git gc -q
tar czf - a.c | tar tzf - | sort | xargs -n1 -P4 echo
for i in 1 2 3; do ( sleep 0 & wait; echo $i ); done
trap 'echo trapped' USR1; kill -USR1 $$; coproc cat; echo hi >&${COPROC[1]}; read -r line <&${COPROC[0]}; echo $line
timeout 5 sleep 0.01; echo $?; timeout 0.05 sleep 5 || echo $?
find . -name a.c -exec grep -c main {} +
perl -e 'print join(",", map { my $p = fork; exit 7 unless $p; wait; $? >> 8 } 1..3), "\\n"'
"""


def _outcome(argv: list[str], preload: Path | None, cwd: Path) -> tuple[str, str, int]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if preload:
        environment["LD_PRELOAD"] = str(preload)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100, cwd=cwd, check=False)
    return done.stdout, done.stderr, done.returncode


def test_python_pools_and_children_behave_the_same(library: Path, tmp_path: Path) -> None:
    program = tmp_path / "pools.py"
    program.write_text(POOLS)
    plain = _outcome([sys.executable, str(program)], None, tmp_path)
    assert plain[1:] == ("", 0)
    assert _outcome([sys.executable, str(program)], library, tmp_path) == plain


@pytest.mark.skipif(not shutil.which("git"), reason="no git here")
def test_shell_with_a_compiler_and_git_behaves_the_same(library: Path, tmp_path: Path) -> None:
    outcomes = []
    for name, preload in (("plain", None), ("preloaded", library)):
        (tmp_path / name).mkdir()
        outcomes.append(_outcome(["bash", "-c", SHELL, "bash", str(tmp_path / name)], preload, tmp_path))
    assert "42\none\n" in outcomes[0][0]
    assert "7,7,7" in outcomes[0][0]
    assert outcomes[1] == outcomes[0]


def _program(tmp_path: Path, text: str, *flags: str, name: str = "program") -> Path:
    source = tmp_path / f"{name}.c"
    source.write_text(text)
    return compile_c(source, tmp_path / name, *flags)


EARLY = """
#include <pthread.h>
#include <unistd.h>
static int seen;
static void *set(void *a) { seen = 5; return a; }
__attribute__((constructor(101))) static void early(void) { pthread_t t; pthread_create(&t, 0, set, 0); pthread_join(t, 0); }
int early_seen(void) { return seen; }
"""


USES_EARLY = r"""
#include <stdio.h>
int early_seen(void);
int main(void) { printf("%d\n", early_seen()); fflush(stdout); getchar(); return 0; }
"""


def test_program_that_starts_a_thread_before_our_constructor_is_parked(start: Start, tmp_path: Path) -> None:
    early = _program(tmp_path, EARLY, "-shared", "-fPIC", "-pthread", name="libearly.so")
    program = _program(tmp_path, USES_EARLY, str(early), f"-Wl,-rpath,{tmp_path}")
    job = start(program)
    assert job.hear() == "5"
    assert shimctl.problems(job.pid) == []
    job.mailbox().park(5)
    job.mailbox().release(5)
    assert job.finish() == ("", "", 0)


DEEP = """
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
static void *stay(void *a) { for (;;) pause(); return a; }
int deep(void) { pthread_t t; return pthread_create(&t, 0, stay, 0); }
int deep_blocked(void) {
    sigset_t all; pthread_t t; sigfillset(&all); pthread_sigmask(SIG_SETMASK, &all, 0);
    int status = pthread_create(&t, 0, stay, 0); sigemptyset(&all); pthread_sigmask(SIG_SETMASK, &all, 0); return status; }
"""


def test_threads_of_a_deep_bound_library_are_parked_or_named(start: Start, tmp_path: Path) -> None:
    """With RTLD_DEEPBIND its calls bypass the shim. Its threads are still parked, or named."""
    deep = _program(tmp_path, DEEP, "-shared", "-fPIC", "-pthread", name="libdeep.so")
    open_deep = f"import ctypes, os, threading; deep = ctypes.CDLL('{deep}', os.RTLD_DEEPBIND | os.RTLD_NOW)"
    job = start(
        sys.executable,
        "-c",
        f"{open_deep}; print(deep.deep(), flush=True); input(); threading.Thread(target=input).start()",
    )
    assert job.hear() == "0"
    (problem,) = shimctl.problems(job.pid)
    assert "no control thread" in problem
    job.say()
    until(lambda: shimctl.problems(job.pid) == [])
    job.mailbox().park(5)
    assert job.mailbox().state().threads == 3
    job.mailbox().release(5)

    blocked = "print(deep.deep_blocked(), flush=True); threading.Event().wait()"
    job = start(sys.executable, "-c", f"{open_deep}; threading.Thread(target=input, daemon=True).start(); {blocked}")
    assert job.hear() == "0"
    (problem,) = shimctl.problems(job.pid)
    assert "blocks signal 61 and cannot be parked" in problem


SETUID = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static void *stay(void *a) { for (;;) pause(); return a; }
int main(void) {
    pthread_t t; pthread_create(&t, 0, stay, 0);
    printf("%d", setresuid(-1, -1, -1)); printf("%d\n", setgid(getgid())); fflush(stdout);
    pthread_cancel(t); pthread_join(t, 0); getchar(); return 0; }
"""


def test_setuid_in_all_threads_works(start: Start, tmp_path: Path) -> None:
    """libc sends its own signal to every thread and waits for all, also for ours, which block every other signal."""
    job = start(_program(tmp_path, SETUID, "-pthread"))
    assert job.hear() == "00"
    job.mailbox().park(5)
    job.mailbox().release(5)
    assert job.finish() == ("", "", 0)


LIMITED = r"""
#include <pthread.h>
#include <stdio.h>
static void *wait_for_input(void *a) { getchar(); return a; }
int main(void) {
    pthread_t t; printf("%d\n", pthread_create(&t, 0, wait_for_input, 0)); fflush(stdout); pthread_join(t, 0); return 0; }
"""


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be another user")
def test_job_gets_the_last_thread_that_a_limit_allows(library: Path, tmp_path: Path, jobs: list[Job]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(_program(tmp_path, LIMITED, "-pthread"), folder)
        preload = Path(shutil.copy(library, folder))
        # The limit counts per user, and no other process has this user id.
        jobs.append(Job(preload, "setpriv", "--reuid=54321", "--clear-groups", "prlimit", "--nproc=2", program))
        assert jobs[0].hear() == "0"
        (problem,) = shimctl.problems(jobs[0].pid)
        assert "no control thread" in problem
        assert jobs[0].finish() == ("", "", 0)
