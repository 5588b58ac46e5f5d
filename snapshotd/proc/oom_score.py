"""/proc/PID/oom_score_adj: how likely the kernel is to kill a process when memory runs out."""

from __future__ import annotations

from snapshotd.proc import status
from snapshotd.proc.files import GONE, read_text


def read(pid: int) -> int:
    """Raises FileNotFoundError or ProcessLookupError if it has ended."""
    return int(read_text(f"/proc/{pid}/oom_score_adj"))


def spare_no_user(pids: list[int]) -> None:
    """Takes from processes that are not root's an adjustment below 0, which a user could not set."""
    for pid in pids:
        try:
            if status.read(pid).user_id != 0 and read(pid) < 0:
                with open(f"/proc/{pid}/oom_score_adj", "w") as file:
                    file.write("0")
        except GONE:
            continue
