"""The kinds of faults, and how often each comes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from integration.chaos import faults
from integration.chaos.faults import Fault
from integration.chaos.jobs import ChaosJob

KINDS: dict[str, Callable[[Random, ChaosJob], Fault]] = {
    "none": faults.nothing,
    **{f"point-{action}": faults.at_point(action) for action in ("fail", "kill", "stop", "wait")},
    "daemon-kill": faults.daemon_killed,
    "daemon-stop": faults.daemon_stopped,
    "network-kill": faults.network_killed,
    "criu-kill": faults.criu_killed,
    "driver-kill": faults.driver_killed,
    "driver-interrupt": faults.driver_interrupted,
    "link-cut": faults.link_cut,
    "node-crash": faults.node_crashed,
    "rank-kill": faults.rank_killed,
    "keeper-kill": faults.keeper_killed,
    "refusal": faults.refused,
    "second-move": faults.asked_twice,
    "two": faults.two,
}
#: Kinds that have many cases come up more often.
_WEIGHTS = {"point-fail": 2, "point-kill": 4, "point-wait": 2, "daemon-kill": 3, "link-cut": 2, "two": 3}


def draw(random: Random, job: ChaosJob, among: Sequence[str] = tuple(KINDS)) -> Fault:
    """A fault of one of these kinds."""
    kind = random.choices(among, [_WEIGHTS.get(name, 1) for name in among])[0]
    return KINDS[kind](random, job)


def options(among: Sequence[str]) -> list[str]:
    """The options of `make chaos` that choose these kinds."""
    missing = [kind for kind in KINDS if kind not in among]
    if len(missing) < len(among):
        return [f"--without {kind}" for kind in missing]
    return [f"--faults {kind}" for kind in among]
