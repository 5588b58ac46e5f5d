"""Executes foreign programs (criu and what starts it) by descriptors that were opened when the daemon started.

A path is looked up again at every execution, in the mount namespace of that moment. A descriptor is the file that the
daemon found when it started, whatever has been mounted or moved since. Programs run with an environment that is listed
here: no variable of the daemon's own environment (LD_LIBRARY_PATH, CRIU_LIBS_DIR, HOME …) reaches them.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import BadConfig

#: Above the descriptors that a rank's ends have in criu (shim/keeper/guest.py), below the usual limit of 1024.
_FIRST_FD = 900
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Program:
    """A program that can be executed as long as the daemon runs."""

    path: str  # for messages
    argv: tuple[str, ...]  # how it is executed, without its own arguments
    fds: tuple[int, ...]  # what a process that executes it must inherit, with the same numbers
    plugins: str = ""  # the folder of its plugins, if it is not the one that was compiled in


@functools.cache
def opened(path: str) -> Program:
    """The program at `path`, opened when it is first asked for: at the daemon's start. Raises BadConfig if it cannot be.

    A CRIU that tools/get-criu installed is a script that starts the real one with its own C library. The script is not
    used, because a shell would look up the other files by their paths."""
    try:
        real = Path(os.path.realpath(path, strict=True))
        loaders = sorted(real.parent.glob("lib/ld-linux-*.so.*"))
        if loaders and (real.parent / "bin" / real.name).is_file():
            loader, binary = _open(loaders[0]), _open(real.parent / "bin" / real.name)
            libraries = str(real.parent / "lib")
            argv = (_name(loader), "--inhibit-cache", "--library-path", libraries, _name(binary))
            return Program(path, argv, (loader, binary), str(real.parent / "plugins"))
        only = _open(real)
    except OSError as error:
        raise BadConfig(f"{path} cannot be opened: {error.strerror}") from error
    return Program(path, (_name(only),), (only,))


@functools.cache
def system(name: str) -> Program:
    """A program of the operating system, likewise."""
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise BadConfig(f"{name} is not installed", remedy=f"install {name} (it is part of every Linux distribution)")
    return opened(found)


def environment(**more: str) -> dict[str, str]:
    """The whole environment of a foreign program."""
    return {"PATH": _PATH, "LC_ALL": "C.UTF-8", **more}


def _open(path: Path) -> int:
    """Opened for reading, because an interpreter or loader reads it again. Not inherited unless it is passed on."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    finally:
        os.close(fd)


def _name(fd: int) -> str:
    return f"/proc/self/fd/{fd}"
