"""Writes numbered blocks as fast as they are read, to each of the given descriptors in turn, until SIGTERM; then END.

Block `n` repeats the eight-digit number `n`, which reveals any byte that is lost, duplicated or out of order.
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
