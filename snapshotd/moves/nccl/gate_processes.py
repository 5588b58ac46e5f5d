"""Finds the processes whose gates a node closes, by their communicators, and reports on them.

Invariant: a process is identified by its pid and start time, so one that has ended is never mistaken for a later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, RankGone, Where
from snapshotd.inprocess import nccl_lines, ncclctl
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.record_parts import GateProcess
from snapshotd.proc import tree
from snapshotd.runtime.blocking import all_at_once


async def find(entries: Iterable[RankEntry]) -> list[tuple[GateProcess, ncclctl.Report]]:
    """The processes of these ranks that have communicators, with their reports. Changes nothing."""
    found = await all_at_once(_look, [entry for entry in entries if not entry.away_node])
    return [each for of_rank in found for each in of_rank]


def _look(entry: RankEntry) -> list[tuple[GateProcess, ncclctl.Report]]:
    found = []
    for process, report in ncclctl.reports(entry.group.pids()):
        inner_pid = tree.inner_pid(process.pid)
        gate = GateProcess(entry.uid, entry.rank, inner_pid, process.pid, process.start_ticks)
        found.append((gate, report))
    return found


def to_proto(gated: GateProcess, report: ncclctl.Report) -> pb.ProcessGate:
    try:
        return _to_proto(gated, report)
    except ValueError as error:  # a number that is out of range: the report comes from the job's own memory
        raise Damaged(f"the NCCL report of process {gated.process.pid} makes no sense: {error}") from error


def _to_proto(gated: GateProcess, report: ncclctl.Report) -> pb.ProcessGate:
    return pb.ProcessGate(
        rank_uid=gated.rank_uid,
        rank=gated.rank,
        pid=gated.inner_pid,
        communicators=map(_communicator, report.comms),
        ended=map(_communicator, report.ended),
        waiting=[
            pb.WaitingThread(thread=thread, group=map(_channel, group)) for thread, group in report.waiting.items()
        ],
        calling=report.calling,
        instance=report.instance,
        passed=report.passed,
        rdma=sorted({device.device for device in report.rdma or () if device.nccl}),
    )


def _communicator(comm: ncclctl.Communicator) -> pb.Communicator:
    return pb.Communicator(
        id=comm.id,
        nranks=comm.nranks,
        rank=comm.rank,
        state=comm.state,
        collectives=comm.collectives,
        sent=comm.sent,
        received=comm.received,
        users=comm.users,
        refusals=comm.refusals,
        unfinished=comm.unfinished,
        creation_waits=comm.held,
    )


#: The shim's letters for the kinds of a channel.
_KINDS = {"c": pb.ChannelCount.COLLECTIVE, "s": pb.ChannelCount.SEND, "r": pb.ChannelCount.RECEIVE}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


def _channel(channel: ncclctl.ChannelCount) -> pb.ChannelCount:
    return pb.ChannelCount(communicator=channel.comm, kind=_KINDS[channel.kind], peer=channel.peer, count=channel.count)


def target_line(target: pb.ChannelCount) -> str:
    """A target from the wire, in the shim's format. Raises Damaged for an invalid one."""
    kind = _LETTERS.get(target.kind, "?")
    return nccl_lines.target_line(target.communicator, kind, target.peer, target.count)


def permission_line(permission: pb.Permission) -> str:
    """The same for a permission."""
    return nccl_lines.permission_line(permission.thread, permission.passed, target_line(permission.until))


async def report(gated: Sequence[GateProcess]) -> pb.GateReport:
    found = await all_at_once(lambda each: ncclctl.read(each.process), gated)
    return pb.GateReport(processes=[to_proto(*pair) for pair in zip(gated, found, strict=True)])


def of_copy(move_log: MoveLog, processes: Sequence[tree.Process]) -> list[pb.ProcessGate]:
    """The reports of a held copy, whose shim runs. Blocking."""
    begin, found = move_log.begin, []
    for process in processes:
        inner_pid = tree.inner_pid(process.pid)
        gated = GateProcess(begin.rank_uid, begin.rank, inner_pid, process.pid, process.start_ticks)
        found.append(to_proto(gated, ncclctl.read(process)))
    return found


def alive(move_log: MoveLog) -> list[GateProcess]:
    return [each for each in move_log.record.gate_processes if each.process.alive()]


def members(move_log: MoveLog, rank_uids: Collection[str]) -> list[GateProcess]:
    """All processes of these ranks. Raises RankGone if one has ended: a communicator cannot be built without a member."""
    found = [each for each in move_log.record.gate_processes if each.rank_uid in rank_uids]
    for each in found:
        if not each.process.alive():
            raise RankGone(f"process {each.process.pid} of rank {each.rank} has ended", where=Where.UNKNOWN)
    return found
