"""Finds the nodes and their endpoints: in cluster.toml, in a running lab, or the daemon on this host.

Invariant: a cluster that loads is usable: names and endpoints are well-formed and the certificate files can be read. All
errors of a file are reported together, with the file's name. No connection is opened here.

    [nodes.node-1]
    endpoint = "10.0.0.1:7070"
    [nodes.node-1.networks]      # optional: a name for a network, and this node's address there
    data = "10.1.0.1"
    [nodes.node-1.labels]        # optional, for the autopilot: spare = "dedicated", rack, network
    rack = "r7"
    [tls]                        # an operator's identity, created by `migrator cluster init`
    ca = "ca.crt"                # paths are relative to the directory of this file
    cert = "alice.crt"
    key = "alice.key"

`snapshot_copies = 2`, above all tables, has two other nodes keep a copy of each rank's image in the snapshots of jobs.

A lab's file also names the network namespace from which its nodes are reached: `netns`, and `netns_inode`, because the
process id in the path may have been reused.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from snapshotd.api import toml_file
from snapshotd.api.errors import Ambiguous, BadConfig, Denied, Internal, NotFound, Unreachable

if TYPE_CHECKING:
    from snapshotd.api.client import DaemonClient

NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Places:
    """Where to look for a cluster, in this order."""

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    user: Path = field(default_factory=lambda: Path("~/.config/migrator/cluster.toml").expanduser())
    system: Path = Path("/etc/migrator/cluster.toml")
    labs: Path = Path("/run/migrator-lab")
    local_socket: Path = Path("/run/snapshotd/admin.sock")


@dataclass(frozen=True)
class Tls:
    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class Netns:
    """A network namespace by path, and by inode if the path may later refer to another namespace."""

    path: Path
    inode: int | None = None

    def alive(self) -> bool:
        try:
            return self.inode in (None, self.path.stat().st_ino)
        except OSError:
            return False


@dataclass(frozen=True)
class Cluster:
    """Nodes by name, each with the endpoint of its daemon."""

    origin: str  # for messages: the file or the socket
    nodes: dict[str, str]
    tls: Tls | None = None
    netns: Netns | None = None
    fence: tuple[str, ...] = ()  # a program that powers off the node whose name is added; empty: there is none
    networks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by node: name of a network -> address
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by node: spare, rack, network
    ssh: Mapping[str, str] = field(default_factory=dict)  # by node: where `migrator cluster add --ssh` reached it
    snapshot_copies: int = 1  # of each rank's image, on other nodes
    watch: Callable[[str, DaemonClient], DaemonClient] | None = None  # what to make of each client before it is used
    silent_s: dict[str, float] = field(default_factory=dict, compare=False)  # when a node did not answer (fan_out.py)

    @classmethod
    def load(cls, path: Path | str | None = None, places: Places | None = None) -> Cluster:
        """The first of: `path`, $MIGRATOR_CLUSTER, the user's file, the system's file, the running lab, this host."""
        places = places or Places()
        named = path or places.environment.get("MIGRATOR_CLUSTER")
        if named:
            return cls.read(Path(named).expanduser())
        for candidate in (places.user, places.system):
            if _exists(candidate):
                return cls.read(candidate)
        lab = _the_lab(places.labs)
        if lab is not None:
            return cls.read(lab)
        if _is_socket(places.local_socket):
            return cls(str(places.local_socket), {os.uname().nodename: f"unix:{places.local_socket}"})
        raise NotFound(
            f"no cluster: neither {places.user} nor {places.system} exists, no lab is up, "
            f"and no snapshotd answers at {places.local_socket}",
            remedy="name a file with --cluster or $MIGRATOR_CLUSTER, make a cluster with `migrator cluster init`, or try"
            " `migrator lab up`",
        )

    @classmethod
    def read(cls, path: Path, *, may_be_empty: bool = False) -> Cluster:
        """The cluster in one file. BadConfig lists everything that is wrong with it.

        A file without nodes is one that `migrator cluster init` has just made: there is nothing that other verbs could do.
        """
        try:
            values = toml_file.load(path)
        except FileNotFoundError as error:
            raise NotFound(
                f"there is no cluster file {path}", remedy="check --cluster and $MIGRATOR_CLUSTER"
            ) from error
        problems: list[str] = []
        found = toml_file.read(_File, values, "", problems)
        nodes, networks = _nodes(found.get("nodes") or {}, problems)
        if not found.get("nodes", True) and not may_be_empty:
            problems.append(
                'nodes: it must be a table [nodes.NAME] with endpoint = "host:port" for each node; add one with'
                " `migrator cluster add NODE ADDRESS`"
            )
        tls = _tls(found.get("tls"), path.parent, problems)
        if "tls" not in values and any(not _is_unix(endpoint) for endpoint in nodes.values()):
            problems.append(
                "tls: is missing; nodes are reached by TLS only, so it must be a table with ca, cert and key"
            )
        netns = _netns(found)
        if netns is None and "netns_inode" in values and "netns" not in values:
            problems.append("netns: is missing; netns_inode is the inode of the namespace that it names")
        toml_file.check(problems, str(path))
        ssh = {name: table["ssh"] for name, table in (found["nodes"] or {}).items() if table.get("ssh")}
        labels = {name: table["labels"] for name, table in (found["nodes"] or {}).items() if table.get("labels")}
        return cls(
            str(path), nodes, tls, netns, tuple(found.get("fence", ())), networks, labels, ssh, found["snapshot_copies"]
        )

    def client(self, node: str) -> DaemonClient:
        """A client of that node's daemon, not yet connected."""
        made = self._client(node)
        return made if self.watch is None else self.watch(node, made)

    def _client(self, node: str) -> DaemonClient:
        if node not in self.nodes:
            raise NotFound(f"no node is called {node!r}", remedy=f"the nodes are: {', '.join(sorted(self.nodes))}")
        # Imported here: `migrator lab down` needs no gRPC, and `enter` must be called before gRPC starts threads.
        from snapshotd.api.client import Credentials, DaemonClient

        if _is_unix(self.nodes[node]):
            return DaemonClient(self.nodes[node], credentials=None, node=None)
        assert self.tls is not None, "checked by read()"
        credentials = Credentials(ca=self.tls.ca, cert=self.tls.cert, key=self.tls.key)
        return DaemonClient(self.nodes[node], credentials=credentials, node=node)

    def enter(self) -> None:
        """Enters the network namespace from which the nodes are reached. Call it once, before creating threads or sockets.

        A network namespace belongs to a thread, so existing threads would stay outside.
        """
        if self.netns is None:
            return
        from migrator.lab.inside import CLONE_NEWNET, setns  # needed for labs only

        try:
            descriptor = os.open(self.netns.path, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError as error:
            raise Denied(f"only root may enter the lab of {self.origin}", remedy="use sudo") from error
        except OSError as error:
            raise self._gone() from error
        try:
            inode = os.fstat(descriptor).st_ino
            if self.netns.inode not in (None, inode):
                raise self._gone()
            if inode == Path("/proc/self/ns/net").stat().st_ino:
                return
            if len(os.listdir("/proc/self/task")) > 1:
                raise Internal("a network namespace must be entered before any thread is started")
            setns(descriptor, CLONE_NEWNET)
        except PermissionError as error:
            raise Denied(f"only root may enter the lab of {self.origin}", remedy="use sudo") from error
        except OSError as error:
            raise BadConfig(f"{self.origin}: netns {self.netns.path} cannot be entered: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _gone(self) -> Unreachable:
        return Unreachable(
            f"the lab of {self.origin} is no longer up",
            remedy="`migrator lab down` removes what is left of it, `migrator lab up` starts it anew",
        )


def ssh_destination(text: str) -> str:
    """[USER@]HOST. Raises ValueError. It begins with no '-', so that ssh cannot take it for an option."""
    if not re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9\[:][A-Za-z0-9.:%\]-]*", text):
        raise ValueError(f"{text[:80]!r} is not a destination of ssh: [USER@]HOST")
    return text


def _endpoint(text: str) -> str:
    if not _is_endpoint(text):
        raise ValueError(f'{text!r} is neither "host:port" nor "unix:/path"')
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError(f"{text!r} is not an absolute path")
    return text


_PEM_FILE = Meta(min_length=1, description="the path of a PEM file")


class _TlsTable(msgspec.Struct):
    ca: Annotated[str, _PEM_FILE]
    cert: Annotated[str, _PEM_FILE]
    key: Annotated[str, _PEM_FILE]


class _NodeTable(msgspec.Struct):
    endpoint: Annotated[str, toml_file.text('"host:port" or "unix:/path"', _endpoint)]
    ssh: Annotated[str, toml_file.text('a destination of ssh, as "root@node-1"', ssh_destination)] = ""
    labels: Annotated[
        dict[str, str] | None,
        Meta(description='a table of texts, as spare = "dedicated", rack = "r7"; docs/autopilot.md has the names'),
    ] = None
    networks: Annotated[
        dict[str, str] | None,
        Meta(description='a table with an address of the node for each network, as data = "10.1.0.1"'),
    ] = None


class _File(msgspec.Struct):
    """The keys of the file."""

    nodes: Annotated[
        dict[str, Any] | None, Meta(description='a table [nodes.NAME] with endpoint = "host:port" for each node')
    ] = None
    tls: Annotated[dict[str, Any] | None, Meta(description="a table with ca, cert and key")] = None
    fence: Annotated[
        tuple[str, ...], Meta(description='a list: a program and its arguments, as ["/sbin/fence", "-f"]')
    ] = ()
    snapshot_copies: Annotated[int, Meta(ge=1, description="a whole number above 0")] = 1
    netns: Annotated[Path | None, toml_file.text("an absolute path", _absolute)] = None
    netns_inode: Annotated[int | None, Meta(description="a whole number")] = None


def _is_unix(endpoint: str) -> bool:
    return endpoint.startswith("unix:")


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _exists(path: Path) -> bool:
    """True also for a file that cannot be read: that is an error to report, not a reason to look elsewhere."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _the_lab(labs: Path) -> Path | None:
    """The cluster file of the only running lab, else of a lab that left its files behind, else None."""
    files = sorted(labs.glob("*/cluster.toml"))
    up = [file for file in files if _is_up(file)]
    if len(up) > 1:
        names = ", ".join(file.parent.name for file in up)
        raise Ambiguous(f"{len(up)} labs are up: {names}", remedy=f"name one: --cluster {up[0]}")
    return up[0] if up else (files[0] if files else None)


def _is_up(file: Path) -> bool:
    try:
        netns = _netns(toml_file.read(_File, toml_file.load(file), "", []))
    except (OSError, BadConfig):
        return False
    return netns is None or netns.alive()


def _nodes(tables: Mapping[str, object], problems: list[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The endpoints of the nodes, and their addresses by network."""
    nodes: dict[str, str] = {}
    networks: dict[str, dict[str, str]] = {}
    for name, entry in tables.items():
        if not NODE_NAME.fullmatch(name):
            problems.append(f"nodes.{name}: the name of a node must be a host name")
        if not isinstance(entry, dict):
            problems.append(f'nodes.{name}: must be a table with endpoint = "host:port", not {entry!r}')
            continue
        found = toml_file.read(_NodeTable, entry, f"nodes.{name}.", problems)
        if "endpoint" in found:
            nodes[name] = found["endpoint"]
        if own := _networks(name, found.get("networks") or {}, problems):
            networks[name] = own
    endpoints = list(nodes.values())
    problems += [
        f"nodes: {twice} is the endpoint of two nodes"
        for twice in sorted({e for e in endpoints if endpoints.count(e) > 1})
    ]
    problems += _contradictions(networks)
    return nodes, networks


def _networks(node: str, table: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for network, text in table.items():
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            problems.append(f"nodes.{node}.networks.{network}: must be an IP address, not {text!r}")
            continue
        if address.is_loopback or address.is_link_local or address.is_unspecified:
            problems.append(f"nodes.{node}.networks.{network}: {text} is not an address that other nodes reach")
        else:
            found[network] = str(address)
    return found


def _contradictions(networks: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Addresses that two nodes or two networks have, and networks with both IPv4 and IPv6."""
    places: dict[str, list[str]] = {}
    versions: dict[str, dict[int, str]] = {}
    for node, own in networks.items():
        for network, ip in own.items():
            place = f"nodes.{node}.networks.{network}"
            places.setdefault(ip, []).append(place)
            versions.setdefault(network, {}).setdefault(ipaddress.ip_address(ip).version, place)
    found = [f"{' and '.join(named)}: {ip} can be one of them only" for ip, named in places.items() if len(named) > 1]
    found += [
        f"{mixed[4]} is IPv4 and {mixed[6]} IPv6: give them different names"
        for mixed in versions.values()
        if len(mixed) > 1
    ]
    return found


def _is_endpoint(text: str) -> bool:
    if _is_unix(text):
        return text.startswith("unix:/")
    host, _, port = text.rpartition(":")
    if ":" in host:  # an IPv6 address needs brackets, as in a URL
        return bool(re.fullmatch(r"\[[0-9A-Fa-f:.]+\]", host)) and _is_port(port)
    return bool(NODE_NAME.fullmatch(host)) and _is_port(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def _tls(table: Mapping[str, object] | None, folder: Path, problems: list[str]) -> Tls | None:
    """The files of the table, whose paths are relative to `folder`."""
    if table is None:
        return None
    found = toml_file.read(_TlsTable, table, "tls.", problems)
    files = {key: folder / Path(path).expanduser() for key, path in found.items()}
    for key, file in files.items():
        try:
            with file.open("rb") as content:
                if b"-----BEGIN " not in content.read(65536):
                    problems.append(f"tls.{key}: {file} is not a PEM file")
                # A group of operators may read it; see the quickstart.
                if key == "key" and os.fstat(content.fileno()).st_mode & 0o027:
                    problems.append(
                        f"tls.key: {file} can be read by every user, or changed by its group; run `chmod o=,g-w {file}`"
                    )
        except OSError as error:
            problems.append(f"tls.{key}: {file} cannot be read: {error.strerror}")
    return Tls(**files) if len(files) == 3 else None


def _netns(found: Mapping[str, Any]) -> Netns | None:
    path: Path | None = found.get("netns")
    return None if path is None else Netns(path, found.get("netns_inode"))
