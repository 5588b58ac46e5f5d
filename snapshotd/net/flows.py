"""What a connection is, in one vocabulary for the journal, the wire and the kernel.

Invariant: one address has one spelling. `::ffff:10.0.0.1`, which a v4-mapped IPv6 socket shows, is 10.0.0.1 here, because
it is the same packet on the wire and the same end to a peer; that the *socket* is an IPv6 one is in `Flow.family`.
Addresses with a scope (`fe80::1%eth0`) mean something on one node alone and are refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from snapshotd.proc.tree import Process

Family = Literal["inet", "inet6"]

#: (local, remote) of one end; the other end's is the mirrored one.
Pair = tuple["Address", "Address"]


class BadAddress(ValueError):
    """The text is no address that can be moved to another node."""


@dataclass(frozen=True, order=True, slots=True)
class Address:
    """An IP address and a port. Port 0: none yet."""

    ip: str
    port: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ip", _normal(self.ip))
        if not 0 <= self.port <= 0xFFFF:
            raise BadAddress(f"{self.port} is no port")

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
        raise BadAddress(f"{ip!r} is no IP address") from error
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.scope_id is not None:
            raise BadAddress(f"{ip} has a scope: it means something on one node alone")
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
    return str(parsed)


@dataclass(frozen=True, order=True, slots=True)
class Holder:
    """A descriptor of a process, which no later process with the same pid can be mistaken for."""

    pid: int
    start_ticks: int
    fd: int

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)


@dataclass(frozen=True, slots=True)
class Flow:
    """One socket: an end of a connection, a listener, or one that is neither yet.

    `holders` is empty for a socket that no process has: an end that nobody accepted yet, or one that is closing alone.
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
    shutdown: str = ""  # read, write, both: what this end has closed while it stays open
    signed: bool = False  # TCP-MD5
    unread_bytes: int = 0
    unacked_bytes: int = 0
    waiting: int = 0  # connections at a listener that nobody accepted yet

    @property
    def connected(self) -> bool:
        return self.remote is not None

    @property
    def listens(self) -> bool:
        return self.state == "listen"

    @property
    def ends(self) -> Pair:
        """(local, remote) of a connected socket. Raises ValueError for another."""
        if self.remote is None:
            raise ValueError(f"{self} is not connected")
        return self.local, self.remote

    def mirrored(self) -> Pair:
        """(local, remote) as the other end has it."""
        local, remote = self.ends
        return remote, local

    def to_json(self) -> dict[str, Any]:
        """What the journal and the wire carry; `from_json` gives an equal Flow."""
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
        """Raises ValueError for what is no Flow: it may come from another daemon."""
        try:
            family: Family = "inet6" if fields["family"] == "inet6" else "inet"
            if fields["family"] != family:
                raise ValueError(f"{fields['family']!r} is no family")
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
            raise ValueError(f"this is no connection: {error!r}") from error

    def __str__(self) -> str:
        ends = f"{self.local} → {self.remote}" if self.remote else str(self.local)
        return f"{self.protocol} {ends} ({self.state})"
