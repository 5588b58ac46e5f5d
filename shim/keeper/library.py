"""The library that is preloaded into a rank: which one, and whether the loader of this node takes it.

A rank without it runs like any other, but cannot be moved: the loader only prints a line and goes on. So it is tried before
a rank is started. Whether it is a build that the node's daemon can talk to is the daemon's to say: the keeper's hello
names the build.

Invariant: only the standard library is imported, and little of it, because this runs in front of every rank.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DEVICE_MEMORY, OFFLOAD, SHARED = "SNAPSHIM_DEVICE_MEMORY", "offload", "shared"  # as `migrator run` sets it
FOLDER = Path(__file__).parents[1] / "lib"
#: Beside the libraries, if the installation has it: each build in a folder named by its build id. An upgrade adds to them, so
#: that the file of a running rank's library stays as it was, on the rank's node and on those that it may move to.
KEPT = "kept"
DRIVER_LIBRARY, OFFLOAD_LIBRARY = "libsnapshim.so", "libsnapshim-offload.so"
SHARED_LIBRARY = "libsnapshim-shared.so"  # as the second; what processes share moves as well
NAMES = (DRIVER_LIBRARY, OFFLOAD_LIBRARY, SHARED_LIBRARY)

REINSTALL = "install the package again (in a checkout: `make -C shim`)"

#: e_machine of the architectures that the library is built for.
_MACHINES = {62: "x86-64", 183: "arm64"}
_HEAD = struct.Struct("<4sBB12xH")  # e_ident and e_machine
_MAILBOX = struct.Struct("<8sII")  # magic, ABI version, size: the beginning of the mailbox (lib/abi.h)
_MAILBOX_BYTES_MAX = 1 << 16
_BUILD_ID = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"  # a note of 20 bytes
_BUILD_ID_BYTES = 20
_TRUE = "/bin/true"
_ERROR_BYTES = 4096


class Library(NamedTuple):
    path: Path
    build: str  # its build id
    abi: int  # version of its binary interface


class Unusable(Exception):
    """Why the library cannot be preloaded; `remedy` is what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def wanted(environment: Mapping[str, str], folder: Path = FOLDER) -> Path:
    """The library for a rank with this environment: the one that offloads device memory, unless the driver moves that."""
    by_choice = {OFFLOAD: OFFLOAD_LIBRARY, SHARED: SHARED_LIBRARY}
    return folder / by_choice.get(environment.get(DEVICE_MEMORY, ""), DRIVER_LIBRARY)


def usable(path: Path, environment: Mapping[str, str]) -> Library:
    """The library, after a process of this node has loaded it. Raises Unusable."""
    library = _kept(read(path))
    _try(library.path, environment)
    return library


def _kept(library: Library) -> Library:
    """The copy of the same build that upgrades leave alone, if there is one."""
    path = library.path.parent / KEPT / library.build / library.path.name
    try:
        copy = read(path.resolve())  # as the kernel will name it
    except Unusable:
        return library
    return copy if copy[1:] == library[1:] else library


def read(path: Path) -> Library:
    """What the file says about itself. Raises Unusable if it is not the library, or not for this architecture."""
    try:
        content = path.read_bytes()
        with open("/proc/self/exe", "rb") as program:
            own = _HEAD.unpack(program.read(_HEAD.size))
    except FileNotFoundError:
        raise Unusable(f"the library {path} is missing", REINSTALL) from None
    except OSError as error:
        raise Unusable(f"the library {path} cannot be read: {error.strerror}", REINSTALL) from error
    if len(content) < _HEAD.size or not content.startswith(b"\x7fELF"):
        raise Unusable(f"{path} is not a library", REINSTALL)
    head = _HEAD.unpack_from(content)
    if head != own:
        raise Unusable(
            f"the library {path} is for {_machine(head[3])}, and this node is {_machine(own[3])}",
            f"install the package for {_machine(own[3])}",
        )
    at = content.find(_BUILD_ID)
    build = content[at + len(_BUILD_ID) :][:_BUILD_ID_BYTES].hex() if at >= 0 else ""
    abi = _abi(content)
    if not build or not abi:
        raise Unusable(f"{path} is damaged or another library: it has no build id or no mailbox", REINSTALL)
    return Library(path, build, abi)


def _machine(number: int) -> str:
    return _MACHINES.get(number, f"another architecture (ELF machine {number})")


def _abi(content: bytes) -> int:
    at = -1
    while (at := content.find(b"SNAPSHIM", at + 1)) >= 0 and at + _MAILBOX.size <= len(content):
        _, abi, size = _MAILBOX.unpack_from(content, at)
        if 0 < abi < 1 << 16 and _MAILBOX.size < size < _MAILBOX_BYTES_MAX:  # else a text that begins like that
            return int(abi)
    return 0


def _try(path: Path, environment: Mapping[str, str]) -> None:
    """Lets the loader preload it into a program that does nothing."""
    if not os.access(_TRUE, os.X_OK):
        return
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, writer, 2),
        ]
        pid = os.posix_spawn(
            _TRUE, [_TRUE], {**environment, "LD_PRELOAD": str(path), "LC_ALL": "C"}, file_actions=actions
        )
    except OSError as error:
        os.close(reader)
        raise Unusable(f"no process can be started: {error.strerror}", "free processes or memory") from error
    finally:
        os.close(writer)
    with open(reader, "rb") as stream:
        said = stream.read(_ERROR_BYTES).decode(errors="replace").strip()
    _, status = os.waitpid(pid, 0)
    if status != 0 or "cannot be preloaded" in said:
        reason = " ".join(said.split()) or f"a program with it ended with status {os.waitstatus_to_exitcode(status)}"
        raise Unusable(f"the library {path} cannot be loaded on this node: {reason}", REINSTALL)
