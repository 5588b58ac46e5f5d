"""Converts what daemons report into the autopilot's own values. The only file of the decision path that knows messages."""

from __future__ import annotations

from collections.abc import Mapping

from migrator.autopilot.model import Alarm, Gpu, HealthEvent, HealthReport, Node, Rank, Severity
from snapshotd.api import snapshotd_pb2 as pb

_KINDS = {pb.HealthEvent.RAISED: "raised", pb.HealthEvent.REPEATED: "repeated", pb.HealthEvent.CLEARED: "cleared"}


def health(node: str, reply: pb.Health) -> HealthReport:
    """`node` is its name in the cluster file: what a daemon calls itself is not used to file its report."""
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
    return Node(
        name,
        labels=labels,
        gpus=tuple(_gpu(gpu) for gpu in info.gpus),
        driver=info.driver_version,
        memory_free_bytes=info.memory_available_bytes,
    )


def ranks(node_name: str, reply: pb.ListRanksReply) -> tuple[Rank, ...]:
    """The ranks whose processes are on this node."""
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
        for rank in reply.ranks
        if rank.place == pb.Rank.HERE
    )


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
