"""Starts programs that live for a moment, all the time, as jobs do that call nvidia-smi, git or a shell in a thread."""

import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "workloads"))

from steps import say, steps, wrong

COMMANDS = (["/bin/sh", "-c", "sleep 0.05; exit 3"], ["/bin/sleep", "0.05"], ["/usr/bin/env", "sh", "-c", "exit 3"])
stop = threading.Event()
failures: list[str] = []


def start_programs() -> None:
    while not stop.is_set():
        for command in COMMANDS:
            code = subprocess.run(command).returncode
            if code != (0 if command[0] == "/bin/sleep" else 3):
                failures.append(f"{command} ended with {code}")


thread = threading.Thread(target=start_programs)
thread.start()
for step in steps():
    if failures:
        stop.set()
        wrong(failures[0])
    say(step)
stop.set()
thread.join()
