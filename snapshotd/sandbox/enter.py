"""Puts the calling process into the sandbox of a profile, for ever.

Call it after imports and before threads: what a profile takes away is gone for all that follows. A part that the kernel does
not have is left out; `missing` names such parts, and the daemon logs them when it starts. Any other failure is an exception,
with which the child must end.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable

from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox import landlock, privileges, syscalls
from snapshotd.sandbox.privileges import Ids
from snapshotd.sandbox.profiles import Profile

#: What name lookups, time zones and the C library read. Whole directories: such files are replaced, not rewritten.
_SYSTEM = (
    *(
        "/etc",
        "/usr/lib",
        "/usr/lib64",
        "/usr/local/lib",
        "/lib",
        "/lib64",
        "/usr/share/zoneinfo",
        "/usr/share/ca-certificates",
    ),
    *("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager"),
    *(
        "/proc/self",
        "/proc/cpuinfo",
        "/proc/meminfo",
        "/proc/stat",
        "/proc/sys",
        "/sys/devices/system",
        "/sys/fs/cgroup",
    ),
    *("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
)


def enter(
    profile: Profile,
    ids: Ids | None = None,
    *,
    read: Iterable[str] = (),
    write: Iterable[str] = (),
    keep: Iterable[int] = (),
) -> None:
    """Changes this process. Raises OSError, or RuntimeError if there are other threads.

    `ids`: the user that it becomes, or works for; None: it stays what it is. `read` and `write`: paths, for the profiles that
    restrict them. `keep`: capabilities beside those of the profile.
    """
    rules = profile.value
    privileges.must_have_one_thread()
    privileges.no_new_privileges()
    if not rules.drops:
        return
    privileges.give_up_oom_protection()
    if rules.files is not None:  # before the user changes, who may not be able to reach the paths
        landlock.restrict(rules.files, read, write, tcp=rules.tcp)
    privileges.drop(ids, (*rules.capabilities, *keep), only_files=rules.only_files)
    privileges.not_dumpable()
    if not rules.writes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    machine = os.uname().machine
    if machine in syscalls.ARCHITECTURES:
        seccomp.install(seccomp.compiled(rules.denied, rules.allowed, machine))


def library_paths() -> list[str]:
    """What a child reads that imports modules or looks up names after it has entered its sandbox."""
    own = {*sys.path, sys.prefix, sys.base_prefix}
    return [*sorted(path for path in own if path.startswith("/")), *_SYSTEM]


def missing() -> list[str]:
    """The parts of a sandbox that this kernel does not have, in words."""
    lacks = []
    if not seccomp.available():
        lacks.append("seccomp (CONFIG_SECCOMP_FILTER)")
    if not landlock.version():
        lacks.append("Landlock (Linux 5.13 or later, CONFIG_SECURITY_LANDLOCK, enabled by lsm=)")
    return lacks
