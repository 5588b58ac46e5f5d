"""Where the copies of a snapshot lie, and where ranks come back after a rollback."""

from __future__ import annotations

import itertools

import pytest

from migrator.jobs import buddies
from migrator.jobs.rollback import Place, targets
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused
from snapshotd.moves import job_rules


def test_buddies_are_a_ring() -> None:
    assert buddies.choose(["a", "b", "c"], ["a", "b", "c", "d"]) == [["b"], ["c"], ["a"]]
    assert buddies.choose(["a", "a", "b"], ["a", "b"]) == [["b"], ["b"], ["a"]], "never the rank's own node"


def test_job_on_one_node_has_a_buddy_outside() -> None:
    assert buddies.choose(["a", "a"], ["a", "b"]) == [["b"], ["b"]]
    with pytest.raises(Refused, match="only node"):
        buddies.choose(["a"], ["a"])


def test_buddy_is_in_another_rack_if_there_is_one() -> None:
    racks = {"a": {"rack": "1"}, "b": {"rack": "1"}, "c": {"rack": "2"}}
    assert buddies.choose(["a", "b", "c"], ["a", "b", "c"], racks) == [["c"], ["c"], ["a"]]
    assert buddies.choose(["a", "b"], ["a", "b"], racks) == [["b"], ["a"]], "there is no other"


def test_two_copies_are_the_next_two_of_the_ring_and_then_nodes_outside() -> None:
    assert buddies.choose(["a", "b", "c"], ["a", "b", "c", "d"], copies=2) == [["b", "c"], ["c", "a"], ["a", "b"]]
    outside = buddies.choose(["a", "b"], ["a", "b", "x", "y"], copies=2)
    assert outside == [["b", "x"], ["a", "y"]], "each node of the job begins with another one outside of it"
    assert buddies.choose(["a", "a"], ["a", "b", "c", "d"], copies=3) == [["b", "c", "d"]] * 2


def test_copies_are_in_as_many_racks_as_there_are() -> None:
    racks = {node: {"rack": rack} for node, rack in zip("abcdef", "112233", strict=True)}
    chosen = buddies.choose(list("abcdef"), list("abcdef"), racks, copies=2)
    assert chosen[0] == ["c", "e"]
    for node, mine in zip("abcdef", chosen, strict=True):
        assert {racks[one]["rack"] for one in (node, *mine)} == {"1", "2", "3"}
    two = {node: {"rack": rack} for node, rack in zip("abc", "112", strict=True)}
    assert buddies.choose(["a"], list("abc"), two, copies=2) == [["c", "b"]], "the copy in another rack comes first"
    del racks["d"], racks["f"]
    assert buddies.choose(["a"], list("abcdef"), racks, copies=2) == [["c", "e"]], "not where the rack is not known"


@pytest.mark.parametrize(
    ("nodes", "copies", "said"),
    [
        ("ab", 2, "need 3 nodes, and 2 answer: a, b. --copies 1 is possible now"),
        ("abc", 5, "need 6 nodes, and 3 answer: a, b, c. --copies 2 is possible now"),
        ("a", 2, "need 3 nodes, and 1 answers: a"),
    ],
)
def test_too_few_nodes_are_refused_with_the_arithmetic(nodes: str, copies: int, said: str) -> None:
    with pytest.raises(Refused) as refused:
        buddies.choose(["a", "a"], list(nodes), copies=copies)
    assert refused.value.message.endswith(said)
    assert "migrator cluster add" in refused.value.advice
    assert len(buddies.choose(["a"], list("abcdef")[: copies + 1], copies=copies)[0]) == copies


def test_witnesses_leave_a_majority_when_as_many_nodes_are_lost_as_there_are_copies() -> None:
    nodes = list("abcdefgh")
    for copies in (1, 2, 3):
        for keepers in range(copies + 1, len(nodes) + 1):
            voters = {*nodes[:keepers], *buddies.witnesses(nodes[:keepers], nodes, copies)}
            for lost in itertools.combinations(sorted(voters), copies):
                assert job_rules.is_majority(voters, voters - set(lost)), (copies, keepers)


def test_witnesses_that_do_not_help_are_not_asked() -> None:
    assert buddies.witnesses("ab", list("abcde"), 1) == ["c"]
    assert buddies.witnesses("ab", list("ab"), 1) == [], "there is none: an operator decides"
    assert buddies.witnesses("abc", list("abcde"), 1) == [], "three bear the loss of one"
    assert buddies.witnesses("abc", list("abcd"), 2) == [], "four bear the loss of one, as three do"
    assert buddies.witnesses("abcd", list("abcde"), 2) == ["e"]
    assert buddies.witnesses("abcdef", list("abcdefgh"), 2) == []


def test_witness_is_in_a_rack_without_images_if_there_is_one() -> None:
    racks = {node: {"rack": rack} for node, rack in zip("abcdef", "122133", strict=True)}
    assert buddies.witnesses("ab", list("abcdef"), 1, racks) == ["e"], "the rack of neither"
    assert buddies.witnesses("ab", list("abdc"), 1, racks) == ["c"], "rather that of the buddy than the coordinator's"
    assert buddies.witnesses("ba", list("abcd"), 1, racks) == ["d"], "the coordinator is the first"
    assert buddies.witnesses("ab", list("abxy"), 1, racks) == ["x"], "the first, if no rack is known"
    assert buddies.witnesses("abd", list("abcdefg"), 2, racks) == ["e", "c"], "apart from each other, too"


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
