"""Names, paths, addresses and cgroups of a lab, and the record of what was started.

Invariant: all locations follow from the lab's name, so the name is enough to take down a lab, even a partly built one. The
record only adds what cannot be derived (process ids, cuts). It is replaced atomically.

    /run/migrator-lab/LAB/            cluster.toml, record.json, pki/ (the CA), operator/ (the operator's identity)
    /run/migrator-lab/LAB/NODE/       snapshotd.toml, cluster.toml, hosts, boot_id, the node's identity, daemon.log
    /var/lib/migrator-lab/LAB/NODE/   the daemon's state, on disk
    <cgroup2>/migrator-lab-LAB/NODE/  holder, daemon, session, and the cgroups that the daemon creates
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from snapshotd.api.errors import Internal, Refused, Usage
from snapshotd.proc import mountinfo

RUN = Path("/run/migrator-lab")
STATE = Path("/var/lib/migrator-lab")
OPERATOR = "operator"
#: The cgroup of the switch; not a valid name of a node.
SWITCH = "_switch"
DAEMON_PORT = 7070
PREFIX_LENGTH = 24
MAX_NODES = 200

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")


def check_name(name: str, what: str) -> str:
    """Returns `name`, or raises Usage if it cannot be a lab's or node's name (a host name, a path and a cgroup)."""
    if not _NAME.fullmatch(name):
        raise Usage(
            f"{name!r} cannot be the name of a {what}",
            remedy="use at most 24 lower-case letters, digits and '-', with a letter or digit at both ends",
        )
    return name


def check_nodes(nodes: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the nodes, or raises Usage if a lab cannot have them."""
    if isinstance(nodes, str) or not nodes:
        raise Usage("a lab needs at least one node", remedy="give their names, as in --nodes node-1,node-2,spare-1")
    for name in nodes:
        check_name(name, "node")
    if OPERATOR in nodes or "localhost" in nodes:
        raise Usage("no node can be called 'operator' or 'localhost'", remedy="choose another name")
    if len(set(nodes)) != len(nodes):
        raise Usage(f"two nodes have the same name: {', '.join(nodes)}", remedy="give each its own name")
    if len(nodes) > MAX_NODES:
        raise Usage(f"{len(nodes)} nodes are more than a lab has addresses for", remedy=f"use at most {MAX_NODES}")
    return tuple(nodes)


def address(index: int | None) -> str:
    """The address of node number `index`, or of the operator (None). It is the same in every lab: networks are separate."""
    return "10.213.0.1" if index is None else f"10.213.0.{11 + index}"


def pair_of(a: str, b: str) -> tuple[str, str]:
    """The two sides of a cut, in the order in which they are recorded."""
    return (a, b) if a < b else (b, a)


def cgroup2_root() -> Path:
    """Where cgroup2 is mounted: /sys/fs/cgroup, or …/unified under a hybrid hierarchy."""
    root = mountinfo.cgroup2_root()
    if root is None:
        raise Refused("cgroup v2 is not mounted", remedy="run `mount -t cgroup2 none /sys/fs/cgroup`")
    return root


@dataclass(frozen=True)
class LabProcess:
    """A process of the lab, by pid and start time, and its namespaces as the kernel names them."""

    pid: int
    start_ticks: int
    namespaces: dict[str, str] = field(default_factory=dict)  # "net" -> "net:[4026532281]"


@dataclass
class Record:
    """What was started. A lab that is not `complete` is partly built or partly taken down."""

    nodes: list[str]
    complete: bool = False
    holders: dict[str, LabProcess] = field(default_factory=dict)  # by node, and SWITCH
    daemons: dict[str, LabProcess] = field(default_factory=dict)
    cuts: list[tuple[str, str]] = field(default_factory=list)

    def index(self, node: str) -> int | None:
        return None if node == OPERATOR else self.nodes.index(node)


@dataclass(frozen=True)
class Layout:
    """The paths of one lab."""

    name: str
    cgroup: Path  # the parent of all cgroups of the lab

    @classmethod
    def of(cls, name: str) -> Layout:
        return cls(name, cgroup2_root() / f"migrator-lab-{check_name(name, 'lab')}")

    @property
    def run(self) -> Path:
        return RUN / self.name

    @property
    def state(self) -> Path:
        return STATE / self.name

    @property
    def cluster(self) -> Path:
        return self.run / "cluster.toml"

    @property
    def operator(self) -> Path:
        return self.run / OPERATOR

    def node(self, node: str) -> Path:
        return self.run / node

    def node_cgroup(self, node: str) -> Path:
        return self.cgroup / (SWITCH if node == OPERATOR else node)

    def load(self) -> Record | None:
        """The record, or None if there is none."""
        try:
            fields = json.loads((self.run / "record.json").read_text())
            return Record(
                nodes=fields["nodes"],
                complete=fields["complete"],
                holders={node: LabProcess(**process) for node, process in fields["holders"].items()},
                daemons={node: LabProcess(**process) for node, process in fields["daemons"].items()},
                cuts=[(a, b) for a, b in fields["cuts"]],
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Internal(f"{self.run}/record.json is damaged", remedy="`migrator lab down`, then up again") from error

    def save(self, record: Record) -> None:
        write(self.run / "record.json", json.dumps(asdict(record), indent=1))


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces a file atomically, so that a reader never sees part of it."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    fresh.rename(path)
