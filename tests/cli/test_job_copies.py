"""A snapshot with several copies: which daemons are asked for what, and what is said if there is no room."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from migrator import jobs
from migrator.find_rank import Found
from migrator.image_copies import copies_of, nodes_of, set_copies
from migrator.job_results import JobOptions
from migrator.jobs.finding import JobEntry
from migrator.jobs.snapshot import Snapshot
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Full, Refused, Undone, Unreachable

RANKS = [pb.Rank(uid=f"night-{number}", job="night", rank=number, user_id=7) for number in (0, 1)]
FOUND = [Found(f"node-{rank.rank + 1}", rank) for rank in RANKS]


class Cluster:
    """Five nodes, which answer what the test says."""

    def __init__(self, snapshot_copies: int = 1) -> None:
        self.nodes = {f"node-{number}": f"10.0.0.{number}:7070" for number in range(1, 6)}
        self.labels: dict[str, dict[str, str]] = {}
        self.snapshot_copies = snapshot_copies
        self.silent: set[str] = set()
        self.full: set[str] = set()
        self.old: set[str] = set()  # nodes that do not sign images, and keep no signatures
        self.asked: list[tuple[str, str, str]] = []  # node, call, move
        self.begun = pb.BeginJobRequest()
        self.protocols: dict[str, pb.Protocol] = {}  # of nodes of other versions
        self.oldest = protocol.OLDEST  # that a target of the ranks may speak
        self.not_asked: list[str] = []
        self.outcomes: list[pb.Outcome] = []  # the last of them from then on

    @asynccontextmanager
    async def client(self, node: str) -> AsyncIterator[Any]:
        async def inspect(request: pb.InspectRequest, timeout_s: float) -> pb.InspectReply:
            (rank,) = [rank for rank in RANKS if rank.uid == request.rank_uid]
            said = pb.Protocol(newest=protocol.NEWEST, oldest=self.oldest)
            facts = pb.RankFacts(rank=rank, source_node=node, protocol=said)
            return pb.InspectReply(facts=facts, signs_images=node not in self.old)

        async def begin(request: pb.BeginJobRequest, timeout_s: float) -> pb.BeginJobReply:
            self.begun.CopyFrom(request)
            return pb.BeginJobReply(not_asked=self.not_asked)

        async def outcome(request: pb.MoveRequest, timeout_s: float) -> pb.Outcome:
            return self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]

        async def prepare(request: pb.PrepareRequest, timeout_s: float) -> pb.PrepareReply:
            self.asked.append((node, "prepare", request.move))
            if node in self.full:
                raise Full(f"{request.move} needs 40 MiB for its images, 30 MiB are free")
            return pb.PrepareReply(
                nonce=node.encode(), finds_blocks=node == "node-3", keeps_signatures=node not in self.old
            )

        async def send(request: pb.SendRequest, timeout_s: float) -> AsyncIterator[pb.Progress]:
            if request.only_wait:
                await asyncio.sleep(0.01)
                self.asked.append((node, "whole", request.image))
                yield pb.Progress(done=True)
                return
            assert (request.nonce, request.offer_blocks) == (
                request.target_node.encode(),
                request.target_node == "node-3",
            )
            self.asked.append((request.target_node, "send", request.move))
            if request.target_node in self.silent:
                raise Unreachable(f"{request.target_node} does not answer")
            yield pb.Progress(bytes_sent=3, bytes_found=4, bytes_expected=7, done=True)

        async def activate(request: pb.TokenRequest, timeout_s: float, retry: bool) -> pb.ActivateReply:
            self.asked.append((node, "keep", request.move))
            return pb.ActivateReply(running=node not in self.silent)

        async def discard(request: pb.TokenRequest, timeout_s: float) -> pb.DiscardReply:
            self.asked.append((node, "discard", request.move))
            if node in self.silent:
                raise Unreachable(f"{node} does not answer")
            return pb.DiscardReply()

        yield SimpleNamespace(
            source=SimpleNamespace(Inspect=inspect, Send=send),
            target=SimpleNamespace(Prepare=prepare, Activate=activate, Discard=discard),
            job=SimpleNamespace(Begin=begin, GetOutcome=outcome),
        )

    def asked_for(self, call: str) -> list[tuple[str, str]]:
        return sorted((node, move) for node, what, move in self.asked if what == call)


@pytest.fixture(autouse=True)
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def infos(cluster: Any) -> dict[str, pb.NodeInfo]:
        answering = [node for node in cluster.nodes if node not in cluster.silent]
        spoken = {node: cluster.protocols.get(node, protocol.own()) for node in answering}
        return {node: pb.NodeInfo(name=node, protocol=spoken[node]) for node in answering}

    async def addresses(cluster: Any, infos: Any) -> list[pb.NodeAddresses]:
        return []

    async def no_gates(gates: Any, description: Any, nodes: Any) -> list[pb.Check]:
        return []

    module = sys.modules["migrator.jobs.suspend"]
    monkeypatch.setattr(module, "node_infos", infos)
    monkeypatch.setattr(module, "node_addresses", addresses)
    monkeypatch.setattr(module.JobGates, "check", no_gates)


async def inspected(cluster: Any, copies: int | None = None, before: int = 0) -> Snapshot:
    run = Snapshot(cluster, JobOptions("night", copies=copies), FOUND, "node-1", lambda event: None, before)
    await run.inspect(1.0)
    return run


def test_the_first_copy_has_fields_of_its_own() -> None:
    part = pb.Participant()
    assert copies_of(part) == []
    for count in (3, 1):
        set_copies(part, [pb.ImageCopy(move=f"m-{number}", node=f"n{number}", endpoint="e") for number in range(count)])
        assert (part.copy, part.copy_node, part.copy_endpoint) == ("m-0", "n0", "e")
        assert nodes_of(part) == [f"n{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("of_file", "before", "asked", "count"),
    [(1, 0, None, 1), (2, 0, None, 2), (2, 0, 1, 1), (1, 0, 3, 3), (1, 2, None, 2), (3, 1, None, 1), (1, 2, 3, 3)],
)
async def test_number_of_copies_is_that_of_the_option_or_as_before_or_of_the_cluster_file(
    of_file: int, before: int, asked: int | None, count: int
) -> None:
    cluster = Cluster(of_file)
    run = await inspected(cluster, asked, before)
    assert [len(copies_of(part)) for part in run.participants] == [count, count]
    await run.begin_job(1.0)
    assert cluster.begun.copies == (asked or before), "that of the cluster file is not one for this job"
    await run.close()


@pytest.mark.parametrize("leaves", [False, True])
async def test_number_that_was_asked_for_before_is_that_of_the_last_snapshot(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the coordinator hands it over first, because it has no rank of the job any more."""
    parts = [pb.Participant(rank_uid=rank.uid, rank=rank.rank) for rank in RANKS]
    record = pb.JobRecord(record="m-1", job="night", kind="snapshot", outcome=pb.COMMIT, participants=parts, copies=2)
    known: list[JobEntry] = [JobEntry("node-5" if leaves else "node-2", record)]

    async def snapshot_of(cluster: Any, uids: Any) -> JobEntry | None:
        return known[0] if known else None

    async def hand_over(cluster: Any, entry: JobEntry, successor: str) -> JobEntry:
        return JobEntry(successor, entry.record)

    monkeypatch.setattr(jobs, "snapshot_of", snapshot_of)
    monkeypatch.setattr(jobs, "hand_over", hand_over)
    cluster: Any = Cluster()
    assert await jobs._coordinator(cluster, FOUND) == ("node-1" if leaves else "node-2", 2)
    known.clear()
    assert await jobs._coordinator(cluster, FOUND) == ("node-1", 0)


