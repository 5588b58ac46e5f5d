"""The state of one lab: its lock, its record, and how to enter its places (the nodes and the operator's namespace).

Invariant: the record is changed only under the lock. A place is entered only through a process that belongs to this lab
according to its pid, start time and cgroup.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from migrator.lab import processes
from migrator.lab.inside import start_ticks
from migrator.lab.layout import OPERATOR, SWITCH, LabProcess, Layout, Record
from snapshotd.api.errors import Denied, Internal, NotFound, SnapshotError, WrongState

if TYPE_CHECKING:
    from migrator.lab.network import End

#: The command line of inside.py; a verb follows.
INSIDE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("inside.py")))
#: The cgroups of a place, all leaves: the daemon may add cgroups with limits beside them, and the parent must then be empty.
LEAVES = ("holder", "daemon", "session")


def need_root() -> None:
    if os.geteuid() != 0:
        raise Denied("a lab is made of namespaces, which only root may make", remedy="use sudo")


class Site:
    """The lab of one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def record(self) -> Record:
        """What was started. Raises NotFound if the lab is not up."""
        record = self.layout.load()
        if record is None:
            raise self._not_up()
        return record

    def is_complete(self) -> bool:
        try:
            record = self.record()
        except SnapshotError:
            return False
        return record.complete and SWITCH in record.holders and processes.alive(record.holders[SWITCH])

    def check(self, record: Record, node: str) -> int:
        """The number of a node. Raises NotFound if the lab has no node of that name."""
        if node not in record.nodes:
            names = ", ".join(record.nodes)
            raise NotFound(f"no node of lab {self.layout.name} is called {node!r}", remedy=f"its nodes are: {names}")
        return record.nodes.index(node)

    def resident(self, record: Record, place: str) -> LabProcess:
        """A running process in the namespaces of a node or of the operator."""
        if place != OPERATOR:
            self.check(record, place)
        process = record.holders.get(SWITCH if place == OPERATOR else place)
        found = processes.resident(process, self.layout.node_cgroup(place)) if process is not None else None
        if found is None:
            raise WrongState(
                f"{place} of lab {self.layout.name} is not running",
                remedy="`migrator lab down` and `migrator lab up` make it anew",
            )
        return found

    def end(self, record: Record, place: str) -> End:
        """A place as one side of a cut."""
        from migrator.lab.network import End

        return End(self.resident(record, place), record.index(place))

    def hold(self, place: str, spec: dict[str, Any]) -> LabProcess:
        """Creates the namespaces of a place and the process that keeps them alive; `spec` is that of `inside.hold`."""
        cgroup = self.layout.node_cgroup(place)
        try:
            for leaf in LEAVES:
                (cgroup / leaf).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Internal(f"{cgroup} cannot be made: {error.strerror}", remedy="cgroup2 must be writable") from error
        spec = {**spec, "cgroup_procs": str(cgroup / "holder/cgroup.procs"), "title": f"lab:{place}"}
        done = subprocess.run([*INSIDE, "hold", json.dumps(spec)], stdin=subprocess.DEVNULL, capture_output=True)
        answer = json.loads(done.stdout or b"{}")
        ticks = start_ticks(answer.get("pid", -1))
        if ticks is None:
            why = answer.get("error") or done.stderr.decode(errors="replace").strip() or "it was killed"
            raise Internal(f"{place} of lab {self.layout.name} could not be made: {why}", remedy="see the reason above")
        return LabProcess(answer["pid"], ticks, processes.namespaces(answer["pid"], spec["namespaces"]))

    def way_in(self, record: Record, place: str, leaf: str) -> dict[str, Any]:
        """The part of `inside.enter`'s spec that identifies a place and a cgroup in it."""
        process = self.resident(record, place)
        procs = self.layout.node_cgroup(place) / leaf / "cgroup.procs"
        spaces = list(process.namespaces)
        return {
            "pid": process.pid,
            "start_ticks": process.start_ticks,
            "namespaces": spaces,
            "cgroup_procs": str(procs),
        }

    @contextlib.contextmanager
    def locked(self, *, make: bool = False) -> Iterator[None]:
        """Allows one change of a lab at a time. The lock is the lab's directory itself, so no lock file remains."""
        while True:
            try:
                if make:
                    self.layout.run.mkdir(mode=0o755, parents=True, exist_ok=True)
                descriptor = os.open(self.layout.run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                if make:
                    continue  # another lab's `down` removed the parent in the meantime
                raise self._not_up() from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self._is_folder(descriptor):
                    yield
                    return
                # The lab was taken down, and perhaps rebuilt, during the wait: this lock is on a removed directory.
            finally:
                os.close(descriptor)

    def _is_folder(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.layout.run.stat())
        except FileNotFoundError:
            return False

    def _not_up(self) -> NotFound:
        return NotFound(f"the lab {self.layout.name} is not up", remedy="`migrator lab up` starts one")
