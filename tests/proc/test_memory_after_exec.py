"""Attacks by a process that executes a program with more privileges than its user has, while the daemon speaks with it.

The process keeps its pid and its start time, and the address at which the daemon writes next is one that it chose before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.inprocess import mailbox
from snapshotd.proc import foreign_memory
from snapshotd.proc.tree import Process
from snapshotd.sandbox.privileges import Ids

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="set-user-id programs of root cannot be made without root")

USER = 1500
#: A program of root. It says where its text is and which users it has, waits, and says what its text is then.
PRIVILEGED = """
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static char text[64] = "text of root";
int main(int argc, char **argv)
{
    if (argc > 1) {
        uid_t user = (uid_t)atoi(argv[1]);
        if (setresuid(user, user, user) != 0)
            return 1;
    }
    uid_t real, effective, saved;
    getresuid(&real, &effective, &saved);
    printf("%lu %d %d %d %d\\n", (unsigned long)text, (int)real, (int)effective, (int)saved, (int)getegid());
    fflush(stdout);
    char c;
    while (read(0, &c, 1) == 1 && c != '\\n')
        ;
    puts(text);
    return 0;
}
"""
#: A process of the user, which executes what it is told.
UNPRIVILEGED = """
import ctypes, os
os.setgroups([]); os.setresgid(*[1500] * 3); os.setresuid(*[1500] * 3)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
text = ctypes.create_string_buffer(b"text of a user", 64)
print(ctypes.addressof(text), flush=True)
command = os.read(0, 4096).decode().split()
os.execv(command[0], command)
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that the user reaches, and in which set-user-id programs have an effect."""
    for parent in ("/var/tmp", "/tmp", "/usr/local/lib", "/dev/shm"):
        if os.path.isdir(parent) and not os.statvfs(parent).f_flag & (os.ST_NOSUID | os.ST_NOEXEC | os.ST_RDONLY):
            break
    else:
        pytest.skip("no directory for set-user-id programs: all known ones are mounted with nosuid or noexec")
    with tempfile.TemporaryDirectory(dir=parent) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, program = folder / "privileged.c", folder / "privileged"
    source.write_text(PRIVILEGED)
    subprocess.run([compiler, "-o", program, source], check=True)
    return program


@dataclass
class Rank:
    """What the daemon knows of the process from before, and its present program."""

    running: subprocess.Popen[str]
    process: Process
    user_id: int
    address: int

    def hear(self) -> str:
        assert self.running.stdout is not None
        return self.running.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(line + "\n")
        self.running.stdin.flush()

    def execute(self, *command: str) -> list[int]:
        """The users (real, effective, saved) and the effective group that the program has."""
        self.say(" ".join(command))
        self.address, *ids = map(int, self.hear().split())
        return ids


@contextlib.contextmanager
def started() -> Iterator[Rank]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", UNPRIVILEGED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            address = int(running.stdout.readline())
            process = Process.of(running.pid)
            yield Rank(running, process, mailbox.user_of(process), address)
        finally:
            running.kill()


#: mode of the program, its argument, its users and its group after it started; whether it may be read
PROGRAMS = {
    "set-user-id": (0o4755, [], [USER, 0, 0, USER], False),
    "root in every way": (0o4755, ["0"], [0, 0, 0, USER], False),
    "gave root up": (0o4755, [str(USER)], [USER, USER, USER, USER], True),
    "set-group-id": (0o2755, [], [USER, USER, USER, 0], True),
    "file that its user cannot read": (0o711, [], [USER, USER, USER, USER], True),
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("reader", ["as chosen", "of root", "of the user"])
def test_nothing_is_written_into_a_program_with_other_privileges(
    kind: str, reader: str, program: Path, children: foreign_memory._Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, arguments, expected, readable = PROGRAMS[kind]
    program.chmod(mode)
    with started() as rank:
        assert rank.user_id == USER
        before = mailbox.Connection(rank.process, rank.address, rank.user_id)
        assert before.read(rank.address, 14) == b"text of a user"
        before.write(rank.address, b"TEXT")
        assert before.read(rank.address, 14) == b"TEXT of a user"

        ids = rank.execute(str(program), *arguments)
        if mode & 0o6000 and ids[:3] == [USER] * 3 and ids != expected:
            pytest.skip("set-user-id programs have no effect here: no_new_privs is set")
        assert ids == expected
        assert rank.process.alive(), "the attack itself: the process keeps its pid and start time"
        if reader != "as chosen":  # the exec came after the daemon had looked: its child alone can refuse
            user_id = 0 if reader == "of root" else USER
            monkeypatch.setattr(foreign_memory, "_ids", lambda _: Ids(user_id, user_id))
            monkeypatch.setattr(foreign_memory, "_check_writer", lambda *_: None)
        with pytest.raises(GpuFailed, match=f"beyond those of user {USER}.* nothing was written"):
            before.write(rank.address, b"TEXT")
        if reader == "as chosen":
            assert not [one for one in children._idle if one.ids and one.ids.user_id == 0], "root was asked to write"
            if readable:
                assert before.read(rank.address, 12) == b"text of root"
            else:
                with pytest.raises(GpuFailed, match=f"beyond those of user {USER}"):
                    before.read(rank.address, 12)
        rank.say("")
        assert rank.hear() == "text of root"


def test_program_without_privileges_is_written_after_an_exec(program: Path) -> None:
    program.chmod(0o755)
    with started() as rank:
        assert rank.execute(str(program)) == [USER] * 4
        mailbox.Connection(rank.process, rank.address, rank.user_id).write(rank.address, b"TEXT")
        rank.say("")
        assert rank.hear() == "TEXT of root"
