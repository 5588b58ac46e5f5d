"""The rank's connections: two ends each, the node each end names, packet filters per node, and what a packet meets.

Ports and sequence numbers are left out: an end on one node names another node, one connection to each peer. Any end may
send at any time, since kernels retransmit for frozen processes too. A packet that meets neither a filter nor a socket is
answered with RST, and the connection is lost: a broken promise, unless a process or a node died.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

HOME, AWAY, PEER = "home", "away", "peer"


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Socket:
    """One end, on the node of the process that holds it."""

    names: str  # the node of the other end
    repair: bool = False  # in repair mode, perhaps half changed
    lost: bool = False  # reset
    braced: bool = False  # its time-outs are off


@dataclass(eq=False)
class Copy:
    """A process tree; one that does not run is stopped: frozen, or held as it was restored. On a peer: whoever has
    the other end."""

    node: str
    restored_for: str = ""  # the move
    alive: bool = True
    running: bool = False
    sockets: dict[str, Socket] = field(default_factory=dict)  # by peer
    fell: bool = False  # died, and not by the protocol
    gated: bool = False  # NCCL: its gate is closed
    comm: int = 1  # NCCL: the communicator it is in, by the number of the attempt that built it; 0: none


class Network(ABC):
    """Every copy of the rank, every peer's process, and the packets between them."""

    def __init__(self, peers: tuple[str, ...]) -> None:
        self.peers = peers
        self.copies = [Copy(HOME, running=True, sockets={peer: Socket(peer) for peer in peers})]
        self.programs = {peer: Copy(peer, running=True, sockets={peer: Socket(HOME)}) for peer in peers}
        self.filters: set[tuple[str, str, frozenset[str]]] = set()  # (node, move, both names)
        self.cuts: set[frozenset[str]] = set()
        self.off: set[str] = set()
        self.severed: set[str] = set()  # peers whose connection a death has cost

    # ------------------------------------------------------------ filters

    def hold(self, node: str, move: str, peer: str, *others: str) -> None:
        self.filters |= {(node, move, frozenset((peer, other))) for other in others}

    def drop_filters(self, node: str, move: str) -> None:
        self.filters = {entry for entry in self.filters if entry[:2] != (node, move)}

    def filtered(self, node: str, names: frozenset[str]) -> bool:
        return any(where == node and held == names for where, _, held in self.filters)

    # ------------------------------------------------------------ packets

    def passes(self, one: str, other: str) -> bool:
        names = frozenset((one, other))
        silent = names in self.cuts or one in self.off or other in self.off
        return not silent and not self.filtered(one, names) and not self.filtered(other, names)

    def ends(self) -> Iterator[tuple[str, Copy, Socket]]:
        for holder in (*self.copies, *self.programs.values()):
            if holder.alive:
                for peer, socket in holder.sockets.items():
                    if not socket.lost:
                        yield peer, holder, socket

    def answers(self, peer: str, sender: Copy, names: str) -> bool:
        """Whether the node that a packet is for has a socket for it."""
        return any(
            about == peer and holder.node == names and socket.names == sender.node
            for about, holder, socket in self.ends()
        )

    def retransmit(self, *, for_real: bool) -> None:
        """Every end sends. Not for real: only look whether anyone who must not be reset would be."""
        ends = list(self.ends())
        answering = {(peer, socket.names, holder.node) for peer, holder, socket in ends}
        for peer, holder, socket in ends:
            if holder.running and socket.repair:
                raise Broken(f"a process runs on {holder.node} with its socket half changed")
            if (peer, holder.node, socket.names) in answering or socket.repair:
                continue  # at worst a filter is in the way
            if self.passes(holder.node, socket.names):
                if not self.excused(peer):
                    raise Broken(f"RST from {socket.names} to {holder.node}, whose connection lives ({peer})")
                socket.lost = socket.lost or for_real

    def flows(self, peer: str) -> bool:
        """Whether a packet of the rank reaches the peer's process, and the other way round, now."""
        talking = [
            holder
            for about, holder, socket in self.ends()
            if about == peer
            and holder.running
            and not socket.repair
            and self.passes(holder.node, socket.names)
            and self.answers(peer, holder, socket.names)
        ]
        return len(talking) == 2

    # ------------------------------------------------------------ deaths

    def fall(self, holder: Copy) -> None:
        """A process dies by itself: its kernel tells the other ends so, unless a filter is in the way."""
        if not holder.alive:
            return
        holder.alive, holder.fell = False, True
        for peer, program in self.programs.items():
            names = frozenset((peer, holder.node))
            hears = not self.filtered(peer, names) and not self.filtered(holder.node, names)
            if holder is program or (hears and program.sockets[peer].names == holder.node):
                self.severed.add(peer)

    def kill_silently(self, copy: Copy) -> None:
        """The protocol drops a copy: nobody may hear of it."""
        if not copy.alive:
            return
        for peer, socket in copy.sockets.items():
            told = not socket.repair and not socket.lost and self.passes(copy.node, peer)
            if told and self.answers(peer, copy, peer) and not self.excused(peer):
                raise Broken(f"a dropped copy on {copy.node} says goodbye to {peer}")
        copy.alive = copy.running = False

    def power_off(self, node: str) -> None:
        """Filters and processes of a node are gone, and it is silent until it is back."""
        self.off.add(node)
        self.filters = {entry for entry in self.filters if entry[0] != node}
        for peer, program in self.programs.items():
            if program.sockets[peer].names == node and not self.filtered(peer, frozenset((peer, node))):
                self.severed.add(peer)  # a node that is back answers with RST what it no longer knows
        for holder in (*self.copies, *self.programs.values()):
            if holder.node == node:
                self.fall(holder)

    @abstractmethod
    def excused(self, peer: str) -> bool:
        """Whether this connection may be lost: an end of it has died."""
