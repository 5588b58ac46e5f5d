"""Sends and receives numbered, checksummed records on TCP connections, as client or server, until --until exists.

    --serve HOST:PORT      accepts any number of connections; ends when the file exists and all streams have ended
    --connect HOST:PORT    --connections of them

--engine blocking: two threads per connection; epoll: one edge-triggered loop for all; forked: the parent reads and a
child writes, on one shared socket. While the file --stall exists nothing is read, so that queues fill. A record that is
lost, duplicated or damaged is reported as `WRONG`, and a connection that ends early as `LOST`; both end the program
with status 1.
"""

import argparse
import os
import select
import socket
import struct
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from typing import NoReturn

parser = argparse.ArgumentParser()
parser.add_argument("--serve")
parser.add_argument("--connect")
parser.add_argument("--connections", type=int, default=1)
parser.add_argument("--engine", choices=["blocking", "epoll", "forked"], default="blocking")
parser.add_argument("--until", required=True)
parser.add_argument("--stall", default="")
parser.add_argument("--pace-s", type=float, default=0.002)
parser.add_argument("--user-timeout-ms", type=int, default=0)
parser.add_argument("--keepalive-s", type=int, default=0)
options = parser.parse_args()

HEADER = struct.Struct("!QII")  # number, size of what follows, its checksum
NOISE = bytes((index * 2654435761 >> 13) & 0xFF for index in range(40_000))
LAST = (1 << 64) - 1


def record(number: int) -> bytes:
    payload = NOISE[number % 997 :][: 1000 + number * 7919 % 30_000]
    return HEADER.pack(number, len(payload), zlib.crc32(payload)) + payload


def ended() -> bool:
    return os.path.exists(options.until)


def stalled() -> bool:
    return bool(options.stall) and os.path.exists(options.stall)


def fail(message: str) -> NoReturn:
    print(message, flush=True)
    os._exit(1)


class Reader:
    """Parses the byte stream and checks it."""

    def __init__(self, name: str) -> None:
        self.name, self.buffer, self.expected, self.done = name, bytearray(), 0, False

    def feed(self, data: bytes) -> None:
        self.buffer += data
        while len(self.buffer) >= HEADER.size:
            number, size, checksum = HEADER.unpack_from(self.buffer)
            if number == LAST:
                self.done = True
                return
            if number != self.expected:
                fail(f"WRONG {self.name}: record {number} where {self.expected} should be")
            if len(self.buffer) < HEADER.size + size:
                return
            payload = bytes(self.buffer[HEADER.size : HEADER.size + size])
            if zlib.crc32(payload) != checksum or record(number)[HEADER.size :] != payload:
                fail(f"WRONG {self.name}: record {number} is damaged")
            del self.buffer[: HEADER.size + size]
            self.expected += 1
            if number % 20 == 0:
                print(f"{self.name} {number}", flush=True)


def set_up(sock: socket.socket) -> socket.socket:
    if options.user_timeout_ms:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, options.user_timeout_ms)
    if options.keepalive_s:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
            sock.setsockopt(socket.IPPROTO_TCP, name, options.keepalive_s)
    return sock


def write_all(sock: socket.socket, name: str) -> None:
    number = 0
    try:
        while not ended():
            sock.sendall(record(number))
            number += 1
            time.sleep(options.pace_s)
        sock.sendall(HEADER.pack(LAST, 0, 0))
    except OSError as error:
        fail(f"LOST {name} while writing record {number}: {error}")


def read_all(sock: socket.socket, name: str) -> None:
    reader = Reader(name)
    try:
        while not reader.done:
            while stalled():
                time.sleep(0.01)
            data = sock.recv(1 << 16)
            if not data:
                fail(f"LOST {name} at record {reader.expected}: it was closed")
            reader.feed(data)
    except OSError as error:
        fail(f"LOST {name} at record {reader.expected}: {error}")


def blocking(sock: socket.socket, name: str) -> None:
    writer = threading.Thread(target=write_all, args=(sock, name))
    writer.start()
    read_all(sock, name)
    writer.join()


