"""The node of a copy believes the coordinator of the job, not the node that has the rank, about whose copy it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused, WrongState
from snapshotd.moves.jobs import listing, replicas
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import ImageCopy, JobPart
from snapshotd.moves.rules import Mark
from snapshotd.moves.target import copies, steps
from snapshotd.transport.image.spill import SpillingStore

RECORD, COPY, MINE, VICTIM = (f"m-{number:012x}" for number in (1, 2, 3, 4))
PART = JobPart("night-1-00000001", 1, MINE, "node-1", "e", copy=COPY, copy_node="node-2", copy_endpoint="e")


class Buddy:
    """node-2, which keeps copies, and its coordinator, node-3, whose version may be too old to name ranks."""

    def __init__(self, folder: Path, *, names: bool = True, user_id: int = 7) -> None:
        here = ("node-3", "e", "node-3", "e", "00" * 32, "boot", 1.0)
        self.record = Journal(folder / "coordinator").begin(
            Begin(RECORD, "job", "", "night", 0, *here, user_id=user_id)
        )
        self.record.mark(Mark.BEGUN, participants=[PART])
        self.names, self.given_up = names, False
        self.images = folder / "images"
        self.journal, self.store = Journal(folder / "state"), SpillingStore(self.images)
        config = SimpleNamespace(node="node-2", advertise="e")
        self.node: Any = SimpleNamespace(config=config, journal=self.journal, store=self.store, client=self._client)

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        async def outcome(request: pb.MoveRequest, timeout_s: float) -> pb.Outcome:
            found = pb.Outcome(kind=pb.UNDECIDED)
            if request.part and self.names:
                listing.name_part(found, self.record, request.part)
            return found

        assert name == "node-3"
        yield SimpleNamespace(job=SimpleNamespace(GetOutcome=outcome))

    async def prepare(self, **claimed: Any) -> Any:
        fields: dict[str, Any] = {"uid": PART.rank_uid, "job": "night", "rank": 1, "user_id": 7, **claimed}
        request = pb.PrepareRequest(
            move=COPY,
            facts=pb.RankFacts(rank=pb.Rank(**fields), source_node="node-1", memory_bytes=4096),
            source_endpoint="e",
            coordinator=pb.Coordinator(record=RECORD, node="node-3", endpoint="e"),
            keep=True,
        )

        async def meet(name: str, endpoint: str) -> None:
            pass

        async def wanted() -> None:
            if self.given_up:
                raise WrongState("the snapshot has ended")

        signatures: Any = SimpleNamespace(meet=meet)
        return await copies.prepare(self.node, signatures, request, wanted)

    def keeps(self) -> Path:
        """The copy of a rank, from an earlier snapshot that node-3 coordinates too."""
        names = ("target", PART.rank_uid, "night", 1, "node-1", "e", "node-2", "e", "00" * 32, "boot", 1.0)
        begin = Begin(VICTIM, *names, user_id=7, coordinator="m-0000000000ff", coordinator_node="node-3", kind="copy")
        self.journal.begin(begin)
        image = self.images / VICTIM
        image.mkdir(parents=True)
        (image / ".sealed").write_text("[]")
        self.node.store = SpillingStore(self.images)
        return image


@pytest.mark.parametrize("claimed", [{"uid": "victim-1"}, {"job": "victim"}, {"user_id": 8}, {"rank": 2}])
async def test_copy_under_the_name_of_another_rank_is_refused(tmp_path: Path, claimed: dict[str, Any]) -> None:
    buddy = Buddy(tmp_path)
    with pytest.raises(Refused, match=f"node-3, the coordinator of the job, does not know {COPY}"):
        await buddy.prepare(**claimed)
    assert not buddy.journal.all()
    assert not buddy.store.moves()


async def test_copy_of_a_snapshot_that_was_given_up_meanwhile_keeps_no_room(tmp_path: Path) -> None:
    buddy = Buddy(tmp_path)
    buddy.given_up = True
    with pytest.raises(WrongState, match="the snapshot has ended"):
        await buddy.prepare()
    assert not buddy.journal.all()
    assert not buddy.store.moves()


async def test_second_copy_is_named_as_well_and_on_its_own_node_only(tmp_path: Path) -> None:
    buddy = Buddy(tmp_path)
    first = {"copy": VICTIM, "copy_node": "node-5", "copy_endpoint": "e"}
    part = msgspec.structs.replace(PART, **first, more_copies=(ImageCopy(COPY, "node-2", "e"),))
    buddy.record.mark(Mark.BEGUN, participants=[part])
    said = pb.Outcome()
    listing.name_part(said, buddy.record, COPY)
    assert (said.participant.copy, said.participant.copy_node) == (COPY, "node-2"), "older daemons compare these"
    await buddy.prepare()
    assert [log.move for log in buddy.journal.all()] == [COPY]
    elsewhere = Buddy(tmp_path / "elsewhere")
    elsewhere.node.config.node = "node-5"
    elsewhere.record.mark(Mark.BEGUN, participants=[part])
    with pytest.raises(Refused, match="on node-5"):
        await elsewhere.prepare()


def test_copies_are_journalled_and_sent_as_they_were_given() -> None:
    part = msgspec.structs.replace(PART, more_copies=(ImageCopy(VICTIM, "node-3", "f"),))
    assert JobPart.of(part.to_proto()) == part
    assert msgspec.json.decode(msgspec.json.encode(part), type=JobPart) == part
    assert [(copy.move, copy.node) for copy in part.copies] == [(COPY, "node-2"), (VICTIM, "node-3")]
    assert JobPart.of(pb.Participant(made_on="node-1")).to_proto().made_on == "node-1"
    assert JobPart("u", 0, MINE, "node-1", "e").copies == ()
    assert PART.copies == (ImageCopy(COPY, "node-2", "e"),), "a record that was journalled before"


async def test_node_of_a_copy_knows_how_many_the_job_is_to_have(tmp_path: Path) -> None:
    """A successor of the coordinator learns it from there."""
    buddy = Buddy(tmp_path)
    buddy.record.mark(Mark.BEGUN, asked_copies=2)
    await buddy.prepare()
    assert buddy.journal.get(COPY).whole().asked_copies == 2


async def test_node_of_a_copy_says_that_it_keeps_its_signature(tmp_path: Path) -> None:
    """Older versions do not. The driver warns of their copies."""
    assert steps._prepared(await Buddy(tmp_path).prepare()).keeps_signatures


async def test_copy_that_is_meant_for_another_node_or_is_no_copy_is_refused(tmp_path: Path) -> None:
    buddy = Buddy(tmp_path)
    buddy.node.config.node = "node-4"
    with pytest.raises(Refused, match="on node-4"):
        await buddy.prepare()
    buddy.node.config.node = "node-2"
    buddy.record.mark(Mark.BEGUN, participants=[])
    with pytest.raises(Refused, match="does not know"):
        await buddy.prepare()


async def test_copy_that_the_coordinator_names_uses_earlier_copies_of_that_rank(tmp_path: Path) -> None:
    buddy = Buddy(tmp_path)
    earlier = buddy.keeps()
    await buddy.prepare()
    assert list(replicas.images_for(buddy.node, COPY)[1]) == [earlier]


async def test_copy_that_an_older_coordinator_cannot_name_is_kept_and_uses_no_image(tmp_path: Path) -> None:
    buddy = Buddy(tmp_path, names=False)
    buddy.keeps()
    assert (await buddy.prepare()).begin.user_id == -1
    assert list(replicas.images_for(buddy.node, COPY)[1]) == []


async def test_record_of_an_old_journal_that_does_not_say_whose_it_is_names_no_rank(tmp_path: Path) -> None:
    buddy = Buddy(tmp_path, user_id=-1)
    assert (await buddy.prepare()).begin.user_id == -1
