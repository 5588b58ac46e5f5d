"""Typed records: everything that an older daemon journalled can be read, and what is marked reads back the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged
from snapshotd.moves import description
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.record import Fields, MoveRecord
from snapshotd.moves.record_parts import (
    ClusterNode,
    GateProcess,
    JobPart,
    JournalledProcess,
    Member,
    NcclProcess,
    OffloadedMemory,
    PeerSocket,
    SocketTimers,
    StripedProcess,
)
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.net.options import Kept
from snapshotd.proc.credentials import Identity
from snapshotd.proc.tree import Process

#: Written by the journal of the version before records were typed, with every key that it knew.
OLD = Path(__file__).parent / "old_journal"
TIMERS = SocketTimers(991, [(4242, 777, 12)], 7, 12, 0, True)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "state")
    return tmp_path / "state"


def test_old_source_journal_is_read(old: Path) -> None:
    log = Journal(old).get("m-000000000001")
    known = log.record
    assert (log.begin.rank_uid, log.begin.lease_s, log.nonce) == ("job-3-1f", 30.0, b"\x5a" * 32)
    assert (log.last_mark, log.committed, known.marked_unix_s) == (Mark.SETTLED, True, log.ended_unix_s)
    assert (known.root, known.keeper_role) == (Process(4242, 777), "home")
    assert known.cgroup == "/sys/fs/cgroup/snapshotd/ranks/job-3-1f"
    assert known.nodes[1] == ClusterNode("node-2", "10.0.0.2:7070", ["10.0.0.2/24", "fd00::2/64"])
    assert known.communicators == {
        "00112233445566aa": [Member("node-1", "job-3-1f", 7, 3), Member("node-2", "job-2-aa", 9, 2)]
    }
    assert (known.nccl_instances, known.attached) == ([(7, 1)], True)
    assert known.striped_processes == [StripedProcess(4242, 777, ["device-7-0", "device-7-1"], 64 << 20)]
    assert known.offloaded == [OffloadedMemory(7, ["device-7-0", "device-7-1"], [5, 6], 64 << 20)]
    assert (known.offloaded_bytes, known.device_bytes, known.gpu_uses) == (11, 1 << 30, {"GPU-a": 1 << 30})
    assert (known.stopped_before, known.filtered, known.new_connections_held) == ([11], True, True)
    assert (known.cuda_processes, known.nccl_processes) == ([JournalledProcess(4242, 777)], [NcclProcess(4242, 777, 1)])
    assert known.stdio == {"channels": [{"kind": "pipe", "key": "pipe[1234]"}]}
    assert [rewire.kind for rewire in known.rewires] == [pb.Rewire.PEER, pb.Rewire.LISTENER]
    assert known.rewires[0].new_local == pb.Endpoint(ip="10.0.0.3", port=40000)
    assert known.socket_options.options == [Kept(7, 12, {"SO_PRIORITY": "06000000"})]
    assert known.socket_options.timers == [TIMERS]
    assert (known.linked, known.carried) == ([("/tmp/x", 66, 1234)], ["/tmp/x/file"])
    assert (known.sent_bytes, known.pause_s, known.failure) == (123467, 1.25, "lost")
    assert (known.predicted_s, known.timing) == (
        1.5,
        pb.Timing(phases=[pb.Part(name="stream", seconds=0.75)], host_bytes=4096),
    )


def test_old_target_journal_is_read(old: Path) -> None:
    log = Journal(old).get("m-000000000002")
    known = log.record
    assert (log.last_mark, log.committed, log.begin.lease_s) == (Mark.ACTIVATED, True, 0.0)
    assert (known.gpu_pairs, known.gpus_reserved) == ([("GPU-b", "GPU-a")], ["GPU-a"])
    assert known.user_ids == [1500]
    assert (known.placed, known.ghosts) == (["/tmp/y"], [("/dev/shm/z", "/dev/shm/z.cr.1.ghost")])
    assert (known.made, known.rank_user) == ([("/tmp/y", 66, 1235)], (1500, 1500, (1502,)))
    assert (known.rewires, known.filtered) == ([], True)  # it journalled the number of filtered connections
    assert (known.root, known.keeper_role, known.gates_opened) == (Process(5151, 888), "guest", True)
    assert known.nccl_processes == [NcclProcess(5151, 888, 2)]


def test_old_overruled_outcome_is_read(old: Path) -> None:
    log = Journal(old).get("m-000000000003")
    assert log.outcome is not None
    assert (log.outcome.outcome, log.outcome.decided_by, log.aborted) == (Outcome.ABORT, "target", True)
    assert (log.last_mark, log.ended_unix_s) == (Mark.BEGUN, 0.0)


def test_old_name_of_a_mark_is_read(old: Path) -> None:
    marks = old / "peer/moves/m-000000000004/marks"
    marks.write_text(marks.read_text().splitlines(keepends=True)[0])
    assert '"braced"' in marks.read_text()
    assert Journal(old / "peer").get("m-000000000004").last_mark is Mark.TIMEOUTS_SUSPENDED


def test_old_peer_and_gate_journals_are_read(old: Path) -> None:
    peer = Journal(old / "peer").get("m-000000000004")
    assert peer.last_mark is Mark.REPOINTED
    assert peer.record.socket_timers == [TIMERS]
    pairs = (
        ("10.0.0.2:29500", "10.0.0.9:40000"),
        ("10.0.0.2:29500", "10.0.0.1:40000"),
        ("10.0.0.2:29500", "10.0.0.3:40000"),
    )
    assert peer.record.peer_sockets == [PeerSocket(991, [(4242, 777, 12)], *pairs)]
    gate = Journal(old / "gate").get("m-000000000005")
    assert gate.last_mark is Mark.GATED
    assert gate.record.gate_processes == [GateProcess("job-2-aa", 2, 9, 7070, 1111)]


def test_job_record_is_read(old: Path) -> None:
    log = Journal(old / "job").get("m-000000000006")
    assert (log.last_mark, log.whole().suspension) == (Mark.SETTLED, "m-000000000009")
    nodes = ("spare-1", "10.0.0.3:7070", "m-000000000008", "node-1", "10.0.0.1:7070")
    assert log.whole().participants == [JobPart("job-3-1f", 3, "m-000000000007", *nodes)]


def test_old_journal_has_every_key_that_was_ever_written() -> None:
    """So that the tests above cannot pass because the fixture lacks a field."""
    written = {key for path in OLD.rglob("marks") for line in path.read_text().splitlines() for key in json.loads(line)}
    assert written == {field.encode_name for field in msgspec.structs.fields(MoveRecord)}


def test_fields_of_a_mark_are_those_of_the_record() -> None:
    """`Fields` exists for the type checker: it must not drift from the record."""
    of_record = get_type_hints(MoveRecord)
    del of_record["mark"], of_record["marked_unix_s"]
    assert get_type_hints(Fields) == of_record


def test_every_field_reads_back_as_it_was_marked(old: Path, tmp_path: Path) -> None:
    for source in [*Journal(old).all(), *Journal(old / "peer").all(), *Journal(old / "gate").all()]:
        copy = Journal(tmp_path / "copy").begin(source.begin)
        fields: dict[str, Any] = {name: getattr(source.record, name) for name in get_type_hints(Fields)}
        copy.mark(source.last_mark, **fields)
        again = MoveLog.read(copy.folder)
        assert again.record == copy.record
        assert msgspec.structs.replace(again.record, marked_unix_s=0.0) == msgspec.structs.replace(
            source.record, marked_unix_s=0.0, mark=source.last_mark
        )


def test_record_is_read_from_memory_not_from_disk(old: Path) -> None:
    log = Journal(old).get("m-000000000003")
    shutil.rmtree(log.folder)
    assert (log.last_mark, log.aborted, log.record.pid) == (Mark.BEGUN, True, 6161)


def test_file_names_that_are_not_utf8_survive(old: Path) -> None:
    log = Journal(old).get("m-000000000001")
    log.mark(Mark.SETTLED, carried=["/tmp/\udcff"])
    assert Journal(old).get("m-000000000001").record.carried == ["/tmp/\udcff"]


class Text(str):
    __slots__ = ()


def test_subclasses_of_text_are_journalled_as_text(old: Path, tmp_path: Path) -> None:
    begin = msgspec.structs.replace(Journal(old).get("m-000000000001").begin, target_endpoint=Text("10.0.0.3:7070"))
    Journal(tmp_path / "copy").begin(begin)
    assert Journal(tmp_path / "copy").get(begin.move).begin == begin


@pytest.mark.parametrize(
    ("file", "content"),
    [("marks", '{"mark": "frozen", "pid": "7"}\n'), ("marks", "[]\n"), ("outcome.json", "{}"), ("begin.json", "[")],
)
def test_unreadable_journal_is_named(old: Path, file: str, content: str) -> None:
    path = old / "moves" / "m-000000000001" / file
    path.write_text(content)
    with pytest.raises(Damaged, match=str(path)):
        Journal(old)


def test_description_of_a_source_without_offloaded_memory_is_read() -> None:
    """A version that could not offload device memory sends no such fields."""
    sent = {
        "root": 7,
        "command": "train.py",
        "started_unix_s": 1.5,
        "moves": 0,
        "user_id": 1000,
        "identity": {"user_id": 1000, "group_id": 100, "groups": [4, 27]},
        "stopped_before": [],
        "affinity": {"7": [0, 1]},
        "cpus": [0, 1],
        "other_names": {},
        "stdio": {"channels": [], "in": {"o": 0, "unread": "", "eof": True}, "signals": {"last": 0, "queued": []}},
        "relay_key": "k",
        "carried": [{"path": "/tmp/x", "size": "5", "mode": 33152, "mtime_ns": "1700000000000000000"}],
        "home_node": "a",
        "home_endpoint": "a:1",
        "rewires": [{"kind": "LISTENER"}],
        "nodes": [["a", "a:1", []]],
        "former": [["10.0.0.1:5", "10.0.0.2:5"]],
        "sockets": {},
        "cuda": [7],
        "device_bytes": 1 << 30,
        "nccl": [],
    }
    found = description.decode(json.dumps(sent).encode())
    assert (found.offloaded, found.by_device_channel, found.affinity) == ([], False, {7: [0, 1]})
    assert (found.carried[0].size, found.carried[0].mtime_ns) == (5, 17 * 10**17)
    assert description.decode(found.encode()) == found
    assert found.identity == Identity(1000, 100, (4, 27))
    for key in ("identity", "user_id", "stdio"):  # neither the rank's identity nor what its keeper sent has a default
        with pytest.raises(Damaged, match=key):
            description.decode(json.dumps({name: value for name, value in sent.items() if name != key}).encode())
    with pytest.raises(Damaged, match="identity"):
        description.decode(json.dumps(sent | {"identity": {"user_id": -1, "group_id": 0, "groups": []}}).encode())


def test_description_that_is_not_one_is_damaged() -> None:
    for content in (b"", b"[]", b'{"root": 7}', b"\xff"):
        with pytest.raises(Damaged):
            description.decode(content)


def test_job_is_named_by_its_user_and_its_name(old: Path) -> None:
    before = Journal(old).get("m-000000000001").begin
    assert before.user_id == -1
    assert before.is_of_job(1500, before.job)  # an older version did not journal whose it is: it may be
    alices, bobs = (msgspec.structs.replace(before, user_id=user_id) for user_id in (1500, 1501))
    assert alices.is_of_job(1500, before.job)
    assert not alices.is_of_job(1501, before.job)
    assert not alices.is_of_job(1500, "other")
    assert not alices.same_request(bobs)
    assert alices.same_request(before)
