"""The network process gives up its privileges, and with them every way to outlive the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.sandbox import filter as seccomp

_CODE = """
import ctypes, json, sys
from snapshotd.network.process import give_up_privileges
give_up_privileges(1500, 1500, sys.argv[1])
libc, signal = ctypes.CDLL(None), ctypes.c_int()
undone = libc.prctl(1, 0)
libc.prctl(2, ctypes.byref(signal))
name = open("/proc/self/comm").read().strip()
print(json.dumps([undone, signal.value, name]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
@pytest.mark.skipif(not seccomp.available(), reason="this kernel has no seccomp filters")
def test_signal_at_the_end_of_the_daemon_survives_the_change_of_user_and_cannot_be_undone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CODE, str(tmp_path)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60)
    assert json.loads(found.stdout) == [-1, 9, "snapshotd-net"]
