"""Has an image examined by a child without rights, which is used once and killed.

Invariant: the answer is None only if the child said so in time. A child that fails, hangs or answers something else means
that the image is refused. All functions block: call them in a thread.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from snapshotd.criu.image_request import ANSWER_BYTES, Forged, Image
from snapshotd.runtime.child_process import ChildProcess, Spares

#: A child that was not started in advance needs a second for its start on a busy machine; examining takes milliseconds.
LIMIT_S = 30.0

#: Of this daemon: started before a move's pause, because importing CRIU's formats takes a third of a second.
spares = Spares("snapshotd.criu.image_parser", most=2, site_packages=True)


def examine(image: Image) -> Forged | None:
    """Why the image must not be restored; None if nothing speaks against it. Raises Internal if no child can be started."""
    child = spares.take()
    try:
        return _ask(child, image)
    finally:
        child.kill()
        child.close()


def _ask(child: ChildProcess, image: Image) -> Forged | None:
    request = os.memfd_create("image", os.MFD_CLOEXEC)
    began = time.monotonic()
    try:
        with open(request, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(image))
        child.line.settimeout(LIMIT_S)
        socket.send_fds(child.line, [b"\0"], [request])
        answer = child.line.recv(ANSWER_BYTES)
        return msgspec.msgpack.decode(answer, type=Forged | None)
    except TimeoutError:
        return _failed(f"did not answer within {time.monotonic() - began:.0f} s")
    except (OSError, msgspec.MsgspecError) as error:  # it has ended, or has answered something else
        return _failed(f"failed ({error}): {child.last_output() or 'no output'}")
    finally:
        os.close(request)


def _failed(how: str) -> Forged:
    return Forged("image-content", f"the process that examines the image {how}")
