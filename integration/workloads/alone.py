"""Runs all ranks of a workload undisturbed on loopback, forked from one process that has already loaded torch.

alone.py WORLD OUT-PREFIX SCRIPT [ARGUMENT …]      rank 2 writes OUT-PREFIX-2.out
"""

import os
import runpy
import sys

import torch  # noqa: F401  (once for all ranks)

world, prefix, script = int(sys.argv[1]), sys.argv[2], sys.argv[3]
children = []
for rank in range(world):
    pid = os.fork()
    if pid == 0:
        out = os.open(f"{prefix}-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        # As set by torchrun with one worker per node: some frameworks look for the variables of their launcher.
        os.environ |= {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "alone"}
        sys.argv = sys.argv[3:]
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    children.append(pid)
sys.exit(max(os.waitpid(pid, 0)[1] != 0 for pid in children))
