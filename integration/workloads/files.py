# ruff: noqa: SIM115 - files that stay open are the point
"""Keeps files open at an offset: a private one in /tmp, one in a shared folder, a log that others append to, a locked one."""

import argparse
import fcntl
import os
import tempfile

from steps import say, steps, wrong

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder that both nodes see")
options, _ = parser.parse_known_args()
own = tempfile.NamedTemporaryFile("w+", dir="/tmp")
shared = open(os.path.join(options.folder, f"shared-{os.getpid()}.txt"), "w+")
log = open(os.path.join(options.folder, "shared.log"), "a")
locked = open(f"/tmp/lock-{os.getpid()}", "w")
fcntl.flock(locked, fcntl.LOCK_EX)
for step in steps():
    own.write(f"{step}\n")
    own.flush()
    shared.write(f"{step}\n")
    shared.flush()
    log.write(f"workload {step}\n")
    log.flush()
    if not os.path.exists(own.name):
        wrong("the temporary file's name is gone")
    say(step, own.tell(), shared.tell())
own.seek(0)
shared.seek(0)
whole = "".join(f"{number}\n" for number in range(step + 1))
if own.read() != whole or shared.read() != whole:
    wrong("file contents")
lines = [line for line in open(log.name) if line.startswith("workload")]
if lines != [f"workload {number}\n" for number in range(step + 1)]:
    wrong("the log")
if not os.path.exists(locked.name):
    wrong("the locked file")
for path in (shared.name, locked.name):
    os.unlink(path)
