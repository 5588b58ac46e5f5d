"""The child that works on a user's files: it has that user's rights, is closed to that user, and cannot hang the daemon."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import Internal, Timeout
from snapshotd.files import as_user
from snapshotd.files.as_user import ROOT, User, UserFiles
from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox import landlock

USER = User(1500, 1500, (1502, 1503))


def pid_of(files: UserFiles) -> int:
    return files._child.pid


def test_child_has_the_user_s_rights_and_no_others() -> None:
    with UserFiles(USER) as files:
        text = Path(f"/proc/{pid_of(files)}/status").read_text()
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in text.splitlines())}
    assert fields["Uid"] == ["65534"] * 3 + ["1500"], "the user's for files alone"
    assert (fields["Gid"], fields["Groups"]) == (["1500"] * 4, ["1502", "1503"])
    assert {int(fields[kind][0], 16) for kind in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {0}
    assert fields["NoNewPrivs"] == ["1"]


def capabilities_of(files: UserFiles) -> str:
    lines = Path(f"/proc/{pid_of(files)}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("CapEff"))


@pytest.mark.skipif(not landlock.version(), reason="Landlock is not enabled here")
def test_child_of_root_that_makes_files_reads_only_below_its_directories(tmp_path: Path) -> None:
    given, elsewhere = tmp_path / "given", tmp_path / "elsewhere"
    given.mkdir()
    for file in (given / "file", elsewhere):
        file.write_text("text")

    def read(files: UserFiles, file: Path) -> bytes:
        about = file.stat()
        _, handle = files.ask_fd("look_read", path=str(file), file=[about.st_dev, about.st_ino], offsets=[0], bytes=4)
        with open(handle, "rb") as content:
            content.seek(0)
            return content.read()

    with UserFiles(ROOT, write=[str(given)]) as files:
        assert read(files, given / "file") == b"text"
        with pytest.raises(PermissionError):
            read(files, elsewhere)
    with UserFiles(ROOT) as files:
        assert read(files, elsewhere) == b"text"


def test_fifo_gets_its_owner_and_mode(tmp_path: Path) -> None:
    order: dict[str, Any] = {
        "name": "fifo",
        "side": ".side",
        "user_id": 1500,
        "group_id": 1502,
        "mode": 0o640,
        "foreign": "",
    }
    folder = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        with UserFiles(ROOT, write=[str(tmp_path)]) as files:
            files.ask("make_fifo", [folder], **order)
            files.ask("keep")
    finally:
        os.close(folder)
    found = (tmp_path / "fifo").lstat()
    assert (found.st_mode, found.st_uid, found.st_gid) == (stat.S_IFIFO | 0o640, 1500, 1502)
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


@pytest.mark.skipif(not seccomp.available(), reason="this kernel has no seccomp filters")
def test_child_of_root_that_only_looks_makes_and_removes_nothing(tmp_path: Path) -> None:
    ids = {"user_id": 0, "group_id": 0}
    order: dict[str, Any] = {"owners": [0], "side": "side", **ids, "mode": 0o700, "made": None, "foreign": ""}
    (tmp_path / "file").touch()
    folder = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        with UserFiles(ROOT) as files:
            assert int(capabilities_of(files), 16) & ~(1 << 1) == 0  # CAP_DAC_OVERRIDE at most
            for do in ("make_folder", "make_fifo", "remove"):
                with pytest.raises(OSError) as failed:  # noqa: PT011
                    files.ask(do, [folder], name="file" if do == "remove" else "new", **order)
                assert failed.value.errno == errno.EPERM
    finally:
        os.close(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_user_cannot_look_into_the_child() -> None:
    """Its descriptors may refer to an image, or to a directory that its user cannot open."""
    code = (
        "import os, sys; os.setgroups([]); os.setresgid(*[1500] * 3); os.setresuid(*[1500] * 3)\n"
        "for name in ('fd', 'mem', 'maps'):\n"
        "    try: os.listdir(f'/proc/{sys.argv[1]}/fd') if name == 'fd' else open(f'/proc/{sys.argv[1]}/{name}').read(1)\n"
        "    except PermissionError: continue\n"
        "    sys.exit(name)\n"
    )
    with UserFiles(USER) as files:
        subprocess.run([sys.executable, "-I", "-c", code, str(pid_of(files))], check=True)


def test_child_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with UserFiles(USER) as files:
        os.kill(pid_of(files), signal.SIGSTOP)
        monkeypatch.setattr(as_user, "LIMIT_S", 0.2)
        with pytest.raises(Timeout, match="did not answer"):
            files.ask("folder", root="/", path="tmp")
        assert files._child.process.poll() == -signal.SIGKILL


def test_child_that_was_killed_is_an_error() -> None:
    with UserFiles(USER) as files:
        os.kill(pid_of(files), signal.SIGKILL)
        with pytest.raises(Internal, match="ended"):
            files.ask("folder", root="/", path="tmp")


def test_child_ends_with_its_daemon() -> None:
    files = UserFiles(USER)
    with files:
        pass
    assert files._child.process.poll() == 0


#: A daemon with one child, which it stops: a stopped process cannot notice that its socket is closed.
DAEMON = """
import os, signal, sys, time
from snapshotd.files.as_user import User, UserFiles
with UserFiles(User(1500, 1500)) as files:
    os.kill(files._child.pid, signal.SIGSTOP)
    print(files._child.pid, flush=True)
    time.sleep(600)
