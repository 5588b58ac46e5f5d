"""Where the copies of a snapshot lie, and where ranks come back after a rollback."""

from __future__ import annotations

import pytest

from migrator.jobs import buddies
from migrator.jobs.rollback import Place, targets
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused


def test_buddies_are_a_ring() -> None:
    assert buddies.choose(["a", "b", "c"], ["a", "b", "c", "d"]) == ["b", "c", "a"]
    assert buddies.choose(["a", "a", "b"], ["a", "b"]) == ["b", "b", "a"], "never the rank's own node"


def test_job_on_one_node_has_a_buddy_outside() -> None:
    assert buddies.choose(["a", "a"], ["a", "b"]) == ["b", "b"]
    with pytest.raises(Refused, match="only node"):
        buddies.choose(["a"], ["a"])


def test_buddy_is_in_another_rack_if_there_is_one() -> None:
    racks = {"a": {"rack": "1"}, "b": {"rack": "1"}, "c": {"rack": "2"}}
    assert buddies.choose(["a", "b", "c"], ["a", "b", "c"], racks) == ["c", "c", "a"]
    assert buddies.choose(["a", "b"], ["a", "b"], racks) == ["b", "a"], "there is no other"


def record() -> pb.JobRecord:
    parts = [pb.Participant(rank=rank, node=node) for rank, node in enumerate(("a", "b"))]
    return pb.JobRecord(participants=parts)


PLACES = {rank: Place("a", pb.RankFacts(source_node=node)) for rank, node in enumerate(("a", "b"))}


def test_ranks_come_back_where_they_were_or_on_a_spare() -> None:
    assert targets(record(), PLACES, ["a", "b", "c"], {}, {}) == {0: "a", 1: "b"}
    assert targets(record(), PLACES, ["a", "c", "d"], {}, {}) == {0: "a", 1: "c"}
    assert targets(record(), PLACES, ["a", "c", "d"], {}, {"d": {"spare": "dedicated"}}) == {0: "a", 1: "d"}
    assert targets(record(), PLACES, ["a", "c"], {1: "a"}, {}) == {0: "a", 1: "a"}, "an operator chooses"
    assert targets(record(), PLACES, ["a"], {}, {}) == {0: "a", 1: "a"}, "without a spare, where its image is"
