"""The command `deepspeed`: starts the launcher of this node."""

import subprocess
import sys

command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--world_info=x", *sys.argv[1:]]
sys.exit(subprocess.Popen(command).wait())