async def test_every_copy_is_prepared_sent_kept_and_discarded() -> None:
    cluster = Cluster()
    run = await inspected(cluster, 2)
    places = {place.rank: place.copies for place in run.places()}
    assert places == {0: ("node-2", "node-3"), 1: ("node-1", "node-4")}
    await run.begin_job(1.0)
    assert list(cluster.begun.witnesses) == ["node-5"]
    assert list(cluster.begun.participants) == run.participants
    for step in (run.prepare, run.send, run.keep, run.discard):
        await step(1.0)
    everyone = sorted((copy.node, copy.move) for part in run.participants for copy in copies_of(part))
    assert len({move for _, move in everyone}) == 4
    for call in ("prepare", "send", "keep", "discard"):
        assert cluster.asked_for(call) == everyone, call
    calls = [call for _, call, _ in cluster.asked if call in {"whole", "send"}]
    assert calls == ["whole"] * 2 + ["send"] * 4, "no copy before all images are whole: what they have is not sent"
    assert (run.copied_bytes, sum(found for _, found, _ in run.bytes.values())) == (12, 16)
    await run.close()


async def test_record_has_the_node_that_makes_each_image_if_it_signs() -> None:
    cluster = Cluster()
    cluster.old = {"node-2"}
    run = await inspected(cluster)
    await run.begin_job(1.0)
    assert [part.made_on for part in cluster.begun.participants] == ["node-1", ""]
    await run.prepare(1.0)
    await run.send(1.0)
    assert cluster.asked_for("whole") == [("node-1", run.participants[0].move)], "an older daemon would refuse that"
    await run.close()


