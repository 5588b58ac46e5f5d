"""Converts what daemons report into the autopilot's own values. The only file of the decision path that knows messages.

A daemon may be in the hands of an attacker. Invariant: nothing passes that is larger than what daemons report, because one
node must not use up the memory or the disk of the autopilot, which serves all of them. Raises Damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized

from google.protobuf.message import Message

from migrator.autopilot.model import (
    Alarm,
    CommunicatorProgress,
    Gpu,
    HealthEvent,
    HealthReport,
    Node,
    NodeProgress,
    Rank,
    RankProgress,
    Severity,
)
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged

#: More than any daemon reports: in one answer, in one text, of one number (SQLite's are signed).
MAX_ALARMS, MAX_EVENTS, MAX_RANKS, MAX_GPUS = 2000, 1000, 20_000, 1024
MAX_COMMUNICATORS, MAX_READINGS, MAX_COUNTS, LEAST_PERIOD_MS = 64, 1000, 60_000, 100
MAX_CHARS = 2000
MAX_NUMBER = 1 << 62
_DISTRUST = "no sound daemon answers so: examine that node, it may be in the hands of an attacker"
_MEASURES = {pb.RankProgress.NCCL: "nccl", pb.RankProgress.TCP: "tcp", pb.RankProgress.CPU: "cpu"}
_KINDS = {pb.HealthEvent.RAISED: "raised", pb.HealthEvent.REPEATED: "repeated", pb.HealthEvent.CLEARED: "cleared"}


def health(node: str, reply: pb.Health) -> HealthReport:
    """`node` is its name in the cluster file: what a daemon calls itself is not used to file its report."""
    _must_be_few(node, alarms=(reply.alarms, MAX_ALARMS), events=(reply.events, MAX_EVENTS))
    _must_be_small(node, reply, *reply.alarms, *reply.events)
    return HealthReport(
        node=node,
        epoch=reply.epoch,
        sequence=reply.sequence,
        alarms=tuple(_alarm(node, alarm) for alarm in reply.alarms),
        events=tuple(_event(event) for event in reply.events),
        more=reply.more,
        pruned=reply.pruned,
    )


def node(name: str, labels: Mapping[str, str], info: pb.NodeInfo) -> Node:
    _must_be_few(name, gpus=(info.gpus, MAX_GPUS))
    _must_be_small(name, pb.NodeInfo(driver_version=info.driver_version), *info.gpus)
    return Node(
        name,
        labels=labels,
        gpus=tuple(_gpu(gpu) for gpu in info.gpus),
        driver=info.driver_version,
        memory_free_bytes=info.memory_available_bytes,
        device_window_bytes=info.device_window_bytes,
    )


def ranks(node_name: str, reply: pb.ListRanksReply) -> tuple[Rank, ...]:
    """The ranks whose processes are on this node."""
    _must_be_few(node_name, ranks=(reply.ranks, MAX_RANKS))
    here = [rank for rank in reply.ranks if rank.place == pb.Rank.HERE]
    for rank in here:
        rank.command = ""  # it may be long, and is not used
        _must_be_few(node_name, gpus=(rank.gpus, MAX_GPUS))
    _must_be_small(node_name, *here)
    return tuple(
        Rank(
            uid=rank.uid,
            job=rank.job,
            rank=rank.rank,
            user_id=rank.user_id,
            node=node_name,
            gpus=tuple(rank.gpus),
            memory_bytes=rank.memory_bytes,
            device_bytes=rank.device_bytes,
            moving=rank.moving,
            home=rank.home_node,
        )
        for rank in here
    )


def progress(node: str, reply: pb.NodeProgress, ahead_s: float, unsure_s: float) -> NodeProgress:
    """`ahead_s`: how much the clock of the node is ahead of this one's, and how uncertain that is."""
    _must_be_few(node, ranks=(reply.ranks, MAX_RANKS))
    _must_be_small(node, reply)
    counts = sum(len(comm.numbers) for rank in reply.ranks for comm in rank.communicators)
    if counts > MAX_COUNTS or 0 < reply.period_ms < LEAST_PERIOD_MS:
        raise Damaged(f"{node} reports {counts} readings every {reply.period_ms} ms", remedy=_DISTRUST)
    ranks = []
    for rank in reply.ranks:
        _must_be_few(node, communicators=(rank.communicators, MAX_COMMUNICATORS))
        _must_be_small(node, rank)
        comms = tuple(_communicator(node, comm) for comm in rank.communicators)
        ranks.append(
            RankProgress(rank.uid, _MEASURES.get(rank.measure, ""), _span(rank.unchanged_s), _span(rank.usual_s), comms)
        )
    return NodeProgress(node, reply.period_ms, ahead_s, unsure_s, tuple(ranks))


def _span(seconds: float) -> float:
    return min(max(0.0, seconds), 1e9)


def _communicator(node: str, comm: pb.CommunicatorProgress) -> CommunicatorProgress:
    _must_be_few(node, readings=(comm.numbers, MAX_READINGS))
    _must_be_small(node, pb.CommunicatorProgress(numbers=comm.numbers, early=comm.early, late=comm.late))
    if not len(comm.numbers) == len(comm.early) == len(comm.late):
        raise Damaged(f"{node} reports readings with a number missing", remedy=_DISTRUST)
    if comm.member >= comm.nranks:
        raise Damaged(f"{node} reports member {comm.member} of {comm.nranks}", remedy=_DISTRUST)
    return CommunicatorProgress(
        comm.id, comm.nranks, comm.member, tuple(comm.numbers), tuple(comm.early), tuple(comm.late)
    )


def _must_be_few(node: str, **fields: tuple[Sized, int]) -> None:
    for name, (found, most) in fields.items():
        if len(found) > most:
            raise Damaged(f"{node} reports {len(found)} {name}, and no daemon has more than {most}", remedy=_DISTRUST)


def _must_be_small(node: str, *messages: Message) -> None:
    """The texts and numbers of these messages, without those of messages in them."""
    for message in messages:
        for field, value in message.ListFields():
            for each in value if field.is_repeated and field.message_type is None else (value,):
                if (isinstance(each, str) and len(each) > MAX_CHARS) or (isinstance(each, int) and each > MAX_NUMBER):
                    raise Damaged(f"{node} reports a {field.name} that is too large", remedy=_DISTRUST)


def _gpu(gpu: pb.Gpu) -> Gpu:
    free = not gpu.processes and not gpu.reserved_for and not gpu.mig
    return Gpu(gpu.uuid, gpu.name, gpu.memory_bytes, free)


def _severity(value: int) -> Severity:
    """A severity that this version does not know counts as the highest."""
    try:
        return Severity(value)
    except ValueError:
        return Severity.CRITICAL


def _alarm(node: str, alarm: pb.Alarm) -> Alarm:
    return Alarm(
        node=node,
        check=alarm.check,
        subject=alarm.subject,
        severity=_severity(alarm.severity),
        text=alarm.text,
        since_unix_s=alarm.since_unix_s,
        last_unix_s=alarm.last_unix_s,
        count=alarm.count,
        remedy=alarm.remedy,
    )


def _event(event: pb.HealthEvent) -> HealthEvent:
    return HealthEvent(
        sequence=event.sequence,
        unix_s=event.unix_s,
        kind=_KINDS.get(event.kind, "raised"),
        check=event.check,
        subject=event.subject,
        severity=_severity(event.severity),
        text=event.text,
        value=event.value,
    )
