"""Runs on a terminal: prints its size when that changes, repeats lines, and counts Ctrl-C; the third one ends it."""

import contextlib
import os
import select
import signal
import sys

pressed: list[int] = []
resized: list[int] = [0]
signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
signal.signal(signal.SIGWINCH, lambda number, _frame: resized.append(number))

step = said = 0
while said < 3:
    print("step", step, flush=True)
    step += 1
    if resized:
        resized.clear()
        columns, rows = os.get_terminal_size(0)
        print("sits", os.isatty(0), os.isatty(1), os.isatty(2), f"{rows}x{columns}", flush=True)
    if len(pressed) > said:
        said = len(pressed)
        print("interrupt", said, flush=True)
    with contextlib.suppress(InterruptedError):
        if select.select([0], [], [], 0.02)[0]:
            print("line", sys.stdin.readline().strip(), flush=True)
os.close(os.open("/dev/tty", os.O_RDWR))
print("DONE", flush=True)
sys.exit(5)
