"""`make demo-rollback`: brings up a lab, protects a small training job, powers a node off without warning, and compares the
losses with an undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from integration.demo import LIMIT_S, MIGRATOR, in_lab, say
from integration.demo_training import Ended, Training, first_difference
from migrator.lab import Lab

NODES = ("node-1", "node-2", "spare-1", "spare-2")
#: How long the job may be down: a node that is silent is waited for, then the ranks are restored.
DOWN_S = 240.0
STEPS = 40
SHOWN = 100  # every such step


class Protector:
    """`migrator protect`, whose lines are shown."""

    def __init__(self, environment: dict[str, str], *options: str) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [*MIGRATOR, "protect", "demo", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            say(f"  protect  {line.rstrip()}")
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def await_line(self, part: str, limit_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: any(part in line for line in self.lines), limit_s):
                raise Ended(f"`migrator protect` did not say {part!r} within {limit_s:.0f} s. See its lines above.")

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> int:
    return in_lab(Lab("demo"), NODES, demonstrate)


def demonstrate(lab: Lab) -> int:
    environment = {**os.environ, "MIGRATOR_CLUSTER": str(lab.cluster_path)}
    say("\n$ migrator lab run --job demo -- python train.py        (two ranks; the output of rank 1 is shown)")
    end = lab.layout.operator / "end"  # all nodes see this folder
    training = Training([*MIGRATOR, "lab", "--lab", lab.name, "run", "--job", "demo", "--"], end, environment, SHOWN)
    training.await_steps(STEPS, LIMIT_S)
    _migrator(environment, "move", "--rank", "1", "--to", "spare-1")  # its launcher stays on node-2
    say("\n$ migrator protect demo --every 10m &")
    protector = Protector(environment, "--every", "10m")
    try:
        protector.await_line(", paused ", LIMIT_S)
        training.await_steps(training.steps + STEPS, LIMIT_S)
        say("\nspare-1 loses its power, with rank 1 on it. Nobody types a command.")
        lab.crash("spare-1")
        before = training.steps
        protector.await_line(", down ", DOWN_S)
        training.await_steps(before + STEPS, LIMIT_S)
        _migrator(environment, "ps")
        _migrator(environment, "history")
        end.write_text(str(training.steps + STEPS))
        training.await_end(LIMIT_S)
    finally:
        protector.end()
    say("\nRunning the same training undisturbed, for comparison.")
    if (difference := first_difference(training.output, training.undisturbed())) is not None:
        raise Ended(difference)
    gap = f"The longest gap between two steps was {training.longest_s:.1f} s."
    say(f"  All {training.steps} losses are identical, and each was printed once. {gap}")
    return 0


def _migrator(environment: dict[str, str], *words: str) -> None:
    say(f"\n$ migrator {' '.join(words)}")
    done = subprocess.run([*MIGRATOR, *words], env=environment, start_new_session=True)
    if done.returncode != 0:
        raise Ended(f"`migrator {words[0]}` failed. See its message above.")


if __name__ == "__main__":
    sys.exit(main())
