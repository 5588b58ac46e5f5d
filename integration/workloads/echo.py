"""Answers every line of stdin with its number and digest, and reports the end of input."""

import hashlib
import sys

count = 0
for line in sys.stdin.buffer:
    count += 1
    print(count, len(line), hashlib.sha256(line).hexdigest()[:16], flush=True)
print("END", count, flush=True)
