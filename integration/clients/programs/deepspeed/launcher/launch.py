"""The launcher of one node: starts two workers, and ends with the worse of their exit codes."""

import os
import subprocess
import sys

workers = []
for rank in range(2):
    command = [sys.executable, "-u", sys.argv[2], f"--local_rank={rank}", *sys.argv[3:]]
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    workers.append(subprocess.Popen(command, env=os.environ | variables))
sys.exit(max(worker.wait() for worker in workers))
