"""The process that keeps device memory alive: `python -m snapshotd.holder.process SOCKET`.

It keeps descriptors of physical device memory, by a key, and does nothing else: no CUDA, no threads, no other module of this
package. A descriptor alone keeps the memory on its GPU, so a rank's memory outlives the death of the rank's process, of the
processes that copy it, and of the daemon, which finds it here when it is back. The daemon has duplicates of what ranks have
handed over, and starts another one of these if this one ends (snapshotd/holder/backed.py).
Another one keeps files of snapshots in the same way (snapshotd/moves/kept_files.py): inode, size and device of each. Of these
the daemon has no duplicates.

Requests and answers are one JSON object per message, with at most BATCH descriptors:

    {"ask": "keep", "key": "m-…/4711", "blocks": [[address, bytes, device], …]} + descriptors     {"held": 16}
    {"ask": "give", "key": "m-…/4711", "from": 0}                      {"blocks": […], "total": 40} + descriptors
    {"ask": "drop", "keys": ["m-…/4711"]}                              {"left": 0}, the number of keys
    {"ask": "list"}                                                    {"keys": {"m-…/4711": bytes}}

It ends when it keeps no descriptors and no daemon is connected.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 16
MESSAGE_BYTES = 64 << 10
#: How long the end of another one may take.
_LOCK_TRIES, _LOCK_AGAIN_S = 200, 0.05
#: A daemon that has started this process connects within this time.
_FIRST_S = 30.0

Block = tuple[int, int, int]


class Store:
    """What is kept. The order of a key's blocks is that in which they came."""

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[Block, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def answer(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """The answer and its descriptors, which stay open. Takes `fds` over."""
        match request.get("ask"):
            case "keep":
                blocks = [(int(a), int(b), int(d)) for a, b, d in request["blocks"]]
                if len(blocks) != len(fds):
                    raise ValueError(f"{len(fds)} descriptors for {len(blocks)} blocks")
                held = self._held.setdefault(str(request["key"]), [])
                held += zip(blocks, fds, strict=True)
                return {"held": len(held)}, []
            case "give":
                held = self._held.get(str(request["key"]), [])
                some = held[int(request["from"]) : int(request["from"]) + BATCH]
                return {"blocks": [block for block, _ in some], "total": len(held)}, [fd for _, fd in some]
            case "drop":
                for key in request["keys"]:
                    for _, fd in self._held.pop(str(key), []):
                        os.close(fd)
                return {"left": len(self._held)}, []
            case "list":
                return {"keys": {key: sum(block[1] for block, _ in held) for key, held in self._held.items()}}, []
            case other:
                raise ValueError(f"unknown request {other!r}")


def serve(listener: socket.socket) -> None:
    """Runs until no descriptors are kept and no daemon is connected."""
    store, waiting = Store(), selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    clients: set[socket.socket] = set()
    began = False
    while clients or store or not began:
        ready = waiting.select(None if began else _FIRST_S)
        if not ready and not began:
            return
        for key, _ in ready:
            if key.fileobj is listener:
                client, _ = listener.accept()
                if _user_of(client) not in {0, os.geteuid()}:
                    client.close()
                    continue
                began = True
                clients.add(client)
                waiting.register(client, selectors.EVENT_READ)
            else:
                client = key.fileobj  # type: ignore[assignment]
                if not _talk(client, store):
                    waiting.unregister(client)
                    clients.discard(client)
                    client.close()


def _talk(client: socket.socket, store: Store) -> bool:
    """Answers one request. False: the client is gone."""
    try:
        blob, fds, flags, _ = socket.recv_fds(client, MESSAGE_BYTES, BATCH)
    except OSError:
        return False
    if not blob:
        return False
    try:
        if flags & socket.MSG_CTRUNC:
            raise ValueError("it can open no more files: raise the daemon's limit (LimitNOFILE=)")
        answer, given = store.answer(json.loads(blob), fds)
    except (ValueError, KeyError, TypeError) as error:
        for fd in fds:
            os.close(fd)
        answer, given = {"error": str(error)}, []
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else []
    with contextlib.suppress(OSError):  # it is gone: the next round finds that out
        client.sendmsg([json.dumps(answer).encode()], rights)
    return True


def _locked(path: Path) -> int:
    """Waits until a process that is ending has removed its socket. Fails if one serves still."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        time.sleep(_LOCK_AGAIN_S)
    raise SystemExit(f"another process serves {path}")


def _user_of(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _main(path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    lock = _locked(path.with_name(f"{path.name}.lock"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path.unlink(missing_ok=True)
    os.umask(0o177)
    listener.bind(str(path))
    listener.listen(8)
    os.write(1, b"ready\n")
    with open(os.devnull, "w") as nowhere:
        for fd in (1, 2):
            os.dup2(nowhere.fileno(), fd)
    serve(listener)
    path.unlink(missing_ok=True)
    os.close(lock)  # only now: the next one has a socket of that name


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
