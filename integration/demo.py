"""`make demo`: brings up a lab, moves one rank of a small training job by hand, then lets the autopilot move it away from a
node that fails, and compares the losses with an unmoved run."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from types import FrameType

from integration.demo_training import Ended, Training, first_difference
from integration.kernel_log import kernel_says
from migrator.cli.lab import POLICY
from migrator.lab import Lab
from migrator.lab.layout import write
from snapshotd.api.errors import SnapshotError

MIGRATOR = (sys.executable, "-m", "migrator.cli")
NODES = ("node-1", "node-2", "spare-1", "spare-2")
MOVE_AT, STEPS_AFTER = 50, 20
LIMIT_S = 120.0
FAULT = "Memory failure: 0x1f0: recovery action for dirty LRU page: Failed"
SHOWN = ("signal: ", "state: ", "intent: ", "result: ", "alert: ")
INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--keep", action="store_true", help="keep the cluster and the page until Ctrl-C (make demo KEEP=1)"
    )
    options = parser.parse_args()
    return in_lab(Lab("demo"), NODES, lambda lab: demonstrate(lab, keep=options.keep))


def in_lab(lab: Lab, nodes: Sequence[str], demonstrate: Callable[[Lab], int]) -> int:
    """Brings a lab up, demonstrates something in it, and removes it. Returns the exit code."""
    # Both end the demonstration through `finally`, also where a shell started it with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    say(f"Bringing up a cluster on this machine: {', '.join(nodes)}, each with its own daemon.")
    try:
        lab.down()
        try:
            lab.up(nodes)
            return demonstrate(lab)
        finally:
            lab.down()
    except KeyboardInterrupt:
        print("\nInterrupted. The cluster was removed.", file=sys.stderr)
        return INTERRUPTED
    except Ended as ended:
        print(f"demo: {ended}", file=sys.stderr)
        return 1
    except SnapshotError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the clean-up is not interrupted
    raise KeyboardInterrupt


def say(text: str) -> None:
    print(text, flush=True)


def demonstrate(lab: Lab, *, keep: bool) -> int:
    environment = {**os.environ, "MIGRATOR_CLUSTER": str(lab.cluster_path)}

    def migrator(*words: str) -> None:
        say(f"\n$ migrator {' '.join(words)}")
        # In a session of its own: Ctrl-C goes to the demonstration, which removes the lab.
        done = subprocess.run([*MIGRATOR, *words], env=environment, start_new_session=True)
        if done.returncode != 0:
            raise Ended(f"`migrator {words[0]}` failed. See its message above.")

    say("\n$ migrator lab run --job demo -- python train.py        (two ranks; the output of rank 1 is shown)")
    end = lab.layout.operator / "end"  # all nodes see this folder
    training = Training([*MIGRATOR, "lab", "--lab", lab.name, "run", "--job", "demo", "--"], end, environment)
    training.await_steps(MOVE_AT, LIMIT_S)
    migrator("move", "--rank", "1", "--to", "spare-1")
    page = fail_and_let_it_move(lab)
    training.await_steps(training.steps + STEPS_AFTER, LIMIT_S)
    write(end, str(training.steps + STEPS_AFTER))
    migrator("report")
    training.await_end(LIMIT_S)

    say("\nRunning the same training without a move, for comparison.")
    reference = training.undisturbed()
    if (difference := first_difference(training.output, reference)) is not None:
        raise Ended(difference)
    gap = f"The longest gap between two steps was {training.longest_s:.1f} s."
    say(f"  All {training.steps} losses are identical after both moves. {gap}")
    if keep:
        say(f"\nThe page stays at {page} until Ctrl-C.")
        signal.pause()
    return 0


def fail_and_let_it_move(lab: Lab) -> str:
    """Starts the autopilot, lets the memory of spare-1 fail, waits until the rank has left it. Returns the page's address."""
    policy = lab.layout.run / "policy.toml"
    policy.write_text(POLICY)
    say(
        "\nStarting the autopilot, as `migrator lab up --autopilot` does. Its policy: move ranks away after critical alarms."
    )
    page = lab.start_autopilot(policy).page
    port = page.rstrip("/").rpartition(":")[2]
    say(
        f"  Its page: {page}  (in a browser on this machine; from elsewhere first: ssh -L {port}:127.0.0.1:{port} {host()})"
    )
    with urllib.request.urlopen(page, timeout=LIMIT_S) as answer:
        answer.read()
    say(f'\nThe kernel of spare-1 now reports: "{FAULT}". Nobody types a command.')
    shown, deadline = 0, time.monotonic() + LIMIT_S
    kernel_says(lab, "spare-1", FAULT)
    while time.monotonic() < deadline:
        lines = lab.autopilot_log.read_text().splitlines(keepends=True)
        for line in (line for line in lines[shown:] if line.endswith("\n")):
            shown += 1
            if line.startswith(SHOWN):
                say(f"  autopilot  {line.rstrip()}")
            if line.startswith("result: ") and ": moved" in line:
                return page
        time.sleep(0.1)
    raise Ended(f"the autopilot has not moved the rank within {LIMIT_S:.0f} s. Its log: {lab.autopilot_log}")


def host() -> str:
    return socket.gethostname()


if __name__ == "__main__":
    sys.exit(main())
