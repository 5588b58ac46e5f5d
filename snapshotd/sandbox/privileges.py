"""Gives up the privileges of the calling process: its user, its capabilities, and what set-user-id programs could return.

A process that works for a user must not be at the mercy of that user. The kernel lets a user signal a process whose real or
saved user id is theirs, change its limits if all its ids are, and its scheduling and CPUs if its effective one is. Files are
accessed with the file-system id. So such a process has the user's file-system id, and otherwise the ids of the
system user `nobody`.

Invariant: afterwards no capability is left in any set except those that were asked for, and those are neither inheritable nor
ambient. The process must have one thread only: the kernel keeps capabilities for each thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

#: linux/capability.h
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER = 0, 1, 2, 3
CAP_SETPCAP, CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE = 8, 19, 40

_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAPBSET_READ, _PR_CAPBSET_DROP = 4, 8, 23, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_MOST_CAPABILITIES = 64
NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_libc.setfsuid.argtypes = (ctypes.c_uint32,)
_libc.setfsuid.restype = ctypes.c_uint32
_NO_ID = (1 << 32) - 1


class Ids(NamedTuple):
    user_id: int
    group_id: int
    groups: tuple[int, ...] = ()


def drop(ids: Ids | None, kept: Sequence[int] = (), *, only_files: bool = False) -> None:
    """Becomes a user (None: keeps its ids) with these capabilities alone, and without a way back.

    `only_files`: it accesses files as that user, and otherwise has the ids of `nobody`. Not for root, which may do anything
    to it. A filter must keep it from changing its ids afterwards: otherwise it could take on the user's ids again."""
    _limit_bounding_set(kept)
    ends_with_parent = _parent_death_signal()
    if ids is not None:
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups(ids.groups)
        os.setresgid(*[ids.group_id] * 3)
        if only_files and ids.user_id != 0:
            os.setresuid(*[NOBODY] * 3)
            _set_file_user(ids.user_id)
        else:
            os.setresuid(*[ids.user_id] * 3)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    # Where the daemon itself has fewer than all, so has its child, and fails at what needs the missing one.
    _set_capabilities(_capabilities()[1] & sum(1 << number for number in kept))
    _prctl(_PR_SET_KEEPCAPS, 0)
    _prctl(_PR_SET_PDEATHSIG, ends_with_parent)  # the kernel forgets it when the user changes


def _set_file_user(user_id: int) -> None:
    """Needs CAP_SETUID, which is still permitted."""
    _set_capabilities(_capabilities()[1])
    _libc.setfsuid(user_id)
    if _libc.setfsuid(_NO_ID) != user_id:  # it returns the previous id, never an error
        raise PermissionError(errno.EPERM, f"files cannot be accessed as user {user_id}")


def give_up_oom_protection(score: Path = Path("/proc/self/oom_score_adj")) -> None:
    """The daemon's score is low so that the kernel does not kill it when memory runs out. It must survive its children."""
    if int(score.read_text()) < 0:
        score.write_text("0")


def not_dumpable() -> None:
    """Other processes of its user may neither trace it nor read its descriptors, which can refer to more than that user may
    open. A change of the user undoes this."""
    _prctl(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    """No privileges through set-user-id programs, and no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def must_have_one_thread() -> None:
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a sandbox must be entered before threads are started")


def _parent_death_signal() -> int:
    found = ctypes.c_int()
    _prctl(_PR_GET_PDEATHSIG, ctypes.addressof(found))
    return found.value


def _limit_bounding_set(kept: Sequence[int]) -> None:
    if not _capabilities()[0] >> CAP_SETPCAP & 1:
        return  # without it, and with no_new_privs, the bounding set means nothing
    for number in range(_MOST_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) < 0:
            return  # this kernel has no more
        if number not in kept:
            _prctl(_PR_CAPBSET_DROP, number)


def _capabilities() -> tuple[int, int]:
    """The effective and the permitted ones."""
    data = (ctypes.c_uint32 * 6)()
    if _libc.capget(_header(), data):
        raise OSError(ctypes.get_errno(), "capget failed")
    return data[0] | data[3] << 32, data[1] | data[4] << 32


def _set_capabilities(mask: int) -> None:
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = (ctypes.c_uint32 * 6)(
        low, low, 0, high, high, 0
    )  # effective, permitted, inheritable; then their upper halves
    if _libc.capset(_header(), data):
        raise OSError(ctypes.get_errno(), "capset failed")


def _header() -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