@pytest.mark.parametrize(
    ("old", "named"), [((), []), (("node-3", "node-4"), ["node-3", "node-4"]), (("node-1", "node-3"), ["node-1"])]
)
async def test_nodes_that_keep_no_signature_are_named(old: tuple[str, ...], named: list[str]) -> None:
    """A copy of an image that is not signed, as that of an old node-1, is not refused for that."""
    cluster = Cluster()
    cluster.old = set(old)
    run = await inspected(cluster, 2)
    assert {place.rank: place.copies for place in run.places()} == {0: ("node-2", "node-3"), 1: ("node-1", "node-4")}
    await run.prepare(1.0)
    assert run.unsigned_on == named
    said = [f"a rollback will refuse the copies on {', '.join(named)}: an older version"] if named else []
    assert [warning[: len(text)] for warning, text in zip(run.warnings, said, strict=True)] == said
    assert all("Install the new version there, then take a snapshot" in warning for warning in run.warnings)
    await run.close()


@pytest.mark.parametrize("shares", [True, False])
async def test_nodes_that_are_too_old_for_shared_device_memory_are_named(*, shares: bool) -> None:
    cluster = Cluster()
    cluster.oldest = protocol.SHARED_DEVICE_MEMORY if shares else protocol.OLDEST
    cluster.protocols = {"node-3": pb.Protocol(newest=protocol.SHARED_DEVICE_MEMORY - 1, oldest=protocol.OLDEST)}
    run = await inspected(cluster, 2)
    await run.prepare(1.0)
    said = "a rollback will refuse node-3 for ranks whose processes share device memory"
    assert [warning[: len(said)] for warning in run.warnings] == [said] * shares
    await run.close()


async def test_two_nodes_that_keep_images_have_a_witness() -> None:
    cluster = Cluster()
    run = await inspected(cluster)
    await run.begin_job(1.0)
    assert list(cluster.begun.witnesses) == ["node-3"]
    assert all(not part.more_copies for part in cluster.begun.participants)
    await run.close()


async def test_node_of_a_version_that_does_not_fit_has_no_vote() -> None:
    cluster = Cluster()
    cluster.protocols = {"node-3": pb.Protocol(), "node-5": pb.Protocol(newest=9, oldest=9)}
    run = await inspected(cluster)
    await run.begin_job(1.0)
    assert (list(cluster.begun.witnesses), list(cluster.begun.stand_ins)) == (["node-4"], [])
    assert run.warnings == []
    await run.close()
    cluster.protocols["node-4"] = pb.Protocol()
    run = await inspected(cluster)
    (warning,) = run.warnings
    assert warning.startswith("node-3, node-4, node-5 cannot have a vote on job night, because of another version")
    await run.close()