"""


def test_child_that_only_looks_dies_with_its_daemon() -> None:
    with subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        ended = os.pidfd_open(int(daemon.stdout.readline()))
        daemon.kill()
    try:
        assert select.select([ended], [], [], 60)[0], "it outlives the daemon"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        os.close(ended)


#: In a mount namespace of its own: asks about a file on a file system that never answers, with an expired time limit.
ORPHAN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from snapshotd.files.as_user import ROOT, UserFiles
from snapshotd.proc import stat
folder, silent = sys.argv[1:]
server = subprocess.Popen(
    [sys.executable, "-I", "-S", silent, folder, "file", "here"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
)
server.stdout.readline()
found = os.stat(f"{folder}/file")
with UserFiles(ROOT, write=[folder]) as files:
    os.killpg(server.pid, signal.SIGSTOP)  # no signal ends a wait for a request that the server has taken
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    while {stat.read(int(pid)).state for pid in (server.pid, *children)} != {"T"}:
        time.sleep(0.01)
    order = {"do": "look_read", "path": f"{folder}/file", "file": [found.st_dev, found.st_ino]}
    files._child.line.send(json.dumps({**order, "offsets": [0], "bytes": 8, "limit_s": -9.5}).encode())
    try:
        print(files._child.process.wait(60))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
"""


def test_child_that_waits_for_a_silent_file_system_ends_by_itself(tmp_path: Path) -> None:
    """No daemon is needed for that, which may have been killed."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no FUSE server can be started: this kernel has no /dev/fuse")
    silent = Path(__file__).parent.parent / "proc" / "silent_process.py"
    program = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        sys.executable,
        "-c",
        ORPHAN,
        str(tmp_path),
        str(silent),
    ]
    ran = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert ran.stdout == f"{-signal.SIGALRM}\n"


def test_child_that_was_started_before_is_used_and_replaced_if_it_has_ended() -> None:
    as_user.spares.add()
    as_user.spares.add()
    first, second = as_user.spares._started
    first.process.kill()
    first.process.wait()
    with UserFiles(USER) as files:
        assert pid_of(files) == second.process.pid
    with UserFiles(USER) as files:
        assert pid_of(files) not in {first.process.pid, second.process.pid}
    as_user.spares.add()
    (spare,) = as_user.spares._started
    as_user.spares.close()
    assert spare.process.poll() == 0
