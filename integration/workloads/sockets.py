"""Uses sockets other than plain connections: one that is only bound, connected datagrams, and various options.

Prints its options and an answered datagram every step. When --until exists, it listens on the socket that was bound at
the start, and prints its address.
"""

import argparse
import os
import socket
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--here", required=True, help="an address of the node it starts on")
parser.add_argument("--echo", required=True, help="HOST:PORT of a datagram echo")
parser.add_argument("--stream", required=True, help="HOST:PORT of a stream echo")
parser.add_argument("--until", required=True)
parser.add_argument("--serve", action="store_true")
options = parser.parse_args()


def where(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if options.serve:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(where(options.echo))
    with socket.create_server(where(options.stream)) as server:
        print("READY", flush=True)
        kept, _ = server.accept()
        kept.send(b"kept")
        while True:
            data, sender = datagrams.recvfrom(100)
            datagrams.sendto(data, sender)

bound = socket.socket()
bound.bind((options.here, 0))
port = bound.getsockname()[1]
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.connect(where(options.echo))
datagrams.settimeout(1)
stream = socket.create_connection(where(options.stream))
SET = {
    "user-timeout": (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 54_321),
    "keepalive": (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    "keep-idle": (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77),
    "no-delay": (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    "not-sent": (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 65_536),
    "tos": (socket.IPPROTO_IP, socket.IP_TOS, 0x10),
    "ttl": (socket.IPPROTO_IP, socket.IP_TTL, 33),
}
for level, name, value in SET.values():
    stream.setsockopt(level, name, value)
while not os.path.exists(options.until):
    answered = False
    while not answered:
        datagrams.send(b"hello")
        try:
            answered = datagrams.recv(100) == b"hello"
        except (TimeoutError, ConnectionRefusedError):
            print("datagram lost", flush=True)
    mss = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    chosen = [f"{word}={stream.getsockopt(level, name)}" for word, (level, name, _) in SET.items()]
    print("options", *chosen, f"mss={mss}", flush=True)
    time.sleep(0.1)
bound.listen()
print("bound", bound.getsockname()[0], bound.getsockname()[1] == port, stream.recv(4), flush=True)
sys.exit(0)
