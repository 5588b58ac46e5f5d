"""What must be the same on the nodes of a job, and is not. Pure functions of the nodes' answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from migrator.doctor.ask import Answer
from snapshotd.api import protocol
from snapshotd.selfcheck.finding import State

#: Clocks that differ by more confuse logs and time-outs of jobs; by more than the second, certificates are refused.
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 300.0
_SHOWN = 5

Nodes = Mapping[str, Answer]


@dataclass(frozen=True)
class Difference:
    """A finding about several nodes."""

    check: str
    state: State
    nodes: tuple[str, ...]
    text: str
    remedy: str = ""


def between(nodes: Nodes, own_version: str) -> list[Difference]:
    """Everything that differs, and every connection that fails."""
    return [
        *versions(nodes, own_version),
        *_unlike(
            nodes,
            "architecture",
            lambda one: one.info.architecture,
            State.FAILED,
            "move ranks only between nodes of one architecture",
        ),
        *_unlike(nodes, "kernel", lambda one: one.info.kernel, State.WARNING, "boot the same kernel on all nodes"),
        *_unlike(
            nodes, "criu", lambda one: one.info.criu_version, State.WARNING, "install the same package on all nodes"
        ),
        *_unlike(
            {name: one for name, one in nodes.items() if one.info.gpus},
            "driver",
            lambda one: one.info.driver_version,
            State.WARNING,
            "install the same NVIDIA driver on all nodes",
        ),
        *_unlike(
            {name: one for name, one in nodes.items() if one.diagnosis.mtu},
            "mtu",
            lambda one: one.diagnosis.mtu,
            State.WARNING,
            "set the same MTU on the nodes and on the switches between them",
        ),
        *cpu_features(nodes),
        *clocks(nodes),
        *paths(nodes),
        *routes(nodes),
    ]


def versions(nodes: Nodes, own_version: str) -> list[Difference]:
    """A common protocol lets versions differ for a while, as in an upgrade."""
    remedy = "install the same package on all nodes"
    found = _unlike(nodes, "version", lambda one: one.info.version, State.WARNING, remedy)
    strange = {name: one for name, one in nodes.items() if protocol.common(one.info.protocol, protocol.own()) is None}
    if strange:
        theirs = sorted({protocol.described(one.info.protocol) for one in strange.values()})
        text = (
            f"migrator {own_version} speaks {protocol.described(protocol.own())}, and snapshotd there {' or '.join(theirs)}:"
            " it cannot move ranks from or to them"
        )
        found.append(
            Difference("version", State.FAILED, tuple(strange), text, "install the same package here and there")
        )
    return found


def _unlike(
    nodes: Nodes,
    check: str,
    value: Callable[[Answer], Hashable],
    state: State,
    remedy: str,
) -> list[Difference]:
    """A finding if a value differs."""
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for name, one in nodes.items():
        groups[value(one)].append(name)
    if len(groups) < 2:
        return []
    text = "; ".join(f"{value} on {_names(members)}" for value, members in groups.items())
    return [Difference(check, state, tuple(nodes), text, remedy)]


def cpu_features(nodes: Nodes) -> list[Difference]:
    """A program may use every feature that it finds at its start, so a target must have all of the source's."""
    features = {name: frozenset(one.diagnosis.cpu_features) for name, one in nodes.items()}
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for name, one in features.items():
        groups[one].append(name)
    found = []
    for source, from_nodes in groups.items():
        for target, to_nodes in groups.items():
            if lacking := sorted(source - target):
                text = f"ranks of {_names(from_nodes)} cannot move to {_names(to_nodes)}, which lack {_names(lacking)}"
                remedy = "move ranks between nodes with the same CPU, or hide the features from jobs"
                found.append(Difference("cpu-features", State.FAILED, (*from_nodes, *to_nodes), text, remedy))
    return found


def clocks(nodes: Nodes) -> list[Difference]:
    known = {name: one for name, one in nodes.items() if one.info.now_unix_s}
    if len(known) < 2:
        return []
    first, last = min(known, key=lambda name: known[name].clock_s), max(known, key=lambda name: known[name].clock_s)
    apart_s = known[last].clock_s - known[first].clock_s - known[first].unsure_s - known[last].unsure_s
    if apart_s < SKEW_WARN_S:
        return []
    state = State.FAILED if apart_s >= SKEW_FAIL_S else State.WARNING
    text = f"the clock of {last} is {apart_s:.0f} s ahead of that of {first}"
    return [Difference("clock", state, (first, last), text, "synchronise the clocks (chrony or systemd-timesyncd)")]


def paths(nodes: Nodes) -> list[Difference]:
    found = []
    by_path: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for name, one in nodes.items():
        for facts in one.diagnosis.paths:
            by_path[facts.path][name] = (facts.file_system, facts.source)
    for path, places in by_path.items():
        missing = [name for name, (kind, _) in places.items() if not kind]
        silent = [name for name, (kind, _) in places.items() if kind == "?"]
        if missing and len(missing) < len(places):
            text = f"{path} does not exist on {_names(missing)}"
            found.append(Difference("paths", State.FAILED, tuple(missing), text, "mount it there, at the same path"))
        if silent:
            text = f"the file system of {path} does not answer on {_names(silent)}"
            found.append(Difference("paths", State.FAILED, tuple(silent), text, "check the server of that file system"))
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, place in places.items():
            if place[0] and place[0] != "?":
                groups[place].append(name)
        if len(groups) > 1:
            text = f"{path}: " + "; ".join(
                f"{source} ({kind}) on {_names(on)}" for (kind, source), on in groups.items()
            )
            found.append(
                Difference("paths", State.WARNING, tuple(places), text, "mount the same file system on all nodes")
            )
    return found


def routes(nodes: Nodes) -> list[Difference]:
    """The connections that failed, in one line for each peer and reason: a node that is down fails for all others."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, one in nodes.items():
        for route in one.diagnosis.routes:
            for port, reason in (("control", route.control), ("data", route.data)):
                if reason:
                    groups[port, route.peer, reason].append(name)
    found = []
    for (port, peer, reason), sources in groups.items():
        text = f"{_names(sources)} → {peer}: {reason}"
        if port == "control":
            remedy = f"open the port of snapshotd on {peer} to all nodes, and check `systemctl status snapshotd` there"
            found.append(Difference("control-port", State.FAILED, (*sources, peer), text, remedy))
        else:
            remedy = "allow TCP between the nodes in net.ipv4.ip_local_port_range; until then moves are slower"
            found.append(Difference("data-port", State.WARNING, (*sources, peer), text, remedy))
    return found


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
