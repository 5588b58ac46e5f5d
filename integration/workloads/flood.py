"""Writes numbered blocks as fast as its readers take them, to every descriptor given in turn, until SIGTERM; then END.

Block `n` is the number `n`, eight digits, over and over: a byte that is lost, doubled or out of order shows.
"""

import os
import signal
import sys

BLOCK_NUMBERS = 2047

ending: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _frame: ending.append(number))
descriptors = [int(word) for word in sys.argv[1:]] or [1]


def write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


number = 0
while not ending:
    for descriptor in descriptors:
        write(descriptor, b"%08d" % number * BLOCK_NUMBERS + b"\n")
        number += 1
for descriptor in descriptors:
    write(descriptor, b"END %d\n" % number)
