"""Carries out preflight on the source: collects facts about a rank, and checks whether it can move. Changes nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from snapshotd import preflight
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, Undone, Where
from snapshotd.keepers.hello import protocol_problem
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.closed_files import Scope
from snapshotd.moves.device import cuda_processes
from snapshotd.moves.node import Node
from snapshotd.moves.source import closed_files
from snapshotd.proc import host
from snapshotd.proc.credentials import Mixed
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.spans import span
from snapshotd.transport.device import ring

KEEPER_BACK_S = 5.0
#: How long what preflight found counts for a move that begins.
FRESH_S = 30.0
#: How many of them are kept: the number of preflights is not limited.
MAX_LOOKS = 64
#: How often a rank is looked at before a refusal counts, if processes of it began or ended during the look.
LOOKS = 4


@dataclass(frozen=True)
class Looked:
    """What a look at a rank has found."""

    facts: pb.RankFacts
    checks: list[pb.Check]
    scope: Scope | None = None  # which closed files are the rank's; None: they were not looked at


class Remembered:
    """What preflight found about ranks, for the move that begins right afterwards. The driver that asked names it: another
    caller's preflight of the same rank may have found something else.

    Looking again would take as long again, and would be less certain: the target has compared what preflight found. What the
    rank has mapped or opened since is found when it is frozen, and compared then (preflight/after_freeze.py)."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, Looked]] = {}  # by its name: when, and what; the oldest first

    def put(self, found: Looked, checks: Sequence[pb.Check]) -> str:
        """Returns the name by which it can be taken; empty if a check refuses, because then no move begins with it."""
        if preflight.refusals(checks):
            return ""
        now_s, name = host.boottime_s(), secrets.token_hex(8)
        fresh = [(key, one) for key, one in self._found.items() if now_s - one[0] < FRESH_S]
        self._found = dict(fresh[1 - MAX_LOOKS :])
        self._found[name] = now_s, found
        return name

    def take(self, name: str, entry: RankEntry) -> Looked | None:
        """None if it was too long ago, or of another process."""
        when_s, found = self._found.pop(name, (0.0, Looked(pb.RankFacts(), [])))
        rank = found.facts.rank
        same = (rank.uid, rank.process.pid, rank.process.start_ticks) == (entry.uid, entry.pid, entry.start_ticks)
        return found if same and host.boottime_s() - when_s < FRESH_S else None


async def look(node: Node, entry: RankEntry, *, moves: bool) -> Looked:
    """The facts about a rank, and the checks of preflight on its source. `moves`: False if it is suspended with its job, and
    the image has all of its device memory.

    A refusal may concern a process that ended during the look, one that only seemed to be without a parent because that
    ended, or one that began and was taken for another rank's: jobs start programs that live for milliseconds. The rank is
    then looked at again."""
    for _ in range(LOOKS - 1):
        pids = entry.group.pids()
        found = await _look(node, entry, pids, moves=moves)
        if not preflight.refusals(found.checks) or set(pids) == set(entry.group.pids()):
            return found
    return await _look(node, entry, entry.group.pids(), moves=moves)


async def look_late(node: Node, entry: RankEntry, *, moves: bool) -> Looked:
    """The same when a move has begun. The target has compared other facts: raises Undone if it may be too old for these."""
    looked = await look(node, entry, moves=moves)
    if moves and protocol.carries_shared_memory(looked.facts.protocol):
        raise Undone(
            "the rank shares device memory (CUDA IPC), and the target was asked too long ago whether it can move that",
            remedy="retry the move; the rank runs on",
            where=Where.SOURCE_RUNNING,
        )
    return looked


async def _look(node: Node, entry: RankEntry, pids: list[int], *, moves: bool) -> Looked:
    config, scope = node.config, None
    with span("find CUDA processes"):
        look, more = await cuda_processes.find(node.gpus, pids)
    with span("ask gates"):
        nccl = await in_thread(preflight.read_nccl_reports, pids, _neighbours(node, entry))
    with span("inspect rank"):
        facts, checks = await in_thread(
            preflight.inspect_rank,
            pids,
            entry.pid,
            rank=entry.to_proto(config.node),
            node=config.node,
            daemon_version=host.DAEMON_VERSION,
            criu_version=config.criu_version,
            carry_paths=config.carry_paths,
            keeper_pid=entry.keeper_pid if entry.link is not None else 0,
            keeper_is_guest=entry.role == "guest",
            gpu=look,
            nccl=nccl,
            holds=moves and config.hold_device_memory,
        )
    facts.memory_id = node.room.machine
    if not preflight.refusals(checks):  # one may say that the rank's paths must not be looked at
        with span("look for closed files"):
            found, check, scope = await in_thread(_closed_files, node, entry, facts)
        facts.closed_bytes.update(found)
        facts.carried_bytes += sum(found.values())
        more.append(check)
    if entry.link is not None and (problem := protocol_problem(entry.link.info.protocol)):
        more.append(
            preflight.refused("keeper", problem, "restart its job with the `migrator run` of this node's version")
        )
    if offloaded_bytes := facts.gpu.offloaded_bytes:
        await in_thread(node.store.dropped)
        files_bytes = ring.memory_bytes(facts.gpu.held_stripes) or offloaded_bytes
        room_bytes = await in_thread(node.store.room_bytes)
        if not moves and config.hold_device_memory:  # a snapshot's go to the disk then
            room_bytes = max(room_bytes, await in_thread(node.store.disk_room_bytes))
        more.append(preflight.offload_room(files_bytes, room_bytes))
    return Looked(facts, [*checks, *more], scope)


def _neighbours(node: Node, entry: RankEntry) -> list[tuple[int, int]]:
    """The processes of the job's other ranks here, each with the number of its rank."""
    others = [one for one in node.ranks.all() if one.uid != entry.uid and not one.away_node]
    of_job = [one for one in others if (one.user_id, one.job) == (entry.user_id, entry.job)]
    return [(one.rank, pid) for one in of_job for pid in one.group.pids()]


def _closed_files(node: Node, entry: RankEntry, facts: pb.RankFacts) -> tuple[dict[str, int], pb.Check, Scope | None]:
    try:
        scope = closed_files.scope_of(node, entry)
        found, check = closed_files.look(node, entry, facts, scope)
    except (OSError, Mixed, SnapshotError) as error:
        return {}, preflight.failed("closed-files", error), None
    return found.bytes_by_root(), check, scope


async def keeper_back(entry: RankEntry) -> None:
    """Waits for the rank's keeper to reconnect, which takes a moment after a restart of this daemon."""
    deadline_s = host.boottime_s() + KEEPER_BACK_S
    while entry.link is None and entry.keeper_alive() and host.boottime_s() < deadline_s:  # noqa: ASYNC110 - bounded, rare
        await asyncio.sleep(0.05)
