"""What a rank's user sees of files on the target, and file systems that never answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.api.snapshotd_pb2 import Check, FileFact, Identity, Rank, RankFacts
from snapshotd.files.as_user import User
from snapshotd.files.user_look import UserLook
from snapshotd.preflight import compare_files, target_files
from snapshotd.preflight.digest import BLOCK_BYTES, content_digest

SILENT = Path(__file__).parent.parent / "proc" / "silent_process.py"
USER = User(1500, 1500)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights cannot be taken on without root")


def fact_of(path: Path, **changes: object) -> FileFact:
    found = path.stat()
    fact = FileFact(path=str(path), size=found.st_size, mtime_ns=found.st_mtime_ns, mode=found.st_mode)
    fact.user_id, fact.group_id = found.st_uid, found.st_gid
    for name, value in changes.items():
        setattr(fact, name, value)
    return fact


def verdict(*facts: FileFact) -> Check:
    identity = Identity(user_id=USER.user_id, group_id=USER.group_id)
    return compare_files("files", RankFacts(files=facts, identity=identity, rank=Rank(user_id=USER.user_id)))


@pytest.mark.parametrize(
    ("mode", "changes", "says"),
    [
        (0o644, {}, ""),
        (0o600, {}, "not for reading"),
        (0o711, {}, "not for reading"),
        (0o711, {"mapped": True}, ""),  # a program that the user may execute
        (0o644, {"writable": True}, "not for writing"),
        (0o622, {"writable": True}, ""),
    ],
)
def test_files_that_the_user_may_not_open_are_refused_early(
    open_folder: Path, mode: int, changes: dict[str, object], says: str
) -> None:
    path = open_folder / "file"
    path.write_text("content")
    path.chmod(mode)
    check = verdict(fact_of(path, **changes))
    assert check.verdict == (Check.REFUSE if says else Check.PASS), check.reason
    assert says in check.reason
    assert not says or "may not open files of the rank on the target" in check.reason


def test_file_below_a_directory_that_the_user_may_not_enter_is_refused(open_folder: Path) -> None:
    path = open_folder / "private" / "file"
    path.parent.mkdir()
    path.write_text("content")
    path.parent.chmod(0o700)
    check = verdict(fact_of(path))
    assert check.verdict == Check.REFUSE
    assert "may not enter a directory above it" in check.reason
    with UserLook(USER) as look:
        check = target_files.directories("directories", RankFacts(directories=[str(path.parent / "below")]), (), look)
    assert "may not enter a directory above it" in check.reason


def test_content_is_compared_through_the_child(open_folder: Path) -> None:
    path = open_folder / "file"
    path.write_bytes(os.urandom(10 * BLOCK_BYTES + 77))
    fact = fact_of(path, mapped=True)
    with path.open("rb") as file:
        fact.digest = content_digest(file.fileno(), fact.size)
    fact.mtime_ns -= 1
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 5))  # the cached digest is of another time
    assert verdict(fact).verdict == Check.PASS
    with path.open("r+b") as file:
        file.seek(9 * BLOCK_BYTES)
        file.write(b"other")
    assert "has other content" in verdict(fact).reason


# ---------------------------------------------------------------- file systems that never answer


#: Runs in a mount namespace of its own, in which the file is. The children's reaper waits until the server has ended.
EXAMINE = """
import json, os, signal, subprocess, sys
from snapshotd.api.snapshotd_pb2 import FileFact, Identity, NodeInfo, Rank, RankFacts
from snapshotd.files import as_user
from snapshotd.preflight import examine
from snapshotd.runtime import child_process

as_user.LIMIT_S, child_process.REAP_S = 3.0, 0.1  # a busy machine needs some to start it
folder, silent = sys.argv[1:]
server = subprocess.Popen(
    [sys.executable, "-I", "-S", silent, folder, "file", "here"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
)
server.stdout.readline()
# Its content has to be read, because its time differs.
fact = FileFact(path=f"{folder}/file", size=1 << 20, mtime_ns=5, mode=0o100644, digest=b"d" * 16)
facts = RankFacts(files=[fact], identity=Identity(), rank=Rank(user_id=0))
checks = {check.name: check for check in examine(facts, NodeInfo(), carry_paths=())}
print(json.dumps([checks["files"].verdict, checks["files"].reason, checks["directories"].verdict]))
os.killpg(server.pid, signal.SIGKILL)
server.wait()
"""


def test_file_system_that_never_answers_is_refused_by_name(tmp_path: Path) -> None:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no FUSE server can be started: this kernel has no /dev/fuse")
    program = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", EXAMINE]
    ran = subprocess.run(
        [*program, str(tmp_path), str(SILENT)], capture_output=True, text=True, timeout=120, check=True
    )
    verdict, reason, _ = json.loads(ran.stdout)
    assert verdict == Check.REFUSE
    assert "the file system did not answer within 3 s" in reason
    assert f"{tmp_path}/file" in reason
