"""A client of servers that close their connections. It reads and writes when it is told to, and prints what it gets.

The last connection leads to a listener of its own, which has closed its end. With `--serve` it is such a server: it sends a
few bytes and closes the connection when it is told to.
"""

import argparse
import errno
import socket
import time
from pathlib import Path

TCP_LINGER2 = 8

parser = argparse.ArgumentParser()
parser.add_argument("--serve", action="store_true")
parser.add_argument("--forget", action="store_true", help="let the kernel forget the closed connection after a second")
parser.add_argument("--when", type=Path, required=True, help="the file that says when to go on")
parser.add_argument("addresses", nargs="+")
options = parser.parse_args()


def await_file() -> None:
    while not options.when.exists():
        time.sleep(0.01)


def place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


if options.serve:
    with socket.create_server(place(options.addresses[0])) as server:
        print("READY", flush=True)
        sock, _ = server.accept()
        with sock:
            if options.forget:
                sock.setsockopt(socket.IPPROTO_TCP, TCP_LINGER2, 1)
            sock.sendall(b"last words")
            await_file()
    time.sleep(600)  # its node must not take its end for a reason

inner = socket.create_server(("127.0.0.1", 0))
clients = [socket.create_connection(place(address)) for address in options.addresses]
clients.append(socket.create_connection(inner.getsockname()))
accepted, _ = inner.accept()
accepted.sendall(b"last words")
accepted.close()
print("CONNECTED", flush=True)
await_file()
for number, client in enumerate(clients):
    heard = b""
    while more := client.recv(100):
        heard += more
    print(number, "heard", heard.decode(), flush=True)
    try:
        for _ in range(1000):
            client.sendall(b"an answer")
            time.sleep(0.01)
        print(number, "wrote on and on", flush=True)
    except OSError as error:
        print(number, errno.errorcode[error.errno or 0], flush=True)
    client.close()
print("DONE", flush=True)
