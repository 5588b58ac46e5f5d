"""A user changes files, folders, namespaces, maps and descriptors at random moments of moves: root must not be misled.

By default a few moves; `--whole` makes 500. Each move may end well, or be refused or undone. In every case the rank goes on,
no process has opened root's secret file, no process of root has written outside the daemon's folders, no mount was added, and
no program of the user has run as root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import MIGRATOR, Cluster, Job
from integration.security.watcher import Touched, Watcher
from tests.installation import readable_copy, readable_python
from tests.sampling import Sampler

USER = ("setpriv", "--reuid=1500", "--regid=1500", "--clear-groups")
HOSTILE = Path(__file__).with_name("hostile.py")
NODES = ("node-1", "spare-1")
#: Where root's processes of a lab may write: the daemon's run-time and state folders, what the lab itself keeps, and
#: Python's compiled files.
OWN = ("/run/criu.kdat", "/run/snapshotd/", "/run/migrator-lab/", "/var/lib/migrator-lab/", "/__pycache__/")


@pytest.fixture
def ground() -> Iterator[Path]:
    """A folder that users can read, with root's secret file in it."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="migrator-test-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "secrets").mkdir(mode=0o700)
        (folder / "secrets" / "log").write_text("a secret that only root may read\n")
        (folder / "secrets" / "log").chmod(0o600)
        shutil.copy(HOSTILE, folder)
        yield folder


def node_path(nodes: Cluster, node: str, path: str) -> Path:
    return Path(f"{nodes.run_dir(node).parent.parent}{path}")


def start(nodes: Cluster, ground: Path, node: str, role: str, seed: int) -> Job:
    python = readable_python()
    installed = readable_copy(ground / "installed") if not (ground / "installed").exists() else ground / "installed"
    command = [python, str(ground / "hostile.py"), role, "/tmp/race", str(ground / "secrets" / "log"), str(seed)]
    if role == "rank":
        command = [python, *MIGRATOR[1:], "run", "--job", "race", "--", *command]
    out = nodes.folder / f"race-{role}-{node}.out"
    with out.open("wb") as file:
        process = nodes.lab.spawn(
            *(node, [*USER, *command]),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": str(installed)},
            cwd=ground,
        )
    job = Job(nodes.lab, process, out, "race")
    nodes.jobs.append(job)
    return job


def mounts(nodes: Cluster) -> dict[str, list[str]]:
    """The mount points of each node's daemon, without the network namespaces of other labs on this machine."""
    lines = {node: Path(f"/proc/{nodes.lab.daemon_pid(node)}/mountinfo").read_text().splitlines() for node in NODES}
    points = {node: sorted(line.split()[4] for line in found) for node, found in lines.items()}
    return {node: [point for point in found if not point.startswith("/run/netns/")] for node, found in points.items()}


def outside(touched: list[Touched]) -> list[str]:
    """What root has no business with. It may fill the user's own files, in the user's own folder: that is the move."""
    theirs = [each for each in touched if not any(own in each.path for own in OWN)]
    return sorted({str(each) for each in theirs if ":/tmp/race/" not in each.path or each.owner != 1500})


@pytest.mark.timeout(7200)
def test_root_is_never_misled_by_races(
    nodes: Cluster, ground: Path, sampled: Sampler, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.option.seed
    mounted = ("/tmp", "/run", "/dev/shm")
    roots = [(f"{node}:", path, node_path(nodes, node, path)) for node in NODES for path in mounted]
    before = mounts(nodes)
    secret = ground / "secrets" / "log"
    stat = secret.stat()
    rank = start(nodes, ground, NODES[0], "rank", seed)
    rank.await_lines(10)
    for node in NODES:
        start(nodes, ground, node, "accomplice", seed)
    outcomes: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    with Watcher(ground / "secrets", [*roots, ("", "", Path("/"))], nodes.lab.layout.cgroup.name) as watcher:
        for move in sampled(range(500), 5):
            place = nodes.ps(rank)[0]["node"]
            target = NODES[1 - NODES.index(place)]
            done = nodes.migrator("move", "--rank", "0", "--job", "race", "--to", target, "--json")
            assert done.returncode in (0, 10, 11), f"move {move}: {done.stdout}\n{done.stderr}\n{nodes.logs()}"
            outcomes[done.returncode] += 1
            reasons[json.loads(done.stdout)["reason"][:300]] += 1
            rank.await_progress(3)
            if done.returncode == 0:  # tricks during the removal may have saved a file, which would refuse the way back
                shutil.rmtree(node_path(nodes, place, "/tmp/race"), ignore_errors=True)
    print("outcomes:", dict(outcomes), dict(reasons))
    assert not watcher.overflowed
    assert watcher.opened == [], "\n".join(map(str, watcher.opened))
    wrong = outside(watcher.written)
    assert wrong == [], "\n".join(wrong)
    assert (secret.read_text(), secret.stat().st_mode, secret.stat().st_ctime_ns) == (
        *("a secret that only root may read\n", stat.st_mode),
        stat.st_ctime_ns,
    )
    assert sorted(path.name for path in (ground / "secrets").iterdir()) == ["log"]
    assert mounts(nodes) == before
    for node in NODES:
        ran = node_path(nodes, node, "/tmp/race/ran-as")
        assert not ran.exists() or "0" not in ran.read_text().split()
