"""One rank of a test of the shim's NCCL part: a process with libsnapshim.so preloaded over the stand-in for NCCL.

    python -m tests.shim.nccl.rank LIBRARY MEETING MODULE.FUNCTION RANK NRANKS

Functions are looked up as a linked program's are, through the dynamic linker's global scope, where the preloaded library
comes first. The scenarios are the stand-in's own (``tests.fakes.nccl_scenarios``), which must see no difference, and those
of ``tests.shim.nccl.jobs``, which run while the test detaches and rebuilds their communicators.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from pathlib import Path

from tests.fakes.nccl_calls import Nccl
from tests.fakes.nccl_rank import Rank, joined


class LinkedNccl(Nccl):
    """The library as a program that is linked with it sees it."""

    def __init__(self, path: Path) -> None:
        real = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(None)
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        self.library.ncclGetLastError.argtypes = (ctypes.c_void_p,)
        ours = ctypes.cast(self.library.ncclAllReduce, ctypes.c_void_p).value
        assert ours != ctypes.cast(real.ncclAllReduce, ctypes.c_void_p).value, "libsnapshim.so is not preloaded"


def main() -> None:
    # Starts the shim's control thread, which comes with a process's second thread, before a scenario counts threads.
    thread = threading.Thread(target=lambda: None)
    thread.start()
    joined(thread)
    library, meeting, scenario, number, nranks = sys.argv[1:]
    module, function = scenario.rsplit(".", 1)
    package = "tests.shim.nccl" if module == "jobs" else "tests.fakes.nccl_scenarios"
    rank = Rank(Path(library), Path(meeting), int(number), int(nranks))
    rank.nccl = LinkedNccl(Path(library))
    getattr(importlib.import_module(f"{package}.{module}"), function)(rank)


if __name__ == "__main__":
    main()
