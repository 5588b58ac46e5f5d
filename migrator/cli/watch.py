"""`migrator watch`: a live view of nodes, alarms and moves in progress. It asks and shows; it changes and records nothing.

States of nodes are the autopilot's, if its database is on this machine and can be read. Everything else comes from the
daemons.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from migrator import formatting
from migrator.cli import arguments, output, own_alarms, state
from snapshotd.api.errors import SnapshotError, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from migrator.autopilot.model import Alarm, Node, Rank
    from migrator.autopilot.store import NodeRecord, Store
    from migrator.cluster import Cluster
    from migrator.journals import Move
    from snapshotd.api.client import DaemonClient

_STYLES = {"healthy": "green", "returned": "green", "up": "green", "suspect": "yellow", "validating": "yellow"}
_SEVERITIES = {"CRITICAL": "red", "WARNING": "yellow", "NOTICE": ""}


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "watch",
        act,
        "watch nodes, alarms and moves in progress, live",
        more="Nodes in trouble come first. STATE is the autopilot's if its state is on this machine, else whether the daemon "
        "answers. Ctrl-C ends it.",
        examples="  migrator watch\n  migrator watch --interval 10\n  migrator watch --once --json",
    )
    parser.add_argument("--once", action="store_true", help="print it once and exit")
    parser.add_argument(
        "--interval",
        type=arguments.positive_seconds,
        default=2.0,
        metavar="SECONDS",
        help="time between two looks at the nodes (default: 2)",
    )
    state.add_state(parser)


@dataclass(frozen=True)
class Seen:
    """One look at the cluster."""

    origin: str
    names: list[str]
    nodes: dict[str, Node]
    ranks: list[Rank]
    alarms: list[Alarm]
    moves: list[Move]
    silent: dict[str, SnapshotError]
    states: dict[str, NodeRecord] | None  # None: the autopilot's state is not here
    unix_s: float

    def state(self, name: str) -> str:
        if self.states is not None:
            return self.states[name].state.value if name in self.states else "healthy"
        return "up" if name in self.nodes else "silent"

    def reason(self, name: str) -> str:
        if name in self.silent:
            return f"does not answer: {self.silent[name].headline}"
        known = (self.states or {}).get(name)
        return known.reason if known is not None and known.state.value != "healthy" else ""

    def is_calm(self, name: str) -> bool:
        troubled = name in self.silent or any(alarm.node == name for alarm in self.alarms)
        return not troubled and self.state(name) in ("healthy", "up")


def act(options: argparse.Namespace) -> int:
    as_json = arguments.wants_json(options)
    if not options.once and (as_json or not sys.stdout.isatty()):
        raise Usage("a live view needs a terminal, and has no JSON", remedy="add --once")
    cluster = arguments.the_cluster(options)
    folder = own_alarms.place(options, cluster)
    if not options.once:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_live(cluster, folder, options.interval))
        return 0
    seen = asyncio.run(_once(cluster, folder))
    output.warn_silent(seen.silent, len(cluster.nodes), as_json=as_json)
    if as_json:
        output.json_object(to_json(seen))
    else:
        output.show(frame(seen))
    return 0


async def _live(cluster: Cluster, folder: Path | None, interval_s: float) -> None:
    """Until it is cancelled. The terminal is as before afterwards."""
    from rich.console import Console
    from rich.live import Live

    async with own_alarms.opened(folder) as store:
        first = await look(cluster, store)
        with Live(frame(first), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                if store is not None:
                    with contextlib.suppress(SnapshotError):  # etcd is asked again the next time
                        await store.follow()
                live.update(frame(await look(cluster, store)), refresh=True)


async def _once(cluster: Cluster, folder: Path | None) -> Seen:
    async with own_alarms.opened(folder) as store:
        return await look(cluster, store)


async def look(cluster: Cluster, store: Store | None) -> Seen:
    """Asks every node once."""
    from migrator.autopilot import convert
    from migrator.fan_out import ASK_TIMEOUT_S, ask_all
    from migrator.journals import merge
    from snapshotd.api import snapshotd_pb2 as pb
    from snapshotd.api.client import UnknownMethod

    async def health(client: DaemonClient) -> pb.Health:
        try:
            return await client.node.GetHealth(pb.GetHealthRequest(), timeout_s=ASK_TIMEOUT_S)
        except UnknownMethod:  # a daemon of an older version
            return pb.Health()

    async def ask(client: DaemonClient) -> tuple[pb.NodeInfo, pb.ListRanksReply, pb.ListMovesReply, pb.Health]:
        return await asyncio.gather(
            client.node.GetNode(pb.GetNodeRequest(), timeout_s=ASK_TIMEOUT_S),
            client.node.ListRanks(pb.ListRanksRequest(), timeout_s=ASK_TIMEOUT_S),
            client.node.ListMoves(pb.ListMovesRequest(), timeout_s=ASK_TIMEOUT_S),
            health(client),
        )

    answers, silent = await ask_all(cluster, ask)
    alarms = [alarm for name, answer in answers.items() for alarm in convert.health(name, answer[3]).alarms]
    now = time.time()
    stored = None if store is None else await store.load(now)
    alarms += [alarm for _, alarm in await own_alarms.known(store) if alarm.node in cluster.nodes]
    merged = merge({name: list(answer[2].moves) for name, answer in answers.items()})
    return Seen(
        cluster.origin,
        list(cluster.nodes),
        {name: convert.node(name, cluster.labels.get(name, {}), answer[0]) for name, answer in answers.items()},
        [rank for name, answer in answers.items() for rank in convert.ranks(name, answer[1])],
        sorted(alarms, key=lambda alarm: (-alarm.severity, alarm.node, alarm.check)),
        [move for move in merged if not move.ended],
        silent,
        None if stored is None else stored.nodes,
        now,
    )


# ---------------------------------------------------------------------- one frame


def frame(seen: Seen) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    counts = Counter(seen.state(name) for name in seen.names)
    words = [f"{count} {name}" for name, count in counts.most_common()]
    words += [f"{len(seen.silent)} silent"] if seen.silent and seen.states is not None else []
    clock = time.strftime("%H:%M:%S", time.localtime(seen.unix_s))
    title = f"{clock}  {seen.origin}: {len(seen.names)} nodes ({', '.join(words)}), {len(seen.ranks)} ranks"
    parts: list[RenderableType] = [Text(formatting.plain(title), "bold", no_wrap=True, overflow="ellipsis"), Text()]
    if seen.moves:
        heads: tuple[str, ...] = ("MOVE", "JOB", "RANK", "FROM", "TO", "SINCE", "STEP", "THE RANK IS", "WAITS FOR")
        parts += [output.columns(heads, [_move(seen, move) for move in seen.moves], right=("RANK", "SINCE"))]
    else:
        parts += [Text("no moves in progress")]
    if seen.alarms:
        heads = ("ALARM", "NODE", "SUBJECT", "SEVERITY", "SINCE", "COUNT", "TEXT")
        parts += [Text(), output.columns(heads, [_alarm(seen, one) for one in seen.alarms], right=("SINCE", "COUNT"))]
    else:
        parts += [Text("no alarms")]
    nodes = sorted(seen.names, key=seen.is_calm)  # those in trouble first, each part in the cluster's order
    heads = ("NODE", "STATE", "RANKS", "GPUS FREE", "REASON")
    parts += [Text(), output.columns(heads, [_node(seen, name) for name in nodes], right=("RANKS", "GPUS FREE"))]
    return Group(*parts)


def _move(seen: Seen, move: Move) -> tuple[str, ...]:
    since = formatting.span(max(0.0, seen.unix_s - move.begun_unix_s))
    where = str(move.where)
    rank = (move.id, move.job, str(move.rank), move.source_node, move.target_node)
    return (*rank, since, move.step, where, move.waiting_for or "-")


def _alarm(seen: Seen, alarm: Alarm) -> tuple[str | tuple[str, str], ...]:
    severity = alarm.severity.name
    since = formatting.span(max(0.0, seen.unix_s - alarm.since_unix_s))
    shown = (severity.lower(), _SEVERITIES[severity])
    return (alarm.check, alarm.node, alarm.subject, shown, since, str(alarm.count), alarm.text)


def _node(seen: Seen, name: str) -> tuple[str | tuple[str, str], ...]:
    found, word = seen.nodes.get(name), seen.state(name)
    ranks = str(sum(rank.node == name for rank in seen.ranks)) if found is not None else "-"
    gpus = f"{sum(gpu.free for gpu in found.gpus)} of {len(found.gpus)}" if found is not None and found.gpus else "-"
    style = "red" if name in seen.silent else _STYLES.get(word, "red")
    return (name, (word, style), ranks, gpus, seen.reason(name))


def to_json(seen: Seen) -> dict[str, Any]:
    return {
        "cluster": seen.origin,
        "unix_s": round(seen.unix_s, 3),
        "nodes": [
            {
                "name": name,
                "state": seen.state(name),
                "reason": seen.reason(name),
                "ranks": sum(rank.node == name for rank in seen.ranks),
                "gpus": len(seen.nodes[name].gpus) if name in seen.nodes else 0,
                "gpus_free": sum(gpu.free for gpu in seen.nodes[name].gpus) if name in seen.nodes else 0,
            }
            for name in seen.names
        ],
        "alarms": [
            {
                "node": alarm.node,
                "check": alarm.check,
                "subject": alarm.subject,
                "severity": alarm.severity.name.lower(),
                "text": alarm.text,
                "since_unix_s": alarm.since_unix_s,
                "count": alarm.count,
            }
            for alarm in seen.alarms
        ],
        "moves": [move.to_json() for move in seen.moves],
        "unreachable": output.silent_objects(seen.silent),
    }
