"""`migrator doctor`: finds what would make a move fail, on each node and between nodes."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from migrator.cli import arguments, output
from migrator.cluster import Cluster
from snapshotd import __version__
from snapshotd.api.errors import NotFound, Refused, SnapshotError
from snapshotd.selfcheck.finding import Finding, State

_SIGNS = {State.OK: ("✓", "green"), State.WARNING: ("!", "yellow"), State.FAILED: ("✗", "red")}
PATHS = ("/home",)


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "doctor",
        act,
        "find what would make a move fail, on each node and between nodes",
        more="Nothing is paused. Every node starts its parts once and connects to every other node, on the port of snapshotd"
        " and on a free port as a move uses it. Findings are warnings (!) or failures (✗); with a failure the exit code is"
        f" {Refused.exit_code}.",
        examples="  migrator doctor\n  migrator doctor node-1 spare-1 --path /data/night --json",
    )
    parser.add_argument("nodes", nargs="*", type=arguments.node, metavar="NODE", help="node to examine (default: all)")
    parser.add_argument(
        "--path",
        action="append",
        type=arguments.absolute_path,
        metavar="PATH",
        help=f"path of job files that must be the same on all nodes; can be repeated (default: {', '.join(PATHS)})",
    )
    parser.add_argument(
        "--timeout",
        type=arguments.positive_seconds,
        default=10.0,
        metavar="SECONDS",
        help="time limit; slow nodes may need more (default: %(default)g)",
    )
    parser.add_argument("--all", action="store_true", help="show also what is in order")


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    from migrator.doctor import ask, compare  # after `enter`: it loads gRPC

    nodes = list(dict.fromkeys(options.nodes)) or list(cluster.nodes)
    for name in nodes:
        if name not in cluster.nodes:
            raise NotFound(f"there is no node {name} in {cluster.origin}", remedy="see `migrator nodes`")
    began_s = time.monotonic()
    answers, silent = asyncio.run(ask.ask(cluster, nodes, options.path or PATHS, options.timeout * 0.95))
    found = {name: _of_node(answers.get(name), silent.get(name)) for name in nodes}
    differences = compare.between(answers, __version__)
    states = [each.state for each in differences] + [each.state for of_node in found.values() for each in of_node]
    report = {
        "cluster": cluster.origin,
        "failed": states.count(State.FAILED),
        "warnings": states.count(State.WARNING),
        "seconds": round(time.monotonic() - began_s, 2),
        "nodes": [{"name": name, "findings": [_object(each) for each in found[name]]} for name in nodes],
        "between": [{**_object(each), "nodes": list(each.nodes)} for each in differences],
    }
    if arguments.wants_json(options):
        output.json_object(report)
    else:
        _show(cluster, found, differences, report, everything=options.all)
    return Refused.exit_code if report["failed"] else 0


def _of_node(answer: Any, error: SnapshotError | None) -> list[Finding]:
    if error is not None:
        return [Finding("daemon", State.FAILED, error.headline, error.advice)]
    return [Finding(one.check, _state(one.state), one.text, one.remedy) for one in answer.diagnosis.findings]


def _state(text: str) -> State:
    """Of a daemon of a later version it may be one that is not known here."""
    return State(text) if text in list(State) else State.WARNING


def _object(found: Any) -> dict[str, str]:
    return {"check": found.check, "state": found.state, "text": found.text, "remedy": found.remedy}


def _show(
    cluster: Cluster, found: dict[str, list[Finding]], differences: Any, report: dict[str, Any], *, everything: bool
) -> None:
    for name, of_node in found.items():
        _group(name, of_node, everything)
    _group("between nodes", differences, everything)
    words = (
        f"{len(found)} nodes in {report['seconds']:.1f} s: {report['failed']} failures, {report['warnings']} warnings"
    )
    print(output.styled(words, "red" if report["failed"] else "yellow" if report["warnings"] else "green"))


def _group(title: str, found: Any, everything: bool) -> None:
    bad = [each for each in found if each.state is not State.OK]
    if bad:
        print(f"{title}:")
    else:
        print(f"{title}: {len(found)} checks passed" if found else f"{title}: ok")
    rows: list[list[str | tuple[str, str]]] = []
    for each in found if everything else bad:
        remedy = f"\nremedy: {each.remedy}" if each.remedy else ""
        rows.append([("", ""), _SIGNS[each.state], f"{each.check} ", each.text + remedy])
    if rows:
        output.grid(rows)
