"""Prints a chain of digests, one line per step, until SIGTERM or --steps. A witness file shows steps that ran twice.

Every step is also appended to the file --witness, which is opened by name each time. A second copy that ran even for a
moment leaves its steps there, although its output reaches no reader.
"""

import argparse
import hashlib
import os
import signal
import time

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1 << 30)
parser.add_argument("--pace-s", type=float, default=0.01)
parser.add_argument("--witness", default=os.devnull)
options = parser.parse_args()

ending: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _frame: ending.append(number))

state = b""
for step in range(options.steps):
    state = hashlib.sha256(state).digest()
    with open(options.witness, "a") as witness:
        witness.write(f"{step}\n")
    print("step", step, state.hex()[:16], flush=True)
    if ending:
        break
    time.sleep(options.pace_s)
print("DONE", flush=True)
