"""Measures the cost of a move (`make bench`), each number against a baseline in the same run.

The machines are noisy, so ratios within one run mean more than absolute seconds. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from integration import bench_connections, bench_nccl, bench_precopy, bench_transport
from integration.harness import MIGRATOR, WORKLOADS, Cluster, cluster, until
from snapshotd.criu.find import find_criu

MEMORY = str(WORKLOADS / "memory.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=4096, help="size of the rank that is moved")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precopy-limit", type=float, default=5.0, help="percent; see `migrator move --precopy-limit`")
    parser.add_argument("--large", action="store_true", help="also the source's memory for an 8 GiB rank")
    parser.add_argument(
        "--only", choices=["pause", "precopy", "idle", "run", "transport", "memory", "connections", "nccl"]
    )
    options = parser.parse_args()
    wanted = [options.only] if options.only else ["idle", "run", "pause", "precopy", "transport", "connections", "nccl"]
    if options.large and "memory" not in wanted:
        wanted.append("memory")
    if "transport" in wanted:
        wanted.remove("transport")
        bench_transport.main([])
    if wanted:
        with cluster("bench") as nodes:
            for name in wanted:
                _BENCHES[name](nodes, options)
    return 0


# ---------------------------------------------------------------- the pause, against plain criu


def pause(nodes: Cluster, options: argparse.Namespace) -> None:
    """Moves one rank several times; before each move, dumps and restores the same program with plain criu in local tmpfs."""
    job = nodes.start(
        "node-1", [sys.executable, MEMORY, "--mib", str(options.mib), "--steps", "100000000"], job="pause"
    )
    until("the rank to be ready", lambda: "READY" in job.text(), 300)
    ours: list[float] = []
    theirs: list[float] = []
    print(f"\nPause of a {options.mib} MiB rank, against `criu dump` + `criu restore` of the same program into tmpfs")
    for round_, to in zip(range(options.rounds), ["spare-1", "node-2", "node-1"] * options.rounds, strict=False):
        by_hand = criu_by_hand([MEMORY, "--mib", str(options.mib), "--steps", "100000000"])
        theirs.append(sum(by_hand))
        result = nodes.move(job, to, timeout_s=600)
        ours.append(result["pause_s"])
        phases = {phase["name"]: phase["seconds"] for phase in result["phases"]}
        print(
            f"  round {round_ + 1}: pause {ours[-1]:6.2f} s (stream {phases['stream']:.2f}, restore"
            f" {phases['restore']:.2f})   criu by hand {theirs[-1]:6.2f} s (dump {by_hand[0]:.2f}, restore"
            f" {by_hand[1]:.2f})   ratio {ours[-1] / theirs[-1]:.2f}",
            flush=True,
        )
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    print(f"  median ratio {statistics.median(ratios):.2f}   (goal: at most 1.0)")
    job.kill()


def criu_by_hand(program: Sequence[str]) -> tuple[float, float]:
    """Returns (dump seconds, restore seconds) of this program, without daemon and network, with images in local tmpfs."""
    criu = find_criu(None)[0]
    images = Path(tempfile.mkdtemp(dir="/dev/shm"))
    out = images.with_suffix(".out")
    try:
        with out.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *program],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        until("the program to be ready", lambda: b"READY" in out.read_bytes(), 300)
        common = ["-D", str(images), "--network-lock", "skip"]
        dump_s = timed([criu, "dump", "-t", str(process.pid), *common, "-o", "dump.log"])
        process.wait()
        restore_s = timed([criu, "restore", "-d", *common, "-o", "restore.log"])
        os.kill(process.pid, signal.SIGKILL)
        until("the restored program to be gone", lambda: not Path(f"/proc/{process.pid}").exists(), 60)
        return dump_s, restore_s
    finally:
        shutil.rmtree(images)
        out.unlink()


def timed(command: list[str]) -> float:
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
    return time.monotonic() - began


# ---------------------------------------------------------------- the cost of an idle daemon


def idle(nodes: Cluster, options: argparse.Namespace) -> None:
    job = nodes.workload("node-1", "threads.py", "--steps", "100000000", "--pace-s", "1", job="idle")
    job.await_lines(2)
    pid = nodes.lab.daemon_pid("node-1")
    assert pid is not None
    pids = {"daemon": pid, "network process": network_process(pid)}
    seconds = 20.0
    before = sum(map(cpu_s, pids.values()))
    time.sleep(seconds)
    share = (sum(map(cpu_s, pids.values())) - before) / seconds
    parts = ", ".join(f"{name} {pss_mib(one):.0f}" for name, one in pids.items())
    total = sum(map(pss_mib, pids.values()))
    print(f"\nIdle daemon with one rank, both processes, over {seconds:.0f} s")
    print(f"  {share * 100:.2f} % of a core (goal: below 1 %), {total:.0f} MiB in memory ({parts}; goal: below 100)")
    job.kill()


def network_process(daemon: int) -> int:
    for child in Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text() == "snapshotd-net\n":
            return int(child)
    raise SystemExit(f"daemon {daemon} has no network process")


def pss_mib(pid: int) -> float:
    """Its memory; pages that processes share count once for all of them together."""
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("Pss:")) / 1024


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---------------------------------------------------------------- the overhead of `migrator run`


def run(nodes: Cluster, options: argparse.Namespace) -> None:
    """Times starts with and without `migrator run`, alternating; then steps with and without, alternating."""
    plain, protected = [], []
    for _ in range(15):
        plain.append(once(nodes, ["/bin/true"]))
        protected.append(once(nodes, [*MIGRATOR, "run", "--job", "start", "--", "/bin/true"]))
    added_ms = (statistics.median(protected) - statistics.median(plain)) * 1000
    print("\n`migrator run -- true` against `true`, 15 starts each, alternating")
    print(f"  adds {added_ms:.0f} ms to a start (goal: below 150)")
    program = (
        "import time\n"
        "began = time.perf_counter()\n"
        "for step in range(2000):\n"
        "    sum(range(3000)); print(step, flush=True)\n"
        "print('took', time.perf_counter() - began)\n"
    )
    ratios = []
    for _ in range(7):
        bare = step_s(nodes, [sys.executable, "-c", program])
        kept = step_s(nodes, [*MIGRATOR, "run", "--job", "steps", "--", sys.executable, "-c", program])
        ratios.append(kept / bare)
    print("A loop of 2000 short steps with a line of output each, with and without `migrator run`, alternating")
    print(f"  median ratio {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def once(nodes: Cluster, command: list[str]) -> float:
    began = time.monotonic()
    process = nodes.lab.spawn("node-1", command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert process.wait(60) == 0
    return time.monotonic() - began


def step_s(nodes: Cluster, command: list[str]) -> float:
    process = nodes.lab.spawn("node-1", command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate(timeout=120)
    return float(text.rsplit("took ", 1)[1])


# ---------------------------------------------------------------- memory of the source while a large rank moves


def memory(nodes: Cluster, options: argparse.Namespace) -> None:
    """Moves a rank with 6 GiB of memory and a 2 GiB unlinked shared-memory file; shows what else the source uses."""
    size = {"--mib": 6144, "--ghost-mib": 2048}
    arguments = [word for key, value in size.items() for word in (key, str(value))]
    job = nodes.start("node-1", [sys.executable, MEMORY, *arguments, "--steps", "100000000"], job="large")
    until("the rank to be ready", lambda: "READY" in job.text(), 600)
    with sampled(nodes, "node-1") as source, sampled(nodes, "spare-1") as target:
        result = nodes.move(job, "spare-1", timeout_s=900)
    print("\nAn 8 GiB rank, 2 GiB of it an unlinked shared-memory file")
    print(f"  moved, pause {result['pause_s']:.1f} s; bytes sent {result['bytes'] / 2**30:.2f} GiB")
    print(f"  the source's peak beside the rank: {max(source):.0f} MiB (goal: at most 1024)")
    print(f"  the target's daemon at its peak: {max(target):.0f} MiB with criu and without its images")
    job.kill()


@contextlib.contextmanager
def sampled(nodes: Cluster, node: str) -> Iterator[list[float]]:
    """Samples the MiB used by a node's daemon, its criu processes and (on the source) its image folder."""
    peaks: list[float] = [0.0]
    done = threading.Event()
    pid = nodes.lab.daemon_pid(node)
    assert pid is not None
    images = Path(f"/proc/{pid}/root/run/snapshotd/images/out")

    def watch() -> None:
        while not done.wait(0.05):
            with contextlib.suppress(OSError, ValueError, IndexError):
                stored = sum(path.stat().st_blocks * 512 for path in images.rglob("*")) / 2**20
                criu = sum(rss_mib(child) for child in criu_pids(nodes, node))
                peaks.append(rss_mib(pid) + stored + criu)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def criu_pids(nodes: Cluster, node: str) -> list[int]:
    folder = nodes.lab.layout.node_cgroup(node)
    found: list[int] = []
    for path in folder.rglob("criu-*/cgroup.procs"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


# ---------------------------------------------------------------- the cost of a move to the other ranks


def connections(nodes: Cluster, options: argparse.Namespace) -> None:
    mib = min(options.mib, 1024)
    bench_connections.show(bench_connections.run(nodes, mib), mib)


def nccl(nodes: Cluster, options: argparse.Namespace) -> None:
    bench_nccl.show_calls(bench_nccl.calls())
    bench_nccl.show(bench_nccl.run(nodes))


def precopy(nodes: Cluster, options: argparse.Namespace) -> None:
    bench_precopy.run(nodes, options, criu_by_hand)


_BENCHES = {
    "pause": pause,
    "precopy": precopy,
    "idle": idle,
    "run": run,
    "memory": memory,
    "connections": connections,
    "nccl": nccl,
}

if __name__ == "__main__":
    sys.exit(main())
