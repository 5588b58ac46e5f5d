"""`migrator lab`: a cluster of namespaced nodes on this one machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from migrator.autopilot import policy
from migrator.cli import arguments, output, run
from snapshotd.api.errors import Ambiguous, Usage

if TYPE_CHECKING:
    from migrator.lab import Lab

DEFAULT_NAME = "lab"
DEFAULT_NODES = "node-1,node-2,spare-1"
#: Of a lab's autopilot. Unlike the default of a cluster it acts, because trying that out is what a lab is for.
POLICY = """\
[[rules]]
name = "critical"
severity = "critical"
action = "move"

[breaker]
nodes_percent = 50
rank_window_s = 60
"""


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "lab",
        None,
        "run a cluster of namespaced nodes on this machine",
        more="Requires root. The other commands use a running lab by default.",
        examples=(
            "  migrator lab up\n"
            "  migrator lab run -- python train.py\n"
            "  migrator lab exec node-1 -- hostname\n"
            "  migrator lab down"
        ),
    )
    inner = arguments.Verbs(parser)
    up = inner.add("up", _up, "create the lab and start its daemons")
    up.add_argument(
        "--nodes", default=DEFAULT_NODES, metavar="A,B,…", help=f"names of the nodes (default: {DEFAULT_NODES})"
    )
    up.add_argument(
        "--autopilot",
        action="store_true",
        help="start an autopilot too, which moves ranks away from nodes with critical alarms (see --policy)",
    )
    up.add_argument("--policy", type=Path, metavar="FILE", help="policy of the autopilot (default: one made for labs)")
    inner.add("down", _down, "stop the lab and remove its files")
    ranks = inner.add(
        "run",
        _run,
        "run a command as one rank on every node whose name does not begin with spare",
        more="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set; every line of output is prefixed with its rank.",
        examples="  migrator lab run --job demo -- python train.py",
        takes_command=True,
    )
    ranks.add_argument(
        "--job", type=arguments.job, metavar="NAME", help="name of the job (default: that of the command)"
    )
    inside = inner.add(
        "exec",
        _exec,
        "run a command inside a node, like ssh",
        more='The node "operator" is the namespace from which the nodes are reached. Exits with the status of the command.',
        examples="  migrator lab exec node-1 -- ip addr",
        takes_command=True,
    )
    inside.add_argument("node", type=arguments.node, metavar="NODE")


def _lab(options: argparse.Namespace, *, new: bool = False) -> Lab:
    """The lab to use: the named one, or else the only one."""
    from migrator.lab import Lab

    name = getattr(options, "lab", None)
    if name is None and not new:
        names = Lab.names()
        if len(names) > 1 and DEFAULT_NAME not in names:
            raise Ambiguous(f"there are {len(names)} labs: {', '.join(names)}", remedy="name one with --lab")
        name = names[0] if len(names) == 1 else None
    return Lab(name or DEFAULT_NAME)


def _up(options: argparse.Namespace) -> int:
    lab = _lab(options, new=True)
    if options.policy is not None:
        if not options.autopilot:
            raise Usage("--policy is for --autopilot", remedy="give both, or none")
        policy.read(options.policy)
    lab.up([name.strip() for name in options.nodes.split(",")])
    page = ""
    if options.autopilot:
        given = options.policy or lab.layout.run / "policy.toml"
        if options.policy is None:
            given.write_text(POLICY)
        page = lab.start_autopilot(given).page
    nodes = {node: lab.address(node) for node in lab.nodes}
    if arguments.wants_json(options):
        made = {"lab": lab.name, "cluster": str(lab.cluster_path), "nodes": nodes}
        output.json_object(made | {"autopilot": bool(options.autopilot), "page": page})
    else:
        print(f"lab {lab.name} is up: " + ", ".join(f"{node} ({address})" for node, address in nodes.items()))
        if options.autopilot:
            print(f"  the autopilot's page, for a browser on this machine: {page}")
            print(f"  the autopilot's log: {lab.autopilot_log}")
        print(output.styled("  try: migrator lab run -- CMD …, migrator ps, migrator move --rank R --to NODE", "dim"))
    return 0


def _down(options: argparse.Namespace) -> int:
    lab = _lab(options)
    lab.down()
    if arguments.wants_json(options):
        output.json_object({"lab": lab.name, "down": True})
    else:
        print(f"lab {lab.name} is down")
    return 0


def _run(options: argparse.Namespace) -> int:
    job = options.job or run.job_name(None, options.command or ["job"], {})
    return _lab(options).run(job, options.command)


def _exec(options: argparse.Namespace) -> int:
    return _lab(options).exec(options.node, options.command)