async def test_coordinator_may_take_another_witness_and_says_if_it_has_none() -> None:
    cluster = Cluster()
    cluster.not_asked = ["node-3 (no answer)"]
    run = await inspected(cluster)
    await run.begin_job(1.0)
    assert list(cluster.begun.stand_ins) == ["node-4", "node-5"]
    (warning,) = run.warnings
    assert warning.startswith("node-1 cannot ask node-3 (no answer), so too few nodes have a vote on job night")
    assert "then take another snapshot" in warning
    await run.close()


async def test_snapshot_is_reported_when_all_that_have_a_vote_have_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.outcomes = [pb.Outcome(), pb.Outcome(settled=True, not_told=["node-3"]), pb.Outcome(settled=True)]
    run = await inspected(cluster)
    await run.confirm(1.0)
    assert (len(cluster.outcomes), run.warnings) == (1, [])
    cluster.outcomes = [pb.Outcome(settled=True, not_told=["node-3"])]
    monkeypatch.setattr(sys.modules["migrator.jobs.snapshot"], "CONFIRMED_S", 0.2)
    await run.confirm(1.0)
    (warning,) = run.warnings
    assert warning.startswith("node-3 has a vote on job night, and has not promised node-1 to follow it")
    assert "Start snapshotd of this version there" in warning
    cluster.outcomes = [pb.Outcome(reason="rank 1 is not bound")]
    with pytest.raises(Undone, match="rank 1 is not bound"):
        await run.confirm(1.0)
    await run.close()


async def test_witness_is_in_another_rack_than_the_nodes_that_keep_images() -> None:
    cluster = Cluster()
    cluster.labels = {f"node-{number}": {"rack": rack} for number, rack in enumerate("11112", 1)}
    cluster.labels["node-2"] = {"rack": "3"}
    run = await inspected(cluster)
    await run.begin_job(1.0)
    assert list(cluster.begun.witnesses) == ["node-5"]
    await run.close()


async def test_node_that_does_not_answer_gets_no_copy_and_too_few_are_refused() -> None:
    cluster = Cluster()
    cluster.silent = {"node-3"}
    run = await inspected(cluster, 2)
    assert {place.rank: place.copies for place in run.places()} == {0: ("node-2", "node-4"), 1: ("node-1", "node-5")}
    await run.close()
    cluster.silent = {"node-3", "node-4", "node-5"}
    with pytest.raises(Refused, match="need 3 nodes, and 2 answer: node-1, node-2"):
        await inspected(cluster, 2)


async def test_node_without_room_is_named_with_the_arithmetic() -> None:
    cluster = Cluster()
    cluster.full = {"node-4"}
    run = await inspected(cluster, 2)
    with pytest.raises(Full) as caught:
        await run.prepare(1.0)
    said = caught.value.message
    assert said.startswith(
        "node-4 is to keep 1 of the copies (of 2 for each rank, here of rank 1), beside those of the"
    )
    assert "needs 40 MiB for its images, 30 MiB are free" in said
    assert "fewer --copies" in caught.value.advice
    assert caught.value.advice.startswith(Full.remedy), "what the node says"
    await run.close()


async def test_second_buddy_that_is_lost_fails_the_snapshot_and_does_not_keep_the_others_from_dropping_their_copies() -> (
    None
):
    cluster = Cluster()
    run = await inspected(cluster, 2)
    await run.prepare(1.0)
    cluster.silent = {"node-3"}
    with pytest.raises(Unreachable, match="node-3 does not answer"):
        await run.send(1.0)
    with pytest.raises(Undone, match="the copy of rank 0 on node-3 is not kept yet"):
        await run.keep(1.0)
    await run.discard(1.0)
    assert [node for node, _ in cluster.asked_for("discard")] == ["node-1", "node-2", "node-3", "node-4"]
    await run.close()
