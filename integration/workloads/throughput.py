"""Measures a connection between two ranks: the longest gap between pings, and the throughput.

The client sends pings all the time, and the server prints their longest gap. When --measure exists, the client times
bulk transfers in both directions over that connection and over a new one, alternating."""

import argparse
import os
import socket
import statistics
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--serve")
parser.add_argument("--connect")
parser.add_argument("--mib", type=int, default=0, help="memory that the caller holds")
parser.add_argument("--measure", required=True)
parser.add_argument("--rounds", type=int, default=5)
options = parser.parse_args()

BULK_BYTES = 256 << 20
BLOCK = bytes(1 << 20)


def where(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def take(sock: socket.socket, count: int) -> None:
    view = memoryview(bytearray(1 << 20))
    while count:
        got = sock.recv_into(view, min(count, len(view)))
        if not got:
            print("LOST", flush=True)
            sys.exit(1)
        count -= got


def give(sock: socket.socket) -> None:
    for _ in range(BULK_BYTES // len(BLOCK)):
        sock.sendall(BLOCK)


def serve(sock: socket.socket) -> None:
    longest_s, last = 0.0, time.monotonic()
    while word := sock.recv(1):
        if word == b"p":
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last), now
            sock.sendall(b"p")
        elif word == b"g":
            print(f"gap {longest_s}", flush=True)
            longest_s, last = 0.0, time.monotonic()
            sock.sendall(b"g")
        elif word == b"d":
            give(sock)
        elif word == b"u":
            take(sock, BULK_BYTES)
            sock.sendall(b"u")


def speed(sock: socket.socket, word: bytes) -> float:
    began = time.monotonic()
    sock.sendall(word)
    if word == b"d":
        take(sock, BULK_BYTES)
    else:
        give(sock)
        take(sock, 1)
    return BULK_BYTES / (time.monotonic() - began) / 1e9


def ask(sock: socket.socket, word: bytes) -> None:
    sock.sendall(word)
    take(sock, 1)


if options.serve:
    import threading

    with socket.create_server(where(options.serve)) as server:
        print("READY", flush=True)
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

memory = [os.urandom(1 << 20) for _ in range(options.mib)]
old = socket.create_connection(where(options.connect))
print("READY", flush=True)
gaps = 0
while not os.path.exists(options.measure):
    ask(old, b"p")
    if os.path.exists(f"{options.measure}.gap{gaps}"):
        ask(old, b"g")
        gaps += 1
    time.sleep(0.001)
fresh = socket.create_connection(where(options.connect))
for name, word in (("to the rank", b"d"), ("from the rank", b"u")):
    speed(old, word), speed(fresh, word)  # warm
    pairs = [(speed(old, word), speed(fresh, word)) for _ in range(options.rounds)]
    moved, unmoved = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    print(f"{name}: {moved:.2f} {unmoved:.2f} {ratio:.3f}", flush=True)
print("DONE", flush=True)
