"""/proc/PID/ns: the namespaces that a process is in."""

from __future__ import annotations

import fcntl
import os

_NS_GET_USERNS = 0xB701

#: Every kind that a process can be in. The last two are those of the children that it will have.
KINDS = ("mnt", "pid", "user", "net", "uts", "ipc", "cgroup", "time", "pid_for_children", "time_for_children")


def read(pid: int | str, kind: str) -> str:
    """The kernel's name of a namespace, `net:[4026531840]`; empty if this kernel has no such kind.

    `pid` may be "self". Raises FileNotFoundError or ProcessLookupError if the process has ended.
    """
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except FileNotFoundError:
        # A process that is ending has left its namespaces, but not yet its directory in /proc.
        if os.path.lexists(f"/proc/self/ns/{kind}"):
            raise
        return ""


def opened(pid: int | str, kind: str) -> int:
    """A descriptor of a namespace. It stays this namespace, whatever the process does meanwhile. The caller closes it."""
    return os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def same(one: int, other: int) -> bool:
    """Whether two descriptors are of the same namespace."""
    return os.path.samestat(os.fstat(one), os.fstat(other))


def made_by_root(namespace: int) -> bool:
    """Whether only root of the daemon's own user namespace can have made this namespace, and can mount or bind in it.

    A user can make every kind of namespace, but only together with a user namespace, which then owns it.
    """
    try:
        owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    except PermissionError:  # it is owned by a user namespace outside the daemon's
        return False
    try:
        ours = opened("self", "user")
        try:
            return same(owner, ours)
        finally:
            os.close(ours)
    finally:
        os.close(owner)
