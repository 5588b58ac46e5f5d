"""`make chaos`: random moves with random faults, or a soak of moves without faults."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from integration.chaos import jobs, labs
from integration.chaos.jobs import Broken, Say
from integration.chaos.kinds import KINDS
from integration.chaos.losses import LOSSES
from integration.chaos.piloted import PilotedChaos
from integration.chaos.protected import JOBS, NODES, ProtectedChaos
from integration.chaos.rounds import Chaos
from integration.chaos.soak import Soak
from integration.gpu_nodes import GpuCluster
from integration.harness import Cluster, cluster
from snapshotd.api.errors import SnapshotError
from tests.fakes.cuda_fake import gpus

INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=15.0, help="how long to run (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="seed of all choices (default: the time)")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="number of the first round (default: 1)")
    parser.add_argument("--rounds", type=int, metavar="N", help="maximum number of rounds")
    parser.add_argument(
        "--jobs",
        choices=[*jobs.ALL_KINDS, *(kind for kind in JOBS if kind not in jobs.ALL_KINDS)],
        action="append",
        help="kind of job; can be repeated (default: all)",
    )
    parser.add_argument(
        "--faults", choices=[*KINDS, *LOSSES], action="append", help="kind of fault; can be repeated (default: all)"
    )
    parser.add_argument(
        "--without", choices=[*KINDS, *LOSSES], action="append", default=[], help="kind of fault to leave out"
    )
    parser.add_argument(
        "--soak", type=int, metavar="MOVES", help="make so many moves without faults, and watch the daemons"
    )
    parser.add_argument(
        "--autopilot", action="store_true", help="let the autopilot move ranks away from failing nodes, and kill it too"
    )
    parser.add_argument(
        "--rollback", action="store_true", help="protect a job with snapshots, and lose its ranks and nodes"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--labs", type=int, default=1, metavar="N", help="so many labs at a time, each with its own seed"
    )
    options = parser.parse_args()
    if options.labs < 1 or (options.labs > 1 and options.soak):
        parser.error("--labs takes a number from 1, and does not go with --soak")
    seed = options.seed if options.seed is not None else int(time.time())
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started it with SIGINT ignored
        signal.signal(number, _interrupt)
    out = sys.stderr if options.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    say(f"seed {seed}")
    if options.labs > 1:
        code, reports = labs.run(options.labs, _of_one_lab(sys.argv[1:]), seed, options.minutes, say)
        if options.json:
            print(json.dumps(reports))
        return code
    try:
        if options.rollback:
            with cluster("losses", NODES) as nodes:
                return _rollback(nodes, seed, options, say)
        with cluster("soak" if options.soak else "chaos") as nodes:
            return _soak(nodes, seed, options, say) if options.soak else _chaos(nodes, seed, options, say)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SnapshotError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _of_one_lab(arguments: Sequence[str]) -> list[str]:
    """These arguments without the number of labs, the seed and the form of the report."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--labs")
    parser.add_argument("--seed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(arguments)[1]


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):  # a second one must not disturb the removal of the lab
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _status(work: Callable[[], object], say: Say) -> int:
    """Does the work; the exit code. What was measured until then is still printed."""
    try:
        work()
    except Broken as error:
        say(f"BROKEN: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    return 0


def _chaos(nodes: Cluster, seed: int, options: argparse.Namespace, say: Say) -> int:
    kinds = tuple(kind for kind in options.jobs or jobs.ALL_KINDS if kind in jobs.ALL_KINDS)
    faults = [kind for kind in options.faults or KINDS if kind in KINDS and kind not in options.without]
    made = PilotedChaos if options.autopilot else Chaos
    chaos = made(nodes, seed, say, kinds, _gpus(nodes, 2) if jobs.NcclGpu.kind in kinds else None, faults)
    return _run(chaos, options, say)


def _rollback(nodes: Cluster, seed: int, options: argparse.Namespace, say: Say) -> int:
    faults = [kind for kind in options.faults or LOSSES if kind in LOSSES and kind not in options.without]
    kinds = [kind for kind in options.jobs or JOBS if kind in JOBS]
    gpus_of_nodes = _gpus(nodes, 8) if "nccl-gpu" in kinds else None
    return _run(ProtectedChaos(nodes, seed, say, kinds, gpus_of_nodes, faults), options, say)


def _run(chaos: Chaos | ProtectedChaos, options: argparse.Namespace, say: Say) -> int:
    status = _status(lambda: chaos.run(60 * options.minutes, options.first, options.rounds), say)
    say(chaos.report.table())
    if chaos.report.broken:
        say(f"BROKEN: {chaos.report.broken.partition(chr(10))[0]}")
        say(f"repeat with: {chaos.report.repeat()} (the rounds before it are part of the state)")
    if options.json:
        print(json.dumps(chaos.report.to_json()))
    return status


def _gpus(nodes: Cluster, count: int) -> jobs.Gpus:
    """So many for each node that all ranks of a job can be on one."""
    lab = GpuCluster(nodes, nodes.folder / "nodes")
    for node in nodes.lab.nodes:
        lab.give(node, *gpus(node, count=count))
    return lab.nodes


def _soak(nodes: Cluster, seed: int, options: argparse.Namespace, say: Say) -> int:
    soak = Soak(nodes, seed, say)
    status = _status(lambda: soak.run(options.soak), say)
    say(soak.table())
    if options.json:
        print(json.dumps(soak.to_json()))
    return status or int(bool(soak.growth()))


if __name__ == "__main__":
    sys.exit(main())
