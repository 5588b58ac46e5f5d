"""`migrator policy`: checks a policy file, and explains what it means for a node now."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from migrator import formatting
from migrator.cli import arguments, output, state

if TYPE_CHECKING:
    from migrator.autopilot.facts import AboutNode, AboutRank
    from migrator.autopilot.policy import Maintenance, Policy
    from migrator.autopilot.ruled import Ruled
    from migrator.autopilot.world import World
    from migrator.cluster import Cluster


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add("policy", None, "check a policy file, or explain what it means for a node")
    inner = arguments.Verbs(parser)
    check = inner.add(
        "check", _check, "check a policy file", examples="  migrator policy check /etc/migrator/policy.toml"
    )
    check.add_argument("file", type=Path, metavar="FILE")
    explain = inner.add(
        "explain",
        _explain,
        "say which rule would do what about a node now, and why",
        more="Asks every node, and changes nothing.",
        examples="  migrator policy explain node-3 --policy /etc/migrator/policy.toml",
    )
    explain.add_argument("node", type=arguments.node, metavar="NODE")
    state.add_policy(explain, required=True)
    state.add_state(explain)


def _check(options: argparse.Namespace) -> int:
    from migrator.autopilot import policy

    found = policy.read(options.file)
    acting = [rule for rule in found.rules if rule.action.value != "observe"]
    if arguments.wants_json(options):
        rules = [{"name": rule.name, "action": rule.action.value} for rule in found.rules]
        facts = {"policy": found.origin, "valid": True, "acts": bool(acting), "rules": rules}
        windows = [{"nodes": list(table.nodes), "next": text or None} for table, text in _windows(found)]
        output.json_object({**facts, "maintenance": windows})
        return 0
    print(f"{found.origin} is valid: {len(found.rules)} rules, {len(acting)} of them act")
    for rule in found.rules:
        what = f"{', '.join(rule.checks)} on {', '.join(rule.subjects)}, {rule.severity.lower()} and above"
        print(formatting.plain(f"  {rule.name}: {rule.action} for {what}"))
    if not acting:
        print("  the autopilot would only observe")
    for table, text in _windows(found):
        print(formatting.plain(f"  {', '.join(table.nodes)}: {text or 'its maintenance is over'}"))
    return 0


def _windows(policy: Policy) -> list[tuple[Maintenance, str]]:
    """The tables of the calendar, with the window of each that has begun or comes next."""
    import time

    import msgspec

    from migrator.autopilot.maintenance import next_window

    found = []
    for table in policy.maintenance:
        alone = msgspec.structs.replace(policy, maintenance=(msgspec.structs.replace(table, nodes=("*",)),))
        window = next_window(alone, "", time.time())
        found.append((table, window.text if window is not None else ""))
    return found


def _explain(options: argparse.Namespace) -> int:
    from migrator.find_rank import find_node

    policy = state.the_policy(options)
    cluster = arguments.the_cluster(options)
    find_node(cluster, options.node)
    return asyncio.run(
        _show(cluster, policy, state.folder(options, cluster), options.node, as_json=arguments.wants_json(options))
    )


async def _show(cluster: Cluster, policy: Policy, folder: Path, name: str, *, as_json: bool) -> int:
    from dataclasses import replace

    from migrator.autopilot.decide import NodeDecision
    from migrator.autopilot.facts import about_node, about_ranks
    from migrator.autopilot.maintenance import MaintenanceDecision, about_maintenance, next_window
    from migrator.autopilot.model import NodeState
    from migrator.autopilot.ruled import ruled_for
    from migrator.autopilot.survey import survey

    async with state.opened(folder, changing=False) as store:
        world, silent = await survey(cluster, policy, store)
        now, last = store.now(), await store.last_orders()
    calendar = about_maintenance(world, policy, name, last.get(name), now)
    window = next_window(policy, name, now)
    alarms = ruled_for(world, policy, name, now)
    node = about_node(world, policy, world.nodes[name], now)
    # What would follow for the ranks, once the node's state has changed.
    states = {NodeDecision.TAINT: NodeState.TAINTED, NodeDecision.DRAIN: NodeState.DRAINING}
    if calendar[0] is MaintenanceDecision.DRAIN:
        node = replace(node, decision=NodeDecision.DRAIN, reason=calendar[1])
    if node.decision in states:
        after = replace(world.nodes[name], state=states[node.decision])
        world = replace(world, nodes={**world.nodes, name: after})
    ranks = [about for about in about_ranks(world, policy, now) if about.rank.node == name]
    if as_json:
        facts = _json(world, name, alarms, node, ranks)
        planned = window.text if window is not None else None
        output.json_object({**facts, "maintenance": planned, "unreachable": output.silent_objects(silent)})
        return 0
    output.warn_silent(silent, len(cluster.nodes), as_json=False)
    known = world.nodes[name]
    print(formatting.plain(f"{name} is {known.state}" + (f": {known.reason}" if known.reason else "")))
    print(formatting.plain(f"  decision: {node.decision}: {node.reason}"))
    if window is not None:
        print(formatting.plain(f"  calendar: {window.text}; {calendar[0]}: {calendar[1]}"))
    for one in alarms:
        rule = f"rule {one.rule.name}: {one.rule.action}" if one.rule is not None else "no rule matches: observe"
        waits = f" (not yet: {one.waits})" if one.waits else ""
        print(formatting.plain(f"  alarm {one.alarm.check} on {one.alarm.subject}: {one.alarm.text}: {rule}{waits}"))
    for about in ranks:
        to = f" to {about.target}" if about.target else ""
        print(formatting.plain(f"  rank {about.rank.rank} of {about.rank.job}: {about.decision}{to}: {about.reason}"))
    if not alarms:
        print("  it has no alarm")
    return 0


def _json(world: World, name: str, alarms: list[Ruled], node: AboutNode, ranks: list[AboutRank]) -> dict[str, Any]:
    return {
        "node": name,
        "state": world.nodes[name].state.value,
        "decision": node.decision.value,
        "reason": node.reason,
        "alarms": [
            {
                "check": one.alarm.check,
                "subject": one.alarm.subject,
                "severity": one.alarm.severity.name.lower(),
                "text": one.alarm.text,
                "rule": one.rule.name if one.rule is not None else None,
                "action": one.rule.action.value if one.rule is not None else "observe",
                "waits": one.waits,
            }
            for one in alarms
        ],
        "ranks": [
            {
                "uid": about.rank.uid,
                "decision": about.decision.value,
                "target": about.target,
                "reason": about.reason,
            }
            for about in ranks
        ],
    }
