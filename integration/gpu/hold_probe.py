"""Asks the real driver what holding device memory as descriptors depends on. Prints a table; takes less than a minute.

    python -m integration.gpu.hold_probe [--segments 10000] [--mib 2]

An owner creates many segments of exportable memory and hands their descriptors to a process without CUDA, in batches of 16,
as the shim does. Then, each with its time or the driver's error:

- export and send; import and map by another process, and by one of another user (nobody);
- a copy to pinned memory from all segments, while the owner is checkpointed by the driver;
- the owner imports them again and maps them at the same addresses, and the content is right;
- the owner, whose memory is imported now, exports it again (r580 refuses), and copies it into memory of its own first;
- the process that copied is killed, and the descriptors alone keep the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from ctypes import c_size_t as size_t
from ctypes import c_uint64 as u64
from typing import Any, ClassVar

BATCH = 16
PATTERN = 0xABCD0000


class _Location(ctypes.Structure):
    _fields_: ClassVar = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Property(ctypes.Structure):
    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_: ClassVar = [("location", _Location), ("flags", ctypes.c_int)]


class DriverError(Exception):
    """The driver's name for an error."""


class Cuda:
    """GPU 0, in its primary context."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", ctypes.c_uint(0))
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()}")

    def create(self, size: int) -> u64:
        handle = u64()
        wanted = _Property(1, 1, _Location(1, 0), None)
        self.call("cuMemCreate", ctypes.byref(handle), size_t(size), ctypes.byref(wanted), u64(0))
        return handle

    def reserve(self, size: int) -> int:
        address = u64()
        self.call("cuMemAddressReserve", ctypes.byref(address), size_t(size), size_t(0), u64(0), u64(0))
        return address.value

    def map(self, address: int, size: int, handle: u64) -> None:
        self.call("cuMemMap", u64(address), size_t(size), size_t(0), handle, u64(0))
        access = _Access(_Location(1, 0), 3)
        self.call("cuMemSetAccess", u64(address), size_t(size), ctypes.byref(access), size_t(1))

    def let_go(self, address: int, size: int, handle: u64) -> None:
        self.call("cuMemUnmap", u64(address), size_t(size))
        self.call("cuMemRelease", handle)

    def export(self, handle: u64) -> int:
        fd = ctypes.c_int()
        self.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, ctypes.c_int(1), u64(0))
        return fd.value

    def take(self, fd: int) -> u64:
        handle = u64()
        self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(1))
        return handle

    def word(self, address: int) -> int:
        word = ctypes.c_uint()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(word), u64(address), size_t(4))
        return word.value


class Peer:
    """One end of a socket: requests are JSON, descriptors go along in batches."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line

    def say(self, **message: Any) -> None:
        self.line.send(json.dumps(message).encode())

    def hear(self) -> dict[str, Any]:
        try:
            blob = self.line.recv(1 << 16)
        except TimeoutError:
            return {"error": "no answer in 30 s"}
        except OSError:
            blob = b""
        return dict(json.loads(blob)) if blob else {"gone": True}

    def send_fds(self, fds: list[int]) -> None:
        socket.send_fds(self.line, [b"x"], fds)

    def recv_fds(self) -> list[int]:
        return socket.recv_fds(self.line, 1, BATCH)[1]


def timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def answered(peer: Peer, act: Callable[[], Any]) -> None:
    """Tells how long it took, or the error."""
    try:
        peer.say(seconds=timed(act))
    except (DriverError, OSError) as error:
        peer.say(error=str(error))


