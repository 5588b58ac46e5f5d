"""A peer for the re-pointing tests: sends its half of a known stream at once, and reads the other half on command.

    python -m tests.net.talker STYLE inet|inet6 ADDRESS PORT      PORT 0: listen there, and print the port

STYLE: `threads` (blocking calls), `epoll` (one edge-triggered loop), `fork` (parent reads, child writes, one socket),
`patience` (fills the queues, and then does not use the socket until the command).
Prints "ready", waits for a line, and prints "done DIGEST" of what it read, or its error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import select
import socket
import sys
import threading

TOTAL_BYTES = 12 << 20


def half(seed: int) -> bytes:
    return random.Random(seed).randbytes(TOTAL_BYTES)


def connect(family: int, ip: str, port: int) -> socket.socket:
    if port:
        sock = socket.socket(family)
        sock.connect((ip, port))
        return sock
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((ip, 0))
        listener.listen()
        print(listener.getsockname()[1], flush=True)
        return listener.accept()[0]


def read_all(sock: socket.socket) -> str:
    digest, left = hashlib.sha256(), TOTAL_BYTES
    while left:
        data = sock.recv(min(left, 1 << 16))
        if not data:
            return "end of file"
        digest.update(data)
        left -= len(data)
    return digest.hexdigest()


def with_threads(sock: socket.socket) -> str:
    writer = threading.Thread(target=sock.sendall, args=(half(1),))
    writer.start()
    ready()
    answer = read_all(sock)
    writer.join()
    return answer


def with_patience(sock: socket.socket) -> str:
    rest = memoryview(half(1))
    sock.settimeout(0.15)
    with contextlib.suppress(TimeoutError):
        while rest:
            rest = rest[sock.send(rest[: 1 << 16]) :]
    sock.settimeout(None)
    ready()
    writer = threading.Thread(target=sock.sendall, args=(rest,))
    writer.start()
    answer = read_all(sock)
    writer.join()
    return answer


def with_fork(sock: socket.socket) -> str:
    child = os.fork()
    if child == 0:
        sock.sendall(half(1))
        os._exit(0)
    ready()
    answer = read_all(sock)
    return answer if os.waitpid(child, 0)[1] == 0 else "the writer failed"


def with_epoll(sock: socket.socket) -> str:
    sock.setblocking(False)
    epoll = select.epoll()
    epoll.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
    epoll.register(0, select.EPOLLIN)
    rest, digest, left, may_read = memoryview(half(1)), hashlib.sha256(), TOTAL_BYTES, False
    said = False
    while rest or left:
        try:
            while rest:
                rest = rest[sock.send(rest[: 1 << 16]) :]
        except BlockingIOError:
            pass
        if not said:
            said = True
            print("ready", flush=True)
        try:
            while may_read and left:
                data = sock.recv(min(left, 1 << 16))
                if not data:
                    return "end of file"
                digest.update(data)
                left -= len(data)
        except BlockingIOError:
            pass
        if not rest and not left:
            break
        for descriptor, events in epoll.poll():
            if descriptor == 0:
                sys.stdin.readline()
                epoll.unregister(0)
                may_read = True
            elif events & (select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP):
                return f"events {events:#x}, error {sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)}"
    return digest.hexdigest()


def ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


STYLES = {"threads": with_threads, "fork": with_fork, "epoll": with_epoll, "patience": with_patience}


def main() -> None:
    style, family, ip, port = sys.argv[1:]
    sock = connect(socket.AF_INET6 if family == "inet6" else socket.AF_INET, ip, int(port))
    try:
        print("done", STYLES[style](sock), flush=True)
    except OSError as error:
        print("failed", error, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
