"""Makes a time namespace with another clock: `python -m snapshotd.selfcheck.enter_time_namespace`. Prints what fails."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

_CLONE_NEWTIME = 0x80
_OFFSET_S = 1_000_000


def main() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    before_s = time.monotonic()
    if libc.unshare(_CLONE_NEWTIME) != 0:
        print(f"unshare: {os.strerror(ctypes.get_errno())}")
        return 1
    try:
        Path("/proc/self/timens_offsets").write_text(f"monotonic {_OFFSET_S} 0\n")
    except OSError as error:
        print(f"/proc/self/timens_offsets: {error.strerror}")
        return 1
    child = os.fork()  # children are in the namespace
    if child == 0:
        os._exit(0 if time.monotonic() > before_s + _OFFSET_S - 1 else 1)
    _, status = os.waitpid(child, 0)
    print("the clock is not changed by it" if status else "the clock of a child differs")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
