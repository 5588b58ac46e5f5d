"""Opens the pidfd of a process."""

from __future__ import annotations

import errno
import os

#: The number is that of a thread: before Linux 6.15, and since.
_THREAD = (errno.EINVAL, errno.ENOENT)


def open_pidfd(pid: int) -> int:
    """Raises ProcessLookupError if there is no process of this number. A thread may have the number of one that ended."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _THREAD:
            raise
        raise ProcessLookupError(errno.ESRCH, f"{pid} is no process") from error