def owner(peer: Peer, count: int, size: int) -> None:
    cuda = Cuda()
    handles = [cuda.create(size) for _ in range(count)]
    base = cuda.reserve(size * count)
    places = [base + number * size for number in range(count)]
    for place, handle in zip(places, handles, strict=True):
        cuda.map(place, size, handle)
    for number, place in enumerate(places):
        cuda.call("cuMemsetD32_v2", u64(place), ctypes.c_uint(PATTERN + number), size_t(size // 4))
    cuda.call("cuCtxSynchronize")
    peer.say(ready=True)

    def send() -> None:
        for at in range(0, count, BATCH):
            fds = [cuda.export(handle) for handle in handles[at : at + BATCH]]
            peer.send_fds(fds)
            for fd in fds:
                os.close(fd)

    def let_go() -> None:
        for place, handle in zip(places, handles, strict=True):
            cuda.let_go(place, size, handle)

    def take() -> None:
        at = 0
        while at < count:
            for fd in peer.recv_fds():
                handles[at] = cuda.take(fd)
                cuda.map(places[at], size, handles[at])
                os.close(fd)
                at += 1

    def check() -> None:
        wrong = sum(cuda.word(place + size - 4) != PATTERN + number for number, place in enumerate(places))
        if wrong:
            raise DriverError(f"{wrong} of {count} segments have another content")

    def export_one() -> None:
        os.close(cuda.export(handles[0]))

    def own() -> None:
        spare = cuda.reserve(size)
        for number, place in enumerate(places):
            fresh = cuda.create(size)
            cuda.map(spare, size, fresh)
            cuda.call("cuMemcpyDtoD_v2", u64(spare), u64(place), size_t(size))
            cuda.call("cuCtxSynchronize")
            cuda.call("cuMemUnmap", u64(spare), size_t(size))
            cuda.let_go(place, size, handles[number])
            cuda.map(place, size, fresh)
            handles[number] = fresh

    acts = {"send": send, "let go": let_go, "take": take, "check": check, "export one": export_one, "own": own}
    while (name := peer.hear().get("do")) is not None:
        answered(peer, acts[name])


def reader(peer: Peer, count: int, size: int) -> None:
    """Maps all segments and copies them to pinned memory."""
    cuda = Cuda()
    pinned = ctypes.c_void_p()
    cuda.call("cuMemHostAlloc", ctypes.byref(pinned), size_t(64 << 20), ctypes.c_uint(1))
    base = cuda.reserve(size * count)
    peer.say(ready=True)

    def take() -> None:
        at = 0
        while at < count:
            for fd in peer.recv_fds():
                cuda.map(base + at * size, size, cuda.take(fd))
                os.close(fd)
                at += 1

    def copy() -> None:
        for number in range(count):
            cuda.call("cuMemcpyDtoHAsync_v2", pinned, u64(base + number * size), size_t(min(size, 64 << 20)), None)
        cuda.call("cuCtxSynchronize")

    acts = {"take": take, "copy": copy}
    while (name := peer.hear().get("do")) is not None:
        answered(peer, acts[name])


@contextlib.contextmanager
def started(role: str, count: int, size: int, user: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], Peer]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [role, str(theirs.fileno()), str(count), str(size), str(user)]
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--role", *arguments], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    ours.settimeout(30)
    peer = Peer(ours)
    try:
        yield process, peer
    finally:
        ours.close()
        process.kill()
        process.wait()


def show(what: str, answer: dict[str, Any] | float, size: int = 0) -> None:
    if isinstance(answer, float):
        answer = {"seconds": answer}
    text = answer.get("error") or ("process ended" if "gone" in answer else f"{answer['seconds'] * 1000:10.1f} ms")
    rate = f"  {size / answer['seconds'] / 1e9:6.1f} GB/s" if size and answer.get("seconds") else ""
    print(f"| {what:<62} | {text}{rate} |", flush=True)


def ask(peer: Peer, name: str, give: list[int] | None = None) -> dict[str, Any]:
    try:
        peer.say(do=name)
        for at in range(0, len(give or ()), BATCH):
            peer.send_fds((give or [])[at : at + BATCH])
    except OSError as error:
        return {"error": str(error)}
    return peer.hear()


def checkpoint(pid: int) -> str:
    """The driver's checkpoint and restore of a process, in this one."""
    cuda = Cuda()
    for name in ("Lock", "Checkpoint", "Restore", "Unlock"):
        arguments = (ctypes.c_uint64 * 8)(*([10_000] if name == "Lock" else [0]))
        cuda.call(f"cuCheckpointProcess{name}", ctypes.c_int(pid), ctypes.byref(arguments))
    return ""


def main(count: int, size: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{count} segments of {size >> 20} MiB, {count * size / 1e9:.1f} GB")
    held: list[int] = []
    with started("owner", count, size) as (own, owner_peer):
        owner_peer.hear()
        owner_peer.say(do="send")
        began = time.perf_counter()
        while len(held) < count:
            held += owner_peer.recv_fds()
        show("export, send and receive all descriptors", time.perf_counter() - began)
        owner_peer.hear()
        with started("reader", count, size) as (_, peer):
            peer.hear()
            show("another process imports and maps all", ask(peer, "take", held))
            show("the owner unmaps and releases all", ask(owner_peer, "let go"))
            show("the other process copies all to pinned memory", ask(peer, "copy"), count * size)
            _checkpointed("the driver checkpoints and restores the owner", own.pid)
        with started("reader", count, size, user=65534) as (_, peer):
            answer = peer.hear()
            show(
                "a process of user nobody imports and maps all",
                ask(peer, "take", held) if "ready" in answer else answer,
            )
        show("the owner imports and maps all again", ask(owner_peer, "take", held))
        show("the content is right", ask(owner_peer, "check"))
        show("the owner exports a segment that it has imported", ask(owner_peer, "export one"))
        show("the owner copies all into memory of its own", ask(owner_peer, "own"), count * size)
        show("the content is right", ask(owner_peer, "check"))
        show("the owner exports a segment that it has copied", ask(owner_peer, "export one"))
        _checkpointed("the driver checkpoints and restores the owner", own.pid)
        show("the content is right", ask(owner_peer, "check"))
    with started("reader", count, size) as (killed, peer):
        peer.hear()
        ask(peer, "take", held)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    with started("reader", count, size) as (_, peer):
        peer.hear()
        show("owner and reader killed: a new one imports and maps all", ask(peer, "take", held))
        show("… and copies all", ask(peer, "copy"), count * size)


def _checkpointed(what: str, pid: int) -> None:
    """In a child, because the driver may hang."""
    began = time.perf_counter()
    command = [sys.executable, os.path.abspath(__file__), "--checkpoint", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        error = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = "no answer in 30 s"
    show(what, {"error": error} if error else {"seconds": time.perf_counter() - began})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=2)
    parser.add_argument("--role", nargs=5)
    parser.add_argument("--checkpoint", type=int)
    given = parser.parse_args()
    if given.checkpoint:
        checkpoint(given.checkpoint)
    elif given.role:
        os.setresgid(*[int(given.role[4])] * 3)
        os.setresuid(*[int(given.role[4])] * 3)
        line = Peer(socket.socket(fileno=int(given.role[1])))
        {"owner": owner, "reader": reader}[given.role[0]](line, int(given.role[2]), int(given.role[3]))
    else:
        main(given.segments, given.mib << 20)
