"""The child that works on a user's files: it has that user's rights, is closed to that user, and cannot hang the daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.api.errors import Internal, Timeout
from snapshotd.files import as_user
from snapshotd.files.as_user import User, UserFiles

USER = User(1500, 1500, (1502, 1503))


def pid_of(files: UserFiles) -> int:
    return files._process.pid


def test_child_has_the_user_s_rights_and_no_others() -> None:
    with UserFiles(USER) as files:
        text = Path(f"/proc/{pid_of(files)}/status").read_text()
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in text.splitlines())}
    assert (fields["Uid"], fields["Gid"], fields["Groups"]) == (["1500"] * 4, ["1500"] * 4, ["1502", "1503"])
    assert {int(fields[kind][0], 16) for kind in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {0}
    assert fields["NoNewPrivs"] == ["1"]


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
        assert files._process.poll() == -signal.SIGKILL


def test_child_that_its_user_killed_is_an_error() -> None:
    with UserFiles(USER) as files:
        os.kill(pid_of(files), signal.SIGKILL)
        with pytest.raises(Internal, match="ended"):
            files.ask("folder", root="/", path="tmp")


def test_child_ends_with_its_daemon() -> None:
    files = UserFiles(USER)
    with files:
        pass
    assert files._process.poll() == 0


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
