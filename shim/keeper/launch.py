"""Runs `accelerate launch` in the job's own Python, with sys.executable set so that what it starts is a rank.

accelerate starts a single process with sys.executable, and several through torchrun and $PYTHON_EXEC. It decides by its
options, its configuration file and the GPUs of the node, which are not known here. So sys.executable is set to
$PYTHON_EXEC.

    python launch.py SCRIPT [ARGUMENT …]        python launch.py -m MODULE [ARGUMENT …]

Invariant: this needs only the standard library of any Python 3, and changes nothing else about the launcher.
"""

import multiprocessing
import os
import runpy
import sys

if __name__ == "__main__":
    multiprocessing.set_executable(sys.executable)  # the launcher's own helper processes are not ranks
    sys.executable = os.environ["PYTHON_EXEC"]
    if sys.argv[1] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
