"""The user and groups of a rank, and giving up root's privileges for them.

Invariant: they come from the daemon, which has them from the kernel; there is no default. Standard library only.
"""

from __future__ import annotations

import os
from typing import Any

_PR_SET_DUMPABLE = 4


class Identity:
    """The daemon's orders name all three; anything else raises KeyError, TypeError or ValueError."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.user_id = _number(orders["user_id"])
        self.group_id = _number(orders["group_id"])
        self.groups = [_number(group) for group in orders["groups"]]

    def assume(self) -> None:
        """Makes this process run with them, for good. Raises OSError. Does nothing if it already does, or is for root."""
        if os.getresuid() != (self.user_id,) * 3 or os.getresgid() != (self.group_id,) * 3:
            os.setgroups(self.groups)
            os.setresgid(self.group_id, self.group_id, self.group_id)
            os.setresuid(self.user_id, self.user_id, self.user_id)

    def assume_alone(self) -> None:
        """Like `assume`, and no other process of that user may look into this one or trace it."""
        import ctypes  # here: the home keeper imports this module and never comes here

        self.assume()
        if self.user_id != 0 and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < (1 << 32) - 1:
        raise ValueError(f"{value!r} is not a user or group id")
    return value
