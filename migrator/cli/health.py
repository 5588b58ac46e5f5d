"""`migrator health`: shows the alarms of nodes, and clears them.

On the autopilot's machine also those that the autopilot itself has raised or taken from outside (own_alarms.py).
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from migrator import formatting
from migrator.cli import arguments, output, own_alarms, state
from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import NotFound, Refused, SnapshotError, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from migrator.autopilot.model import Alarm

_SIGNS = {pb.NOTICE: ("·", "green"), pb.WARNING: ("!", "yellow"), pb.CRITICAL: ("✗", "red")}
ALL = "all"


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "health",
        act,
        "show the alarms of nodes, and clear them",
        more="An alarm stays until it is cleared, also if its cause has gone and if the daemon is restarted. With a critical"
        f" alarm (✗) the exit code is {Refused.exit_code}. Clearing is recorded with the name of the operator."
        " On the autopilot's machine also its own alarms are shown, and those from outside are cleared.",
        examples="  migrator health\n  migrator health node-1 --json\n  migrator health --clear gpu-ecc node-1",
    )
    parser.add_argument("nodes", nargs="*", type=arguments.node, metavar="NODE", help="node to show (default: all)")
    parser.add_argument("--clear", metavar="CHECK", help=f'clear the alarms of a check ("{ALL}": of every check)')
    parser.add_argument("--subject", default="", metavar="SUBJECT", help="clear only those of this GPU, link or disk")
    parser.add_argument("--all", action="store_true", help="show also the checks")
    state.add_state(parser)


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
    answers, silent, own = asyncio.run(_asked(cluster, nodes, own_alarms.place(options, cluster)))
    as_json = arguments.wants_json(options)
    if not as_json:
        for name, answer in answers.items():
            _node(name, answer, [one for one in own if one[1].node == name], everything=options.all)
        for name in silent:
            if mine := [one for one in own if one[1].node == name]:
                print(f"{name}: {len(mine)} alarms; its daemon does not answer")
                output.grid(_rows([], mine))
    output.warn_silent(silent, len(nodes), as_json=as_json)
    if as_json:
        found = [_object(name, answer) for name, answer in answers.items()]
        only_here = [{"node": alarm.node, "source": source, **_alarm(_message(alarm))} for source, alarm in own]
        everything = {"cluster": cluster.origin, "nodes": found, "autopilot_alarms": only_here}
        output.json_object({**everything, "silent": output.silent_objects(silent)})
    alarms = [*(alarm for answer in answers.values() for alarm in answer.alarms), *(_message(one) for _, one in own)]
    return Refused.exit_code if any(alarm.severity == pb.CRITICAL for alarm in alarms) else 0


async def _asked(
    cluster: Cluster, nodes: list[str], folder: Path | None
) -> tuple[dict[str, pb.Health], dict[str, SnapshotError], list[tuple[str, Alarm]]]:
    """What the nodes answer, which do not, and the alarms that only the autopilot has, with their source."""

    async def ask(client: DaemonClient) -> pb.Health:
        return await client.node.GetHealth(pb.GetHealthRequest(), timeout_s=ASK_TIMEOUT_S)

    answers, silent = await ask_all(cluster, ask, nodes)
    async with own_alarms.opened(folder) as store:
        own = [(source, alarm) for source, alarm in await own_alarms.known(store) if alarm.node in nodes]
    return answers, silent, own


def _clear(cluster: Cluster, nodes: list[str], options: argparse.Namespace) -> int:
    everything = options.clear == ALL and not options.subject
    check = "" if options.clear == ALL else options.clear
    request = pb.ClearAlarmsRequest(check=check, subject=options.subject, all=everything)

    async def ask(client: DaemonClient) -> pb.ClearAlarmsReply:
        return await client.node.ClearAlarms(request, timeout_s=ASK_TIMEOUT_S)

    async def clear() -> tuple[dict[str, list[pb.Alarm]], dict[str, SnapshotError]]:
        async with own_alarms.opened(own_alarms.place(options, cluster), changing=True) as store:
            answers, silent = await ask_all(cluster, ask, nodes)
            cleared = {name: list(reply.cleared) for name, reply in answers.items()}
            if store is not None:
                for name in nodes:
                    found = await store.clear_signals(name, state.operator(), check, options.subject)
                    if found:
                        cleared.setdefault(name, []).extend(map(_message, found))
        return cleared, silent

    cleared, silent = asyncio.run(clear())
    as_json = arguments.wants_json(options)
    if not as_json:
        for name, alarms in cleared.items():
            print(f"{name}: {len(alarms)} alarms cleared")
            for each in alarms:
                print(formatting.plain(f"  {each.check} {each.subject}: {each.text}"))
    output.warn_silent(silent, len(nodes), as_json=as_json)
    if as_json:
        found = [{"name": name, "cleared": [_alarm(each) for each in alarms]} for name, alarms in cleared.items()]
        output.json_object({"cluster": cluster.origin, "nodes": found, "silent": output.silent_objects(silent)})
    # A node that did not answer may still have its alarms.
    return next(iter(silent.values())).exit_code if silent else 0


def _node(name: str, health: pb.Health, own: list[tuple[str, Alarm]], *, everything: bool) -> None:
    running = sum(check.state == pb.HealthCheck.RUNNING for check in health.checks)
    unable = len(health.checks) - running
    without = f", {unable} off or unable" if unable else ""
    print(f"{name}: {len(health.alarms) + len(own) or 'no'} alarms ({running} checks{without})")
    rows = _rows(list(health.alarms), own)
    if everything:
        for check in health.checks:
            state = formatting.name_of(pb.HealthCheck.State, check.state).lower()
            rows.append([("", ""), " ", f"{check.name} ", f"{state}: {check.reason}" if check.reason else state])
    if rows:
        output.grid(rows)


def _rows(of_node: list[pb.Alarm], own: list[tuple[str, Alarm]]) -> list[list[str | tuple[str, str]]]:
    """The worst first."""
    rows: list[list[str | tuple[str, str]]] = []
    origins = [("", alarm) for alarm in of_node]
    origins += [
        (", from outside" if source == "webhook" else ", by the autopilot", _message(one)) for source, one in own
    ]
    for origin, alarm in sorted(origins, key=lambda each: -each[1].severity):
        times = f", seen {alarm.count} times" if alarm.count > 1 else ""
        since = formatting.moment(alarm.since_unix_s)
        remedy = f"\nremedy: {alarm.remedy}" if alarm.remedy else ""
        sign = _SIGNS.get(alarm.severity, ("?", "yellow"))
        text = f"{alarm.subject}: {alarm.text} (since {since}{times}{origin}){remedy}"
        rows.append([("", ""), sign, f"{alarm.check} ", text])
    return rows


def _message(alarm: Alarm) -> pb.Alarm:
    """As a daemon would report it."""
    return pb.Alarm(
        check=alarm.check,
        subject=alarm.subject,
        severity=pb.Severity.ValueType(alarm.severity),
        text=alarm.text,
        remedy=alarm.remedy,
        since_unix_s=alarm.since_unix_s,
        last_unix_s=alarm.last_unix_s,
        count=alarm.count,
    )


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
