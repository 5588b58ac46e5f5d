"""The rank's own sockets during a move: found on the source, silent while the move lasts, rewritten on the target.

Invariant: from the freeze until the outcome no packet of the rank's connections enters or leaves the node that has a copy.
A copy that is dropped is silenced first, so that its end is not told to anybody: the connections live on elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict

from snapshotd import tree
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused, Where
from snapshotd.criu import inet
from snapshotd.criu.inet import Ends
from snapshotd.journal import MoveLog
from snapshotd.net import filter as packets
from snapshotd.net import refusals, rehome, sockets
from snapshotd.net import reset as sockets_reset
from snapshotd.net.flows import Address, Holder, Pair
from snapshotd.net.plan import Places, plan


def look(pids: Sequence[int], places: Places) -> tuple[list[pb.Rewire], list[pb.Check]]:
    """What becomes of the rank's sockets, and the checks that say so. Never raises; blocking."""
    try:
        flows = sockets.tree_flows(pids)
        wrong = [str(problem) for problem in refusals.problems(flows)]
        rewires, more = plan(flows, places)
    except (OSError, ValueError) as error:
        return [], [_check("connections", f"the sockets could not be looked at: {error}", "try again")]
    wrong += more
    checks = [
        _check(
            "connections", "; ".join(wrong[:5]), "close it, or try again in a moment: one that opens or closes settles"
        )
        if wrong
        else pb.Check(name="connections", reason=_count(rewires))
    ]
    outside = [
        f"{rewire.old_remote.ip}:{rewire.old_remote.port}" for rewire in rewires if rewire.kind == pb.Rewire.OUTSIDE
    ]
    if outside:
        checks.append(
            pb.Check(
                name="outside-world",
                verdict=pb.Check.WARN,
                reason=f"these hosts run no daemon: {', '.join(sorted(set(outside))[:10])}",
                remedy="the job sees a reset there and has to connect again",
            )
        )
    return rewires, checks


def examine(rewires: Iterable[pb.Rewire]) -> list[pb.Check]:
    """On the target: are the ports of the rank's listeners free here? Blocking."""
    wanted = {rewire.new_local.port for rewire in rewires if rewire.kind == pb.Rewire.LISTENER}
    if not wanted:
        return []
    taken = sorted({flow.local.port for flow in sockets.listeners(wanted)})
    if taken:
        ports = ", ".join(map(str, taken))
        return [_check("target-ports", f"these ports are taken here: {ports}", "choose another target, or free them")]
    return [pb.Check(name="target-ports", reason=f"{len(wanted)} listening ports are free here")]


def frozen(pids: Sequence[int], places: Places) -> list[pb.Rewire]:
    """The rewirings of a frozen rank. Raises Refused when one of its sockets cannot be moved after all."""
    rewires, checks = look(pids, places)
    for check in checks:
        if check.verdict == pb.Check.REFUSE:
            raise Refused(f"{check.name}: {check.reason}", remedy=check.remedy, where=Where.SOURCE_FROZEN)
    return rewires


def hold(move: str, rewires: Iterable[pb.Rewire], *, on_target: bool) -> None:
    """Silences the rank's connections on this node: as they were on the source, or as they will be on the target."""
    pairs = [new_pair(rewire) if on_target else old_pair(rewire) for rewire in rewires if leaves_the_tree(rewire)]
    if pairs:
        packets.hold(move, pairs)


def let_go(move_log: MoveLog) -> None:
    """The packets flow again; costs nothing where the rank has no connections."""
    if move_log.note("rewires"):
        packets.drop_table(move_log.move)


def silence(pids: Sequence[int]) -> None:
    """Before a copy is killed: none of its connections says goodbye."""
    rehome.silence(pids)


def wake(pids: Sequence[int]) -> None:
    """Undo of what a killed criu leaves: no socket of a process that may run is in repair mode."""
    rehome.end_repair(pids)


def rewrite(folder: Path, rewires: Iterable[pb.Rewire]) -> tuple[tuple[int, int], ...]:
    """Gives the sockets in the image their new ends; answers (inner pid, descriptor) of those to the outside world, which
    the restored rank has closed and must see as reset."""
    changes: dict[Ends, Ends] = {}
    closed: list[Pair] = []
    for rewire in rewires:
        if rewire.kind == pb.Rewire.OUTSIDE:
            closed.append(old_pair(rewire))
        elif rewire.kind == pb.Rewire.LISTENER:
            changes[_address(rewire.old_local), None] = _address(rewire.new_local), None
        else:
            changes[old_pair(rewire)] = new_pair(rewire)
    return inet.rewrite(folder, changes, closed).closed if changes or closed else ()


def reset(pids: Iterable[int], closed: Iterable[tuple[int, int]]) -> None:
    """The connections to the outside world, in the stopped copy: its next use of one is told that it was reset."""
    wanted = list(closed)
    by_inner = {tree.inner_pid(pid): pid for pid in pids} if wanted else {}
    for inner, fd in wanted:
        process = tree.Process.of(by_inner[inner])
        sockets_reset.reset(Holder(process.pid, process.start_ticks, fd))


def leaves_the_tree(rewire: pb.Rewire) -> bool:
    return rewire.kind in {pb.Rewire.PEER, pb.Rewire.OUTSIDE}


def old_pair(rewire: pb.Rewire) -> Pair:
    return _address(rewire.old_local), _address(rewire.old_remote)


def new_pair(rewire: pb.Rewire) -> Pair:
    return _address(rewire.new_local), _address(rewire.new_remote)


def _address(endpoint: pb.Endpoint) -> Address:
    return Address(endpoint.ip, endpoint.port)


def to_notes(rewires: Iterable[pb.Rewire]) -> list[dict[str, Any]]:
    return [MessageToDict(rewire, preserving_proto_field_name=True) for rewire in rewires]


def from_notes(notes: Iterable[dict[str, Any]]) -> list[pb.Rewire]:
    return [ParseDict(note, pb.Rewire()) for note in notes]


def _check(name: str, reason: str, remedy: str) -> pb.Check:
    return pb.Check(name=name, verdict=pb.Check.REFUSE, reason=reason, remedy=remedy)


def _count(rewires: Sequence[pb.Rewire]) -> str:
    if not rewires:
        return "none"
    peers = sum(1 for rewire in rewires if rewire.kind == pb.Rewire.PEER)
    listeners = sum(1 for rewire in rewires if rewire.kind == pb.Rewire.LISTENER)
    return f"{peers} to other nodes or processes that stay, {listeners} listening, {len(rewires)} in all"
