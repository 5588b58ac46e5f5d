"""Closed files of a user, or a list of them from a node, that are made to harm the daemon or another user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Internal, Refused
from snapshotd.files import closed
from snapshotd.files.as_user import UserFiles
from snapshotd.moves import closed_ledger, closed_manifest, closed_requests
from snapshotd.moves.closed_ledger import ClosedLedger
from snapshotd.network.frames import End, encode
from snapshotd.preflight import closed_files as check
from tests.moves.closed_nodes import OTHER_ID, USER, Place, names, send

SEEN = [1, 2, 3, 4, 5]


def scan(top: Path, user_id: int = USER.user_id, since_ns: int = 0) -> dict[str, Any]:
    wanted: dict[str, Any] = {"roots": [str(top)], "since_ns": since_ns, "in_use": [[]], "exclude": []}
    return closed.scan(wanted | {"held_elsewhere": [], "mounts": [[]]}, user_id)


# ---------------------------------------------------------------- a user


def test_names_that_would_fill_the_memory_end_the_look(
    nodes: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made from directory to directory, a path has 25 KB, and six times as much in an answer: 100,000 take many GB."""
    monkeypatch.setattr(closed, "MAX_NAMES_BYTES", 1 << 20)
    here, _ = nodes
    folder = os.open(here.local, os.O_RDONLY)
    for depth in range(20):
        name = b"\xff" * 255
        os.mkdir(name, dir_fd=folder)
        inner = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.fchown(inner, USER.user_id, USER.group_id)
        os.close(folder)
        folder = inner
        for number in range(5):
            os.close(os.open(f"{depth}-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
            os.chown(f"{depth}-{number}", USER.user_id, USER.group_id, dir_fd=folder)
    os.close(folder)
    found = scan(here.local)
    assert not found["complete"]
    assert sum(len(row.path) for row in found["rows"]) < 1 << 20


def test_names_of_older_files_are_left_out_first_and_those_of_other_directories_do_not_count(
    nodes: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed, "MAX_NAMES_BYTES", 2000)
    here, _ = nodes
    for number in range(30):
        here.make(f"cache/{number:02d}" + "x" * 98)
        here.make(f"unrelated-{number}/" + "y" * 98)
    later_ns = (here.local / "unrelated-29").stat().st_ctime_ns + 1
    while here.make("cache/new").stat().st_ctime_ns < later_ns:
        pass
    found = scan(here.local, since_ns=later_ns)
    assert found["complete"]
    assert {row.path for row in found["rows"] if row.changed} >= {"cache/new"}
    assert found["older_left"] > 0


def test_user_with_so_many_files_that_others_are_not_found_is_named(
    nodes: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = nodes
    for number in range(30):
        here.make(f"many-{number}", owner=OTHER_ID)
    here.make("mine")
    monkeypatch.setattr(closed, "MAX_SEEN", 20)
    found = scan(here.local)
    assert not found["complete"]
    user_id, count = found["crowd"]
    assert user_id == OTHER_ID
    verdict = check(0, 0, 0, 1, complete=False, crowd=(user_id, count))
    assert (verdict.verdict, f"user {OTHER_ID} has {count} files" in verdict.reason) == (pb.Check.REFUSE, True)
    monkeypatch.undo()
    assert (names(here.find()), here.find().crowd) == ({"mine"}, None)


def test_files_are_not_made_in_a_directory_of_another_user(nodes: tuple[Place, Place]) -> None:
    """Its owner could put others in their place, which the rank would load."""
    here, there = nodes
    here.folder("shared", 0o1777, owner=0)
    here.make("shared/deep/cache.so")
    there.folder("shared", 0o777, owner=OTHER_ID)
    with pytest.raises(Refused, match=f"belongs to user {OTHER_ID}"):
        send(here, there)
    assert list((there.local / "shared").iterdir()) == []
    os.chown(there.local / "shared", 0, 0)
    send(here, there)
    assert (there.local / "shared/deep/cache.so").read_text() == "content"


def test_refusal_that_quotes_a_name_of_any_bytes_can_be_sent(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("x\udcff")
    there.make("x\udcff", owner=OTHER_ID)
    with pytest.raises(Refused) as refused:
        send(here, there)
    assert rb"x\udcff" in encode(End(1, refused.value.status, refused.value.message))
    assert pb.AbortRequest(reason=refused.value.message).reason == str(refused.value)


def test_user_with_many_files_does_not_have_those_of_others_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_ledger, "_MOST", 100)
    ledger = ClosedLedger(tmp_path / "left.json")
    ledger.remember([(f"/tmp/few-{number}", SEEN) for number in range(10)], [], USER.user_id)
    for turn in range(3):
        ledger.remember([(f"/tmp/many-{turn}-{number}", SEEN) for number in range(200)], [], OTHER_ID)
    ledger.remember([("/tmp/long" + "x" * (256 * 200), SEEN)], [], OTHER_ID)
    for known in (ledger, ClosedLedger(tmp_path / "left.json")):
        assert [known.get(f"/tmp/few-{number}") for number in range(10)] == [SEEN] * 10
        assert known.get("/tmp/many-2-0") is None
    assert (tmp_path / "left.json").stat().st_size < 100 * 300


def test_ledger_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "left.json").write_text('{"/tmp/a": [1, 2, 3, 4, 5]}')
    ledger = ClosedLedger(tmp_path / "left.json")
    ledger.remember([("/tmp/b", SEEN)], [], USER.user_id)
    assert [ledger.get(path) for path in ("/tmp/a", "/tmp/b")] == [SEEN, SEEN]


@pytest.mark.parametrize("answer", ["[]," * closed_manifest.MAX_BRACKETS, " " * (closed_manifest.MAX_BYTES + 1)])
def test_answer_of_a_worker_that_would_fill_the_memory_is_not_decoded(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker reads what a user has made, and may have been taken over."""

    class TakenOver:
        def ask(self, _do: str, fds: Sequence[int], _size_bytes: int) -> tuple[dict[str, Any], list[int]]:
            os.write(fds[1], f"[{answer}[]]".encode())
            return {}, []

    def never(_: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("json.loads", never)
    with pytest.raises(Internal, match="malformed answer: too"):
        closed_requests.ask(cast(UserFiles, TakenOver()), "closed_same", {}, list[int])


# ---------------------------------------------------------------- a node


def test_list_that_takes_far_more_memory_than_text_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("json.loads", never)
    path = tmp_path / closed_manifest.FILE
    path.write_text('{"roots": [], "packs": [], "rows": [' + "[]," * closed_manifest.MAX_BRACKETS + "[]]}")
    with pytest.raises(Damaged, match="more lists than rows need"):
        closed_manifest.read_manifest(path)


def test_longest_list_that_a_look_finds_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = closed.Row(0, "x" * 300, "f", 0o777, 1 << 31, 1 << 60, 1 << 60, "", [1 << 60] * 5, True, None, 1, 1 << 40)
    one = len(msgspec.json.encode(row)) - len(row.path) + 2 * len(row)
    assert one * closed.MAX_ENTRIES + closed.MAX_NAMES_BYTES < closed_manifest.MAX_BYTES
    assert 3 * closed.MAX_ENTRIES < closed_manifest.MAX_BRACKETS
