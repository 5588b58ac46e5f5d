"""`migrator health`: shows the alarms of nodes, and clears them."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from migrator import formatting
from migrator.cli import arguments, output
from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import NotFound, Refused, Usage

_SIGNS = {pb.NOTICE: ("·", "green"), pb.WARNING: ("!", "yellow"), pb.CRITICAL: ("✗", "red")}
ALL = "all"


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "health",
        act,
        "show the alarms of nodes, and clear them",
        more="An alarm stays until it is cleared, also if its cause has gone and if the daemon is restarted. With a critical"
        f" alarm (✗) the exit code is {Refused.exit_code}. Clearing is recorded with the name of the operator.",
        examples="  migrator health\n  migrator health node-1 --json\n  migrator health --clear gpu-ecc node-1",
    )
    parser.add_argument("nodes", nargs="*", type=arguments.node, metavar="NODE", help="node to show (default: all)")
    parser.add_argument("--clear", metavar="CHECK", help=f'clear the alarms of a check ("{ALL}": of every check)')
    parser.add_argument("--subject", default="", metavar="SUBJECT", help="clear only those of this GPU, link or disk")
    parser.add_argument("--all", action="store_true", help="show also the checks")


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    nodes = list(dict.fromkeys(options.nodes)) or list(cluster.nodes)
    for name in nodes:
        if name not in cluster.nodes:
            raise NotFound(f"there is no node {name} in {cluster.origin}", remedy="see `migrator nodes`")
    if options.clear is not None:
        if not options.nodes:
            raise Usage("alarms are cleared on certain nodes only", remedy="name the nodes after --clear CHECK")
        return _clear(cluster, nodes, options)
    if options.subject:
        raise Usage("--subject belongs to --clear", remedy="name the check whose alarms are to be cleared")
    return _show(cluster, nodes, options)


def _show(cluster: Cluster, nodes: list[str], options: argparse.Namespace) -> int:
    async def ask(client: DaemonClient) -> pb.Health:
        return await client.node.GetHealth(pb.GetHealthRequest(), timeout_s=ASK_TIMEOUT_S)

    answers, silent = asyncio.run(ask_all(cluster, ask, nodes))
    as_json = arguments.wants_json(options)
    output.warn_silent(silent, len(nodes), as_json=as_json)
    if as_json:
        found = [_object(name, answer) for name, answer in answers.items()]
        output.json_object({"cluster": cluster.origin, "nodes": found, "silent": output.silent_objects(silent)})
    else:
        for name, answer in answers.items():
            _node(name, answer, everything=options.all)
    critical = any(alarm.severity == pb.CRITICAL for answer in answers.values() for alarm in answer.alarms)
    return Refused.exit_code if critical else 0


def _clear(cluster: Cluster, nodes: list[str], options: argparse.Namespace) -> int:
    everything = options.clear == ALL and not options.subject
    check = "" if options.clear == ALL else options.clear
    request = pb.ClearAlarmsRequest(check=check, subject=options.subject, all=everything)

    async def ask(client: DaemonClient) -> pb.ClearAlarmsReply:
        return await client.node.ClearAlarms(request, timeout_s=ASK_TIMEOUT_S)

    answers, silent = asyncio.run(ask_all(cluster, ask, nodes))
    as_json = arguments.wants_json(options)
    output.warn_silent(silent, len(nodes), as_json=as_json)
    if as_json:
        cleared = [
            {"name": name, "cleared": [_alarm(each) for each in reply.cleared]} for name, reply in answers.items()
        ]
        output.json_object({"cluster": cluster.origin, "nodes": cleared, "silent": output.silent_objects(silent)})
    else:
        for name, reply in answers.items():
            print(f"{name}: {len(reply.cleared)} alarms cleared")
            for each in reply.cleared:
                print(formatting.plain(f"  {each.check} {each.subject}: {each.text}"))
    # A node that did not answer may still have its alarms.
    return next(iter(silent.values())).exit_code if silent else 0


def _node(name: str, health: pb.Health, *, everything: bool) -> None:
    running = sum(check.state == pb.HealthCheck.RUNNING for check in health.checks)
    unable = len(health.checks) - running
    without = f", {unable} off or unable" if unable else ""
    print(f"{name}: {len(health.alarms) or 'no'} alarms ({running} checks{without})")
    rows: list[list[str | tuple[str, str]]] = []
    for alarm in sorted(health.alarms, key=lambda each: -each.severity):
        times = f", seen {alarm.count} times" if alarm.count > 1 else ""
        since = formatting.moment(alarm.since_unix_s)
        remedy = f"\nremedy: {alarm.remedy}" if alarm.remedy else ""
        sign = _SIGNS.get(alarm.severity, ("?", "yellow"))
        text = f"{alarm.subject}: {alarm.text} (since {since}{times}){remedy}"
        rows.append([("", ""), sign, f"{alarm.check} ", text])
    if everything:
        for check in health.checks:
            state = formatting.name_of(pb.HealthCheck.State, check.state).lower()
            rows.append([("", ""), " ", f"{check.name} ", f"{state}: {check.reason}" if check.reason else state])
    if rows:
        output.grid(rows)


def _object(name: str, health: pb.Health) -> dict[str, Any]:
    checks = [
        {
            "name": check.name,
            "state": formatting.name_of(pb.HealthCheck.State, check.state).lower(),
            "reason": check.reason,
        }
        for check in health.checks
    ]
    return {
        "name": name,
        "epoch": health.epoch,
        "sequence": health.sequence,
        "alarms": [_alarm(alarm) for alarm in health.alarms],
        "checks": checks,
    }


def _alarm(alarm: pb.Alarm) -> dict[str, Any]:
    return {
        "check": alarm.check,
        "subject": alarm.subject,
        "severity": formatting.name_of(pb.Severity, alarm.severity).lower(),
        "text": alarm.text,
        "remedy": alarm.remedy,
        "since_unix_s": alarm.since_unix_s,
        "last_unix_s": alarm.last_unix_s,
        "count": alarm.count,
    }
