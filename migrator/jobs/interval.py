"""How often to take snapshots of a job: the interval at which snapshots and lost work together cost least.

With a pause of C seconds for each snapshot and a failure of the job every M seconds on average, an interval of T costs
the share C/T for snapshots, and with each failure T/2 seconds of work, besides the time until the job runs again. Young's
interval sqrt(2·C·M) makes the sum smallest; Daly's correction matters where C is not small against M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Of one node. Llama 3: 419 unexpected interruptions of 2,048 nodes in 54 days.
NODE_MTBF_S = 54 * 86400 * 2048 / 419
#: Shorter intervals would leave the job no time between the copies of two snapshots.
SHORTEST_S, LONGEST_S = 30.0, 3600.0
#: Until the job runs again after a failure: noticing it, and restoring. Measured in the lab, see integration/RESULTS.md.
DOWN_S = 15.0


@dataclass(frozen=True)
class Interval:
    """An interval, and the shares of the job's time that it costs on average."""

    every_s: float
    snapshots: float
    failures: float
    mtbf_s: float  # of the whole job

    def __str__(self) -> str:
        total = 100 * (self.snapshots + self.failures)
        return (
            f"a snapshot every {self.every_s:.0f} s; expected cost {total:.2f} % of the time:"
            f" {100 * self.snapshots:.2f} % for snapshots, {100 * self.failures:.2f} % for work that is lost when something"
            f" fails, every {self.mtbf_s / 3600:.1f} h on average"
        )


def best(pause_s: float, nodes: int, node_mtbf_s: float = NODE_MTBF_S, down_s: float = DOWN_S) -> Interval:
    """For a job on `nodes` nodes, whose snapshots pause it for `pause_s`."""
    mtbf_s = node_mtbf_s / max(1, nodes)
    cost_s = max(pause_s, 0.001)
    if cost_s < 2 * mtbf_s:  # Daly, the first terms of his series; beyond, an interval of the MTBF itself
        part = math.sqrt(cost_s / (2 * mtbf_s))
        every_s = math.sqrt(2 * cost_s * mtbf_s) * (1 + part / 3 + part * part / 9) - cost_s
    else:
        every_s = mtbf_s
    every_s = min(max(every_s, SHORTEST_S), LONGEST_S)
    return Interval(every_s, cost_s / every_s, (every_s / 2 + down_s) / mtbf_s, mtbf_s)
