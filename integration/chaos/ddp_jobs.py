"""An unmodified DistributedDataParallel job over gloo that is snapshotted and rolled back while it runs."""

from __future__ import annotations

import sys

from integration.chaos.protected_jobs import ProtectedJob
from integration.harness import WORKLOADS, Cluster, Job
from integration.torch_jobs import TorchLab

PACE_S = 0.2
WIDTH = "64"
#: Undisturbed runs are made for so many steps more than needed, and used again.
_AHEAD = 500
_ports = iter(range(30100, 32700))


class Undisturbed:
    """What the ranks of an undisturbed run print, by the size of the job."""

    def __init__(self, nodes: Cluster) -> None:
        self._lab = TorchLab(nodes)
        self._known: dict[int, list[list[str]]] = {}

    def lines(self, world: int, steps: int) -> list[list[str]]:
        """The lines of each rank, of which the sum at the end may be left out."""
        if len(self._known.get(world, [[]])[0]) < steps:
            asked = ("--steps", str(steps + _AHEAD), "--late-group-at", "0", "--pace-s", "0", "--width", WIDTH)
            found = self._lab.undisturbed("ddp.py", *asked, world=world)
            self._known[world] = [sorted(lines, key=lambda line: int(line.split()[1])) for lines in found]
        return self._known[world]


class Ddp(ProtectedJob):
    """Rank 0 hosts the store."""

    kind = "ddp"

    def __init__(self, nodes: Cluster, homes: list[str], undisturbed: Undisturbed) -> None:
        self.undisturbed = undisturbed
        super().__init__(nodes, homes)

    def start(self) -> list[Job]:
        world = {
            "WORLD_SIZE": len(self.homes),
            "MASTER_ADDR": self.nodes.lab.address(self.homes[0]),
            "MASTER_PORT": next(_ports),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
        }
        program = [sys.executable, "-u", str(WORKLOADS / "ddp.py"), "--until", str(self.end_file), "--width", WIDTH]
        program += ["--pace-s", str(PACE_S)]
        started = []
        for rank, home in enumerate(self.homes):
            environment = [f"{name}={value}" for name, value in {**world, "RANK": rank}.items()]
            command = ["env", *environment, *program, "--witness", self.marker(rank)]
            with self.errors(rank).open("wb") as errors:
                started.append(self.nodes.start(home, command, rank=rank, job=self.name, stderr=errors))
        return started

    def expected(self, steps: int) -> list[list[str]]:
        return self.undisturbed.lines(len(self.homes), steps)

    def result(self, line: str) -> str:
        return line.split()[3]

    def is_right(self, line: str, undisturbed: str) -> bool:
        return line in {undisturbed, undisturbed.partition(" sum ")[0]}
