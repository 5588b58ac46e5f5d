"""Finds the peers' sockets of a rank's connections on this node, and describes them for the journal."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed, Refused, Where
from snapshotd.keepers.ranks import Ranks
from snapshotd.moves.peers.connections import new_pair, old_pair
from snapshotd.moves.record_parts import PeerSocket, parse_pair
from snapshotd.net import forward, refusals, repoint, sockets, tracking
from snapshotd.net.flows import Flow, Pair

#: The rewirings of a move whose sockets were found here.
Ends = list[tuple[pb.Rewire, Flow]]
#: How long the kernel may take to send the end of a stream to a rank that runs: it may have to repeat it a few times.
SEND_S = 40.0


class Found(NamedTuple):
    """What is here of a rank's connections."""

    ends: Ends
    closed: Ends  # its process has closed it, and the rank may not know it yet
    problems: list[str]  # with `ends`
    half_closed: list[str]  # the rank reads no more, but a process here may still read

    def check(self) -> None:
        """Raises Refused for every problem, and Changed if processes here have closed connections of the frozen rank: only a
        rank that runs learns that."""
        if wrong := self.half_closed + self.problems:
            raise Refused(f"connection-ends: {'; '.join(wrong[:5])}", where=Where.SOURCE_FROZEN)
        self.check_closed()

    def check_closed(self) -> None:
        """The part of `check` that does not change any more while the rank is frozen."""
        if self.half_closed:
            raise Refused(f"connection-ends: {'; '.join(self.half_closed[:5])}", where=Where.SOURCE_FROZEN)
        if self.closed:
            closed = ", ".join(str(flow) for _, flow in self.closed[:5])
            raise Changed(f"connection-ends: closed while the rank was frozen: {closed}", where=Where.SOURCE_FROZEN)


def find(ranks: Ranks, rewires: Iterable[pb.Rewire]) -> Found:
    """The sockets here that the rewirings are about, and the problems with them. Blocking.

    A connection of which the rank reads the end, because the peer has closed it, needs nothing here."""
    pairs = {old_pair(rewire): rewire for rewire in rewires}
    every = _find(pairs)
    half_closed = _half_closed([pair for pair, rewire in pairs.items() if rewire.ended], every)
    pairs = {pair: rewire for pair, rewire in pairs.items() if not rewire.ended}
    closed = [(rewire, every[pair]) for pair, rewire in pairs.items() if pair in every and every[pair].abandoned]
    found = {pair: flow for pair, flow in every.items() if pair in pairs and not flow.abandoned}
    missing = [
        f"the peer's socket of {pair[0]} - {pair[1]} is in no process here" for pair in pairs if pair not in every
    ]
    unheld = [f"{flow} belongs to no process" for flow in found.values() if not flow.holders]
    wrong = [str(problem) for problem in refusals.problems(found.values())]
    leaving = {pid: entry for entry in ranks.all() if entry.moving for pid in entry.group.pids()}
    holders = {holder.pid for flow in found.values() for holder in flow.holders}
    wrong += [
        f"rank {entry.rank} of job {entry.job}, which has the peer's socket, is being moved itself"
        for entry in {leaving[pid].uid: leaving[pid] for pid in holders & leaving.keys()}.values()
    ]
    ends = [(pairs[pair], flow) for pair, flow in found.items()]
    return Found(ends, closed, missing + unheld + wrong, half_closed)


def inspect(ranks: Ranks, rewires: Iterable[pb.Rewire]) -> tuple[Ends, list[str]]:
    """`find` while the rank runs. A connection that a process here has closed since the rank was looked at is no problem once
    the rank's kernel knows it: the freeze will see that. Waits up to SEND_S for that. Blocking."""
    wanted = list(rewires)
    deadline = time.monotonic() + SEND_S
    while True:
        found = find(ranks, wanted)
        told = {old_pair(rewire) for rewire, flow in found.closed if flow.state == "fin-wait-2"}
        if not found.closed or time.monotonic() > deadline:
            untold = [f"{flow} belongs to no process" for rewire, flow in found.closed if old_pair(rewire) not in told]
            return found.ends, found.half_closed + found.problems + untold
        wanted = [rewire for rewire in wanted if old_pair(rewire) not in told]
        if not told:
            time.sleep(0.05)


def _half_closed(pairs: Collection[Pair], found: Mapping[Pair, Flow]) -> list[str]:
    """Why connections of which the rank reads the end may be in use: the peer may have shut down one direction alone."""
    wrong = [
        f"{found[pair]}: half-closed: the rank reads no more, and a process here may still read"
        for pair in pairs
        if pair in found and not found[pair].abandoned
    ]
    if missing := {pair for pair in pairs if pair not in found}:  # the kernel forgets such a socket after a minute
        own = sockets.own_addresses()
        for known in tracking.translations():
            mine = missing & {known.socket, (known.wire[1], known.wire[0])}
            if mine and known.socket[0].ip not in own:  # not made here through a forwarding
                local, remote = mine.pop()
                wrong.append(f"{local} - {remote}: half-closed, and its packets are passed on by this node")
    return wrong


def _find(pairs: Iterable[Pair]) -> dict[Pair, Flow]:
    """The peers' sockets, by the address pair as the rank has it. A forwarded connection has another pair here."""
    forwarded = {old: new for known in forward.listed().values() for old, new in known.items()}
    if not forwarded:
        return sockets.find_peers(pairs)
    by_wire = {known.wire: known.socket for known in tracking.translations()}
    names: dict[Pair, Pair] = {}
    for rank, peer in pairs:
        own, far = by_wire.get((peer, rank), (peer, rank))
        names[far, own] = rank, peer
    return {names[name]: flow for name, flow in sockets.find_peers(names, forwarded).items()}


def peer_socket(rewire: pb.Rewire, flow: Flow) -> PeerSocket:
    rank_old, far_old = old_pair(rewire)
    rank_new, far_new = new_pair(rewire)
    local, remote = flow.endpoints
    return PeerSocket(
        inode=flow.inode,
        holders=[(holder.pid, holder.start_ticks, holder.fd) for holder in flow.holders],
        own=(str(local), str(remote)),
        old=(str(far_old), str(rank_old)),
        new=(str(far_new), str(rank_new)),
    )


def change(one: PeerSocket, towards_target: bool, states: Path) -> repoint.Change:
    local, remote = parse_pair(one.new if towards_target else one.old)
    return repoint.Change(one.descriptors, one.inode, local, remote, states / str(one.inode))
