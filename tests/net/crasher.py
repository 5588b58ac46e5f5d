"""Re-points sockets on command, in a child that can be killed at a given point. Runs inside a host.

One JSON object per line on stdin: {"changes": [[holders, inode, local, remote, path], …], "die_at": n or null}. The child
is killed with SIGKILL just before the n-th call of the code under test to a built-in function, which every system call is.
Prints {"killed": bool, "error": text, "state": state of each socket}.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from snapshotd.api.errors import SnapshotError
from snapshotd.net import repair, socket_state
from snapshotd.net.flows import Address, Holder
from snapshotd.net.repoint import Change, repoint_all
from snapshotd.net.sockets import borrow_from


def to_json(change: Change) -> list[Any]:
    holders = [[holder.pid, holder.start_ticks, holder.fd] for holder in change.holders]
    return [holders, change.inode, str(change.local), str(change.remote), str(change.state_path)]


def _change(fields: list[Any]) -> Change:
    holders, inode, local, remote, path = fields
    endpoints = Address.parse(local), Address.parse(remote)
    return Change(tuple(Holder(*holder) for holder in holders), inode, *endpoints, Path(path))


def _die_at(count: int) -> None:
    def step(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event == "c_call" and "/snapshotd/" in frame.f_code.co_filename:
            count -= 1
            if count < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(step)


def state(change: Change) -> dict[str, Any]:
    """What must be the same before and after, and the endpoints. Its process does not use it meanwhile."""
    sock = borrow_from(change.holders, change.inode)
    assert sock is not None
    with sock:
        assert not repair.in_repair(sock)
        begun = socket_state.begin(sock)
        repair.enter(sock)
        found = socket_state.capture(sock, begun)
        repair.leave(sock, begun.options["reuse_address"])
        queues = [found.receive_end, len(found.receive), found.send_end, len(found.send)]
        digest = hashlib.sha256(found.receive + b"|" + found.send).hexdigest()
        same = {"queues": queues, "digest": digest, "options": begun.options, "info": vars(found.info)}
        return {"endpoints": [str(found.local), str(found.remote)], "same": same}


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        changes = [_change(fields) for fields in order["changes"]]
        answer: dict[str, Any] = {"killed": False, "error": ""}
        if order["die_at"] is None:
            try:
                repoint_all(changes)
            except SnapshotError as error:
                answer["error"] = error.message
            answer["state"] = [state(change) for change in changes]
        else:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(SnapshotError):
                    _die_at(order["die_at"])
                    repoint_all(changes)
                os._exit(0)
            answer["killed"] = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
