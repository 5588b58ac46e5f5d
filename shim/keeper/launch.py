"""Runs `accelerate launch` in the job's own Python, so that also the process it starts by sys.executable is a rank.

It starts a single process that way, several through torchrun and $PYTHON_EXEC. Which it will be is only known inside:
from its options, its configuration file and the GPUs of the node. So sys.executable is what $PYTHON_EXEC is.

    python launch.py SCRIPT [ARGUMENT …]        python launch.py -m MODULE [ARGUMENT …]

Invariant: the standard library alone, of any Python 3; nothing else about the launcher is different.
"""

import multiprocessing
import os
import runpy
import sys

if __name__ == "__main__":
    multiprocessing.set_executable(sys.executable)  # its own helpers are no ranks
    sys.executable = os.environ["PYTHON_EXEC"]
    if sys.argv[1] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
