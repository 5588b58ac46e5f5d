"""Addresses and connections, in one vocabulary for the journal, the wire and the kernel.

Invariant: one address has one spelling. `::ffff:10.0.0.1`, which a v4-mapped IPv6 socket shows, is 10.0.0.1 here,
because it is the same packet on the wire and the same endpoint to a peer. `Flow.family` tells that the *socket* is an
IPv6 one. Addresses with a scope (`fe80::1%eth0`) are valid on one node alone and are refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from snapshotd.proc.tree import Process

Family = Literal["inet", "inet6"]

#: (local, remote) of one socket; its peer has the mirrored pair.
Pair = tuple["Address", "Address"]


class BadAddress(ValueError):
    """The text is not an address that can be used on another node."""


@dataclass(frozen=True, order=True, slots=True)
class Address:
    """An IP address and a port; port 0 means none yet."""

    ip: str
    port: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ip", _normal(self.ip))
        if not 0 <= self.port <= 0xFFFF:
            raise BadAddress(f"{self.port} is not a port")

    @classmethod
    def parse(cls, text: str) -> Address:
        """The inverse of str(): `10.0.0.1:80`, `[fd00::1]:80`."""
        ip, _, port = text.rpartition(":")
        if ip.startswith("[") != ip.endswith("]") or (":" in ip) != ip.startswith("[") or not port.isdecimal():
            raise BadAddress(f"{text!r} is not IP:PORT")
        return cls(ip.removeprefix("[").removesuffix("]"), int(port))

    @property
    def version(self) -> Literal[4, 6]:
        return 6 if ":" in self.ip else 4

    @property
    def loopback(self) -> bool:
        """Only processes of the same node reach it."""
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def wildcard(self) -> bool:
        """Bound to every address, or to none yet."""
        return ipaddress.ip_address(self.ip).is_unspecified

    @property
    def link_local(self) -> bool:
        return ipaddress.ip_address(self.ip).is_link_local

    def at(self, ip: str) -> Address:
        """The same port at another address."""
        return Address(ip, self.port)

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.version == 6 else f"{self.ip}:{self.port}"


def _normal(ip: str) -> str:
    try:
        parsed = ipaddress.ip_address(ip)
    except ValueError as error:
        raise BadAddress(f"{ip!r} is not an IP address") from error
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.scope_id is not None:
            raise BadAddress(f"{ip} has a scope: it is valid on one node alone")
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
    return str(parsed)


@dataclass(frozen=True, order=True, slots=True)
class Holder:
    """A descriptor of a process, identified by pid and start time."""

    pid: int
    start_ticks: int
    fd: int

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)


@dataclass(frozen=True, slots=True)
class Flow:
    """One socket: connected, a listener, or neither yet.

    `holders` is empty for a socket that no process holds: one that was not accepted yet, or that the kernel is closing.
    """

    protocol: str  # tcp, udp, mptcp, raw, sctp, packet…
    family: Family
    state: str  # established, listen, close, syn-sent, syn-recv, fin-wait-1, … ; of a UDP socket established or close
    local: Address
    remote: Address | None  # None: not connected
    inode: int
    holders: tuple[Holder, ...] = ()
    v6only: bool = False
    device: str = ""  # SO_BINDTODEVICE
    shutdown: str = ""  # read, write, both: the directions that this side has shut down
    signed: bool = False  # TCP-MD5
    unread_bytes: int = 0
    unacked_bytes: int = 0
    waiting: int = 0  # connections at a listener that were not accepted yet

    @property
    def connected(self) -> bool:
        return self.remote is not None

    @property
    def listens(self) -> bool:
        return self.state == "listen"

    @property
    def reads_end(self) -> bool:
        """Whether the rank reads the end of the stream after what has arrived: the peer has closed it, or this side has shut
        it down for reading, as a move does with a connection that the peer had closed."""
        return self.connected and (
            self.state == "close-wait" or (self.state == "established" and self.shutdown == "read")
        )

    @property
    def abandoned(self) -> bool:
        """Whether its process has closed it, and the kernel waits for the other side. No process can get it again; one that
        was not accepted yet, or is on its way to another process, is in another state or has an inode."""
        return self.state in ("fin-wait-1", "fin-wait-2") and not self.inode

    @property
    def endpoints(self) -> Pair:
        """(local, remote) of a connected socket; ValueError if it is not connected."""
        if self.remote is None:
            raise ValueError(f"{self} is not connected")
        return self.local, self.remote

    def mirrored(self) -> Pair:
        """(local, remote) as the peer's socket has it."""
        local, remote = self.endpoints
        return remote, local

    def to_json(self) -> dict[str, Any]:
        """For the journal and the wire; `from_json` returns an equal Flow."""
        return {
            "protocol": self.protocol,
            "family": self.family,
            "state": self.state,
            "local": str(self.local),
            "remote": str(self.remote) if self.remote else "",
            "inode": self.inode,
            "holders": [[holder.pid, holder.start_ticks, holder.fd] for holder in self.holders],
            "v6only": self.v6only,
            "device": self.device,
            "shutdown": self.shutdown,
            "signed": self.signed,
            "unread_bytes": self.unread_bytes,
            "unacked_bytes": self.unacked_bytes,
            "waiting": self.waiting,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Flow:
        """Raises ValueError for invalid fields: they may come from another daemon."""
        try:
            family: Family = "inet6" if fields["family"] == "inet6" else "inet"
            if fields["family"] != family:
                raise ValueError(f"{fields['family']!r} is not an address family")
            return cls(
                protocol=str(fields["protocol"]),
                family=family,
                state=str(fields["state"]),
                local=Address.parse(fields["local"]),
                remote=Address.parse(fields["remote"]) if fields["remote"] else None,
                inode=int(fields["inode"]),
                holders=tuple(Holder(int(pid), int(ticks), int(fd)) for pid, ticks, fd in fields["holders"]),
                v6only=bool(fields["v6only"]),
                device=str(fields["device"]),
                shutdown=str(fields["shutdown"]),
                signed=bool(fields["signed"]),
                unread_bytes=int(fields["unread_bytes"]),
                unacked_bytes=int(fields["unacked_bytes"]),
                waiting=int(fields["waiting"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a connection: {error!r}") from error

    def __str__(self) -> str:
        endpoints = f"{self.local} → {self.remote}" if self.remote else str(self.local)
        return f"{self.protocol} {endpoints} ({self.state})"
