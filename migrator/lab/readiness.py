"""Waits until the daemons and the autopilot of a lab answer, and reports why one does not.

A daemon that exits (because of an invalid configuration, for example) is reported at once, with the end of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from migrator.lab import processes
from migrator.lab.layout import LabProcess
from snapshotd.api.errors import Unreachable
from snapshotd.proc.pidfd import open_pidfd

LOG_LINES = 30
_PAGE = re.compile(r"^page: the page is at (http://\S+)$", re.MULTILINE)
_PACKAGES = Path(__file__).parents[2]


def await_daemons(cluster: Path, daemons: Mapping[str, tuple[LabProcess, Path]], timeout_s: float) -> None:
    """Waits until every daemon answers the operator, else raises Unreachable. `daemons`: process and log, by node."""
    packages = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": packages}
    argv = [sys.executable, "-m", "migrator.lab.probe", str(cluster), str(timeout_s), *daemons]
    probe = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    with probe:
        try:
            ended = _first_end(probe, daemons, timeout_s + 60)
        finally:
            if probe.poll() is None:
                probe.kill()
        out, err = probe.communicate()
    if ended:
        raise _silent(dict.fromkeys(ended, "it ended"), daemons)
    if probe.returncode != 0:
        try:
            reasons = json.loads(out)
        except ValueError:
            why = err.decode(errors="replace").strip() or "they were not asked in time"
            reasons = dict.fromkeys(daemons, why)
        raise _silent(reasons, daemons)


def await_page(autopilot: LabProcess, log: Path, after: int, timeout_s: float) -> str:
    """The address of the autopilot's page, which it writes into its log, there after so many bytes of earlier ones."""
    deadline = time.monotonic() + timeout_s
    while True:
        running = processes.alive(autopilot)  # before the log is read: what it wrote before its end is then complete
        content = log.read_bytes()[after:].decode(errors="replace") if log.exists() else ""
        if found := _PAGE.search(content):
            return found[1]
        if not running or time.monotonic() > deadline:
            why = f"has no page after {timeout_s:.0f} s" if running else "ended"
            lines = "".join(f"\n  {line}" for line in content.splitlines()[-LOG_LINES:])
            raise Unreachable(f"the autopilot {why}; the end of its log:{lines}", remedy="the log above says why")
        time.sleep(0.05)


def _first_end(
    probe: subprocess.Popen[bytes], daemons: Mapping[str, tuple[LabProcess, Path]], timeout_s: float
) -> list[str]:
    """Waits for the probe. Returns the nodes whose daemon ended before it."""
    with contextlib.ExitStack() as stack:
        poll = select.poll()

        def watch(pid: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                pidfd = open_pidfd(pid)
                stack.callback(os.close, pidfd)
                poll.register(pidfd, select.POLLIN)

        watch(probe.pid)
        for process, _ in daemons.values():
            watch(process.pid)
        # Checked after the descriptors were opened: poll reports a daemon that ends later.
        ended = [node for node, (process, _) in daemons.items() if not processes.alive(process)]
        if not ended:
            poll.poll(timeout_s * 1000)
            if probe.poll() is None:
                ended = [node for node, (process, _) in daemons.items() if not processes.alive(process)]
        return ended


def _silent(reasons: Mapping[str, str], daemons: Mapping[str, tuple[LabProcess, Path]]) -> Unreachable:
    text = [f"{len(reasons)} of {len(daemons)} daemons do not answer"]
    for node, why in reasons.items():
        text.append(f"{node}: {why}; the end of its log:")
        with contextlib.suppress(OSError):
            lines = daemons[node][1].read_text(errors="replace").splitlines()
            text += [f"  {line}" for line in lines[-LOG_LINES:]]
    return Unreachable("\n".join(text), remedy="the log above says why")
