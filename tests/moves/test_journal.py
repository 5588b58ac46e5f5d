"""The journal: an outcome is written once, whatever is requested afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from snapshotd.api.errors import Busy, NotFound, Usage
from snapshotd.moves.journal import Journal, check_move_id
from snapshotd.moves.record import Begin, OutcomeRecord
from snapshotd.moves.rules import Mark, Outcome
from tests.installation import REPOSITORY

MOVE = "m-0123456789ab"


def begin(move: str = MOVE, target: str = "spare-1") -> Begin:
    return Begin(move, "source", "job-0-x", "job", 0, "node-1", "a:1", target, "b:1", "ab" * 32, "boot", 1.0, 30.0)


def test_marks_and_their_fields_survive_a_restart(tmp_path: Path) -> None:
    log = Journal(tmp_path).begin(begin())
    log.mark(Mark.BEGUN, pid=7)
    log.mark(Mark.FROZEN, stdio={"channels": []})
    again = Journal(tmp_path).get(MOVE)
    assert again.last_mark is Mark.FROZEN
    assert again.record.pid == 7
    assert again.record.stdio == {"channels": []}
    assert again.begin == begin()


def test_first_outcome_is_final(tmp_path: Path) -> None:
    log = Journal(tmp_path).begin(begin())
    first = log.decide(Outcome.ABORT, "the lease ran out", "source")
    assert log.decide(Outcome.COMMIT, "held", "driver") == first
    assert Journal(tmp_path).get(MOVE).decide(Outcome.COMMIT, "held", "driver") == first


def test_concurrent_decisions_record_one_outcome(tmp_path: Path) -> None:
    logs = [Journal(tmp_path).begin(begin()) for _ in range(8)]
    start = threading.Barrier(8)
    seen: list[OutcomeRecord] = []

    def decide(index: int) -> None:
        start.wait()
        seen.append(logs[index].decide(Outcome.COMMIT if index % 2 else Outcome.ABORT, f"by {index}", "test"))

    threads = [threading.Thread(target=decide, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 1
    assert seen[0] == Journal(tmp_path).get(MOVE).outcome


def test_missing_outcome_is_not_an_abort(tmp_path: Path) -> None:
    assert Journal(tmp_path).begin(begin()).outcome is None


def test_overruled_outcome_is_replaced_and_kept_on_disk(tmp_path: Path) -> None:
    log = Journal(tmp_path).begin(begin())
    log.decide(Outcome.COMMIT, "held", "driver")
    log.overrule(Outcome.ABORT, "it burns", "alice")
    again = Journal(tmp_path).get(MOVE)
    assert again.outcome is not None
    assert (again.outcome.outcome, again.outcome.decided_by) == (Outcome.ABORT, "alice")
    assert json.loads((log.folder / "outcome.json").read_text())["outcome"] == "COMMIT"
    assert (log.folder / "overruling.json").exists()


def test_mark_truncated_by_a_crash_is_ignored(tmp_path: Path) -> None:
    log = Journal(tmp_path).begin(begin())
    log.mark(Mark.BEGUN)
    with (log.folder / "marks").open("a") as file:
        file.write('{"mark": "fro')
    again = Journal(tmp_path).get(MOVE)
    assert again.last_mark is Mark.BEGUN
    again.mark(Mark.FREEZING)
    assert Journal(tmp_path).get(MOVE).last_mark is Mark.FREEZING


def test_repeated_begin_is_idempotent_and_a_different_one_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.begin(begin()) is journal.begin(begin())
    with pytest.raises(Busy):
        journal.begin(begin(target="elsewhere"))


def test_begin_truncated_by_a_crash_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "moves" / MOVE).mkdir(parents=True)
    (tmp_path / "moves" / MOVE / "begin.new").write_text("{")
    with pytest.raises(NotFound):
        Journal(tmp_path).get(MOVE)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "", "m-xyz", "m-0123456789AB", "m-0123456789ab/..", "m-0123456789ab\n"]
)
def test_invalid_move_id_is_refused(name: str) -> None:
    with pytest.raises(Usage):
        check_move_id(name)


def test_failed_fsync_ends_the_daemon(tmp_path: Path) -> None:
    """After a failed fsync the daemon must crash and read the journal again. Runs in a separate process."""
    program = (
        "import os; from pathlib import Path\n"
        "from snapshotd.moves.journal import Journal\n"
        "from snapshotd.moves.record import Begin; from snapshotd.moves.rules import Outcome\n"
        f"begin = Begin({MOVE!r}, 'source', 'u', 'j', 0, 'a', 'a', 'b', 'b', 'ab', 'boot', 1.0)\n"
        f"log = Journal(Path({str(tmp_path)!r})).begin(begin)\n"
        "def broken(fd): raise OSError(5, 'Input/output error')\n"
        "os.fsync = broken\n"
        "log.decide(Outcome.COMMIT, 'x', 'x')\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == 74
    assert "went on" not in done.stdout
    assert Journal(tmp_path).get(MOVE).outcome is None


#: Fills a small file system, as a user or a log may do, and journals on it. The reserve is one quarter of it.
_ON_A_FULL_DISK = """
import sys
from pathlib import Path
from snapshotd.api.errors import Busy
from snapshotd.moves.journal import Journal
from snapshotd.moves.reserve import Reserve
from snapshotd.moves.rules import Mark, Outcome
from tests.moves.test_journal import MOVE, begin

folder = Path(sys.argv[1])
reserve = Reserve(folder, 1 << 20)
assert reserve.hold() and reserve.is_held()
log = Journal(folder, reserve).begin(begin())
log.mark(Mark.BEGUN, pid=7)
with open(folder / "fills the disk", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        assert error.errno == 28
log.mark(Mark.FROZEN, carried=["x" * 100_000])
log.decide(Outcome.COMMIT, "held", "driver")
log.mark(Mark.SETTLED)
again = Journal(folder).get(MOVE)
assert (again.last_mark, again.committed, len(again.record.carried[0])) == (Mark.SETTLED, True, 100_000)
other = begin("m-00000000000b")
try:
    Journal(folder, reserve).begin(other)
except Busy as error:
    assert "is full" in error.message
else:
    raise AssertionError("a move began that could not be journalled to its end")
(folder / "fills the disk").unlink()
Journal(folder, reserve).begin(other)
assert reserve.is_held()
print("journalled")
"""


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_full_disk_does_not_stop_the_journal(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=4m none "{tmp_path}" && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", _ON_A_FULL_DISK, str(tmp_path)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("journalled\n", 0), done.stderr