def forked(sock: socket.socket, name: str) -> None:
    if (child := os.fork()) == 0:
        write_all(sock, name)
        os._exit(0)
    read_all(sock, name)
    if os.waitpid(child, 0)[1] != 0:
        fail(f"LOST {name}: its writer failed")


@dataclass
class Stream:
    sock: socket.socket
    reader: Reader
    name: str
    next: int = 0
    out: bytes = b""
    last: bool = False


class Loop:
    """Edge-triggered: an event comes once, so it reads and writes until the kernel returns EAGAIN.

    It reads once from each stream in turn. Reading one stream to its end could take so long, if the other programs write
    faster than this one can read, that it would hardly ever write."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.streams: dict[int, Stream] = {}
        self.readable: set[int] = set()  # streams that have had an event, and no EAGAIN since
        self.listener: socket.socket | None = None

    def add(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        number = sock.fileno()
        self.streams[number] = Stream(sock, Reader(name), name)
        self.epoll.register(number, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET | select.EPOLLRDHUP)

    def run(self) -> None:
        while True:
            for number, _ in self.epoll.poll(0 if self.readable and not stalled() else options.pace_s):
                if self.listener is not None and number == self.listener.fileno():
                    sock, where = self.listener.accept()
                    self.add(set_up(sock), f"from {where[1]}")
                elif number in self.streams:
                    self.readable.add(number)
            for stream in self.streams.values():
                self.write(stream)
            if stalled():
                continue
            self.readable = {number for number in self.readable if self.read(self.streams[number])}
            if ended() and all(self.is_done(stream) for stream in self.streams.values()):
                return

    def is_done(self, stream: Stream) -> bool:
        return stream.reader.done and stream.last and not stream.out

    def read(self, stream: Stream) -> bool:
        """Reads once; returns whether there may be more."""
        if stream.reader.done:
            return False
        try:
            data = stream.sock.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError as error:
            fail(f"LOST {stream.name} at record {stream.reader.expected}: {error}")
        if not data:
            fail(f"LOST {stream.name} at record {stream.reader.expected}: it was closed")
        stream.reader.feed(data)
        return not stream.reader.done

    def write(self, stream: Stream) -> None:
        if not stream.out and not stream.last:
            if ended():
                stream.out, stream.last = HEADER.pack(LAST, 0, 0), True
            else:
                stream.out = record(stream.next)
                stream.next += 1
        try:
            while stream.out:
                stream.out = stream.out[stream.sock.send(stream.out) :]
        except BlockingIOError:
            return
        except OSError as error:
            fail(f"LOST {stream.name} while writing record {stream.next}: {error}")


def parse(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def call(number: int) -> socket.socket:
    host, port = parse(options.connect)
    while True:
        try:
            return set_up(socket.create_connection((host, port), 60))
        except ConnectionRefusedError:
            fail(f"LOST {number}: refused")


def main() -> None:
    loop = Loop() if options.engine == "epoll" else None
    threads = []
    if options.serve:
        host, port = parse(options.serve)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(16)
        print("READY", flush=True)
        if loop:
            loop.listener = listener
            loop.epoll.register(listener.fileno(), select.EPOLLIN)
            loop.run()
        else:
            listener.settimeout(0.1)
            while not ended():
                try:
                    sock, where = listener.accept()
                except TimeoutError:
                    continue
                sock.settimeout(None)
                serve = forked if options.engine == "forked" else blocking
                threads.append(threading.Thread(target=serve, args=(set_up(sock), f"from {where[1]}")))
                threads[-1].start()
    else:
        for number in range(options.connections):
            sock = call(number)
            sock.settimeout(None)
            if loop:
                loop.add(sock, str(number))
            else:
                serve = forked if options.engine == "forked" else blocking
                threads.append(threading.Thread(target=serve, args=(sock, str(number))))
                threads[-1].start()
        print("READY", flush=True)
        if loop:
            loop.run()
    for thread in threads:
        thread.join()
    print("DONE", flush=True)
    time.sleep(0.5)  # the peer reads its last record before this socket closes


main()
sys.exit(0)
