"""The child that examines one image: it has no user, no capability, and no access to anything but descriptors.

It enters its sandbox (`Profile.PARSER`) before it reads anything. Then it gets one request, a descriptor of a file in memory
with an `Image`, and answers with `Forged` or nothing. It is used for one image only: whatever an image could do to it ends
with it. snapshotd/criu/parsers.py starts it, limits its time and kills it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket

import msgspec

from snapshotd.criu import image_content
from snapshotd.criu.image_request import REASON_CHARACTERS, Forged, Image
from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.privileges import Ids
from snapshotd.sandbox.profiles import Profile

_PR_SET_PDEATHSIG = 1
_NOBODY = 65534
#: Several times what the largest image takes that the daemon passes on.
_MEMORY_BYTES = 4 << 30
_OOM_SCORE_ADJUST = "500"


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides what Ctrl-C at its terminal means
    line = socket.socket(fileno=os.dup(0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with open("/proc/self/oom_score_adj", "w") as file:  # the daemon's own keeps it alive, whatever an image does here
        file.write(_OOM_SCORE_ADJUST)
    enter(Profile.PARSER, Ids(_NOBODY, _NOBODY))
    _, fds, _, _ = socket.recv_fds(line, 1, 1)
    if fds:
        image = msgspec.msgpack.decode(_content(fds[0]), type=Image)
        line.send(msgspec.msgpack.encode(_short(image_content.examine(image))))
    os._exit(0)


def _content(fd: int) -> bytes:
    parts, at = [], 0
    while part := os.pread(fd, 1 << 30, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _short(forged: Forged | None) -> Forged | None:
    return forged and Forged(forged.check, forged.reason[:REASON_CHARACTERS])


if __name__ == "__main__":
    main()
