"""Which record `migrator job resume` and `migrator job drop` act on."""

from __future__ import annotations

from typing import Any

import pytest

from migrator.cli import job
from migrator.jobs import finding
from migrator.jobs.finding import JobEntry, find_droppable, find_suspended
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Ambiguous, NotFound, SnapshotError, Unreachable

FIRST, SECOND, THIRD = (f"m-{number:012x}" for number in (1, 2, 3))


def entry(record: str, **more: Any) -> JobEntry:
    fields: dict[str, Any] = {"job": "night", "user_id": 7, "outcome": pb.COMMIT, "ended_unix_s": 5.0, **more}
    return JobEntry("node-1", pb.JobRecord(record=record, **fields))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> tuple[list[JobEntry], dict[str, SnapshotError]]:
    """The records that nodes list, and the nodes that do not answer."""
    found: list[JobEntry] = []
    silent: dict[str, SnapshotError] = {}

    async def all_jobs(cluster: Any) -> tuple[list[JobEntry], dict[str, SnapshotError]]:
        return found, silent

    monkeypatch.setattr(finding, "all_jobs", all_jobs)
    return found, silent


Known = tuple[list[JobEntry], dict[str, SnapshotError]]
CLUSTER: Any = None


async def test_suspended_job_is_found_by_name_and_by_record(known: Known) -> None:
    known[0].append(entry(FIRST))
    for find in (find_suspended, find_droppable):
        assert (await find(CLUSTER, "night", None))[1].record == FIRST
        assert (await find(CLUSTER, FIRST, None))[1].record == FIRST
        with pytest.raises(NotFound):
            await find(CLUSTER, "night", 8)


async def test_drop_that_is_not_finished_can_be_repeated(known: Known) -> None:
    known[0].append(entry(FIRST, ended_by="dropped: given up", ended_unix_s=0.0))
    assert (await find_droppable(CLUSTER, "night", None))[1].record == FIRST
    with pytest.raises(NotFound):
        await find_suspended(CLUSTER, "night", None)
    known[0][:] = [entry(FIRST, ended_by="dropped: given up")]
    with pytest.raises(NotFound):
        await find_droppable(CLUSTER, "night", None)


async def test_images_of_a_resumption_that_is_not_finished_can_be_dropped(known: Known) -> None:
    known[0].extend([entry(FIRST, ended_by=SECOND), entry(SECOND, suspension=FIRST, ended_unix_s=0.0)])
    assert (await find_droppable(CLUSTER, "night", None))[1].record == FIRST
    known[0][1].record.ended_unix_s = 6.0
    with pytest.raises(NotFound):
        await find_droppable(CLUSTER, "night", None)


async def test_a_suspended_job_comes_before_what_is_left_of_an_older_one(known: Known) -> None:
    known[0].extend([entry(FIRST, ended_by="dropped: given up", ended_unix_s=0.0), entry(THIRD)])
    assert (await find_droppable(CLUSTER, "night", None))[1].record == THIRD
    known[0].append(entry(SECOND, user_id=8))
    with pytest.raises(Ambiguous):
        await find_droppable(CLUSTER, "night", None)


async def test_drop_by_name_needs_all_nodes(known: Known) -> None:
    known[0].append(entry(FIRST))
    known[1]["node-2"] = Unreachable("node-2 does not answer")
    with pytest.raises(Unreachable, match="node-2 does not answer"):
        await find_droppable(CLUSTER, "night", None)
    assert (await find_droppable(CLUSTER, FIRST, None))[1].record == FIRST
    assert (await find_suspended(CLUSTER, "night", None))[1].record == FIRST


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"outcome": pb.UNDECIDED, "ended_unix_s": 0.0}, "suspending"),
        ({}, "suspended"),
        ({"outcome": pb.ABORT, "ended_unix_s": 0.0}, "undoing"),
        ({"outcome": pb.ABORT}, "undone"),
        ({"suspension": SECOND, "ended_unix_s": 0.0}, "resuming"),
        ({"suspension": SECOND}, "resumed"),
        ({"ended_by": SECOND}, "resumed"),
        ({"ended_by": "dropped: given up", "ended_unix_s": 0.0}, "dropping"),
        ({"ended_by": "dropped: given up"}, "dropped"),
    ],
)
def test_list_names_the_state(fields: dict[str, Any], state: str) -> None:
    assert job._state(entry(FIRST, **fields)) == state


def test_list_shows_the_size_of_the_images_and_the_number_of_ranks() -> None:
    parts = [pb.Participant(rank=rank, rank_uid=f"night-{rank}", node=f"node-{rank}") for rank in (0, 1)]
    sizes = {("node-0", "night-0"): 5 << 20, ("node-1", "night-1"): 1 << 20, ("node-2", "night-1"): 9}
    suspended = entry(FIRST, participants=parts, ranks=2)
    row = dict(zip(job.HEADS, job._row(suspended, sizes), strict=True))
    assert (row["SIZE"], row["RANKS"], row["IMAGES ON"]) == ("6.3 MB", "2", "node-0,node-1")
    assert job._to_json(suspended, sizes)["image_bytes"] == 6 << 20
    assert (row["ALSO VOTE"], job._to_json(suspended, sizes)["voters"]) == ("-", [])
    ended = dict(zip(job.HEADS, job._row(entry(FIRST, ended_by=SECOND, ranks=2), sizes), strict=True))
    assert (ended["SIZE"], ended["RANKS"], ended["IMAGES ON"]) == ("-", "2", "-")


def test_list_names_the_nodes_with_a_vote_beside_those_that_keep_images() -> None:
    part = pb.Participant(rank_uid="night-0", node="node-2", copy="m-0000000000bb", copy_node="node-3")
    voters = [pb.Voters(nodes=["node-1", "node-2", "node-3", "node-4", "node-5"])]
    taken = entry(FIRST, kind="snapshot", participants=[part], ranks=1, quorums=voters)
    row = dict(zip(job.HEADS, job._row(taken, {}), strict=True))
    assert (row["COORDINATOR"], row["IMAGES ON"], row["ALSO VOTE"]) == ("node-1", "node-2,node-3", "node-4,node-5")
    found = job._to_json(taken, {})
    assert found["voters"] == ["node-1", "node-2", "node-3", "node-4", "node-5"]
    assert found["ranks"][0]["copies"] == ["node-3"]
