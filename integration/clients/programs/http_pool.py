"""Keeps an idle HTTP connection to a server that has closed its side, as pools of HTTP clients do for hours.

With --serve: the server. It answers one request and closes the connection, without announcing that.
"""

import argparse
import http.client
import os
import socket
import time

parser = argparse.ArgumentParser()
parser.add_argument("--serve", action="store_true")
parser.add_argument("--go", help="the client asks again once this file exists")
parser.add_argument("address")
options = parser.parse_args()
host, _, port = options.address.rpartition(":")

if options.serve:
    with socket.create_server((host, int(port))) as server:
        print("READY", flush=True)
        while True:
            sock, _ = server.accept()
            with sock:
                sock.recv(10000)
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nword")


def ask(pooled: http.client.HTTPConnection) -> bytes:
    pooled.request("GET", "/")
    return pooled.getresponse().read()


pool = http.client.HTTPConnection(host, int(port), timeout=20)
print("answer", ask(pool).decode(), flush=True)
step = 0
while not os.path.exists(options.go):
    print("step", step, flush=True)
    step += 1
    time.sleep(0.03)
try:
    print("answer", ask(pool).decode(), flush=True)
except (http.client.HTTPException, OSError) as error:  # what a pool does: it drops the connection and asks on another
    print("dropped", type(error).__name__, flush=True)
    pool.close()
    print("answer", ask(pool).decode(), flush=True)
print("DONE", flush=True)
