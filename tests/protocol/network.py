"""The model of the rank's connections: the two sockets of each, the node that each socket names, and packet filters.

Ports and sequence numbers are left out: a socket names the node of its peer, and there is one connection per peer. Any
socket may send at any time, because kernels also retransmit for frozen processes. A packet that meets neither a filter nor a
socket is answered with RST, and the connection is lost. That breaks an invariant, unless a process or a node has died.
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
    """One socket, on the node of its process."""

    names: str  # the node of the peer socket
    repair: bool = False  # in repair mode, perhaps partly changed
    lost: bool = False  # reset
    timeouts_suspended: bool = False  # its time-outs are off


@dataclass(eq=False)
class Copy:
    """A process tree. If it is not running, it is frozen, or restored and held. On a peer, it is the process with the peer
    socket."""

    node: str
    restored_for: str = ""  # the move
    alive: bool = True
    running: bool = False
    sockets: dict[str, Socket] = field(default_factory=dict)  # by peer
    fell: bool = False  # died, but was not killed by the protocol
    gated: bool = False  # NCCL: its gate is closed
    comm: int = 1  # NCCL: its communicator, by the number of the attempt that created it; 0: none
    lost: bool = False  # NCCL: the gate was opened without it, as abandoned, so that every operation answers an error


class Network(ABC):
    """Every copy of the rank, every peer's process, and the packets between them."""

    def __init__(self, peers: tuple[str, ...]) -> None:
        self.peers = peers
        self.copies = [Copy(HOME, running=True, sockets={peer: Socket(peer) for peer in peers})]
        self.programs = {peer: Copy(peer, running=True, sockets={peer: Socket(HOME)}) for peer in peers}
        self.filters: set[tuple[str, str, frozenset[str]]] = set()  # (node, move, both names)
        self.cuts: set[frozenset[str]] = set()
        self.off: set[str] = set()
        self.severed: set[str] = set()  # peers whose connection was lost by a death

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
        """Whether the destination node has a socket for the packet."""
        return any(
            about == peer and holder.node == names and socket.names == sender.node
            for about, holder, socket in self.ends()
        )

    def retransmit(self, *, for_real: bool) -> None:
        """Every socket sends a packet. Unless `for_real`, this only checks that no connection would be reset wrongly."""
        ends = list(self.ends())
        answering = {(peer, socket.names, holder.node) for peer, holder, socket in ends}
        for peer, holder, socket in ends:
            if holder.running and socket.repair:
                raise Broken(f"a process runs on {holder.node} with its socket half changed")
            if (peer, holder.node, socket.names) in answering or socket.repair:
                continue  # at worst a filter drops the packet
            if self.passes(holder.node, socket.names):
                if not self.excused(peer):
                    raise Broken(f"RST from {socket.names} to {holder.node}, whose connection lives ({peer})")
                socket.lost = socket.lost or for_real

    def flows(self, peer: str) -> bool:
        """Whether packets pass between the rank and the peer's process now, in both directions."""
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
        """A process dies by itself. Its kernel resets its connections, unless a filter drops the packets."""
        if not holder.alive:
            return
        holder.alive, holder.fell = False, True
        for peer, program in self.programs.items():
            names = frozenset((peer, holder.node))
            hears = not self.filtered(peer, names) and not self.filtered(holder.node, names)
            if holder is program or (hears and program.sockets[peer].names == holder.node):
                self.severed.add(peer)

    def kill_silently(self, copy: Copy) -> None:
        """The protocol drops a copy, which must not send a packet to any peer."""
        if not copy.alive:
            return
        for peer, socket in copy.sockets.items():
            reaches = not socket.repair and not socket.lost and self.passes(copy.node, peer)
            if reaches and self.answers(peer, copy, peer) and not self.excused(peer):
                raise Broken(f"a dropped copy on {copy.node} says goodbye to {peer}")
        copy.alive = copy.running = False

    def power_off(self, node: str) -> None:
        """The node loses its filters and processes, and does not answer until it is back."""
        self.off.add(node)
        self.filters = {entry for entry in self.filters if entry[0] != node}
        for peer, program in self.programs.items():
            if program.sockets[peer].names == node and not self.filtered(peer, frozenset((peer, node))):
                self.severed.add(peer)  # a rebooted node answers packets of old connections with RST
        for holder in (*self.copies, *self.programs.values()):
            if holder.node == node:
                self.fall(holder)

    @abstractmethod
    def excused(self, peer: str) -> bool:
        """Whether this connection may be lost, because one of its two processes has died."""
