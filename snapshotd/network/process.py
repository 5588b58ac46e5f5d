"""The main of the network process: `snapshotd.network.process UID GID SOCKET_DIR LOG_FORMAT LOG_LEVEL`; stdin is the link.

The daemon starts it as root. It imports what it needs, then gives up every privilege, before it reads or writes anything.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import sys

from snapshotd.network.server import Network
from snapshotd.runtime import heap, logs
from snapshotd.sandbox.enter import enter, library_paths
from snapshotd.sandbox.privileges import Ids
from snapshotd.sandbox.profiles import Profile

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
#: What libraries import only when it is first needed.
_LATE = (
    *("cryptography.x509", "encodings.idna", "google.protobuf.descriptor_pb2", "google.protobuf.symbol_database"),
    *("grpc._auth", "grpc._channel", "grpc._interceptor", "grpc._plugin_wrapping", "grpc._server", "grpc._utilities"),
)


def load_everything() -> None:
    """The network user need not be able to read the program's files, which may lie below root's home directory."""
    for name in _LATE:
        importlib.import_module(name)


def give_up_privileges(user_id: int, group_id: int, socket_dir: str) -> None:
    """What remains: sockets, and reading what every user can read of the system's files."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, b"snapshotd-net")
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the sandbox keeps it, and then denies that it is changed
    enter(Profile.NETWORK, Ids(user_id, group_id), read=library_paths(), write=[socket_dir])


def main() -> None:
    daemon = os.getppid()
    heap.share()
    load_everything()
    heap.keep()
    logs.set_up(sys.argv[4], sys.argv[5])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the daemon says when to stop, after its own work
        signal.signal(number, signal.SIG_IGN)
    give_up_privileges(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    if os.getppid() == daemon:
        asyncio.run(Network().run(socket.socket(fileno=os.dup(0))))


if __name__ == "__main__":
    main()
