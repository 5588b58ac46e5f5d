"""A client of a service on a host without daemon: sends one request at a time, and reconnects after a reset."""

import argparse
import socket
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--serve", action="store_true")
parser.add_argument("--half-close", action="store_true", help="ends its own side of the connection and waits")
parser.add_argument("address")
options = parser.parse_args()
host, _, port = options.address.rpartition(":")

if options.serve:
    with socket.create_server((host, int(port))) as server:
        print("READY", flush=True)
        while True:
            sock, _ = server.accept()
            with sock:
                try:
                    while data := sock.recv(100):
                        sock.sendall(data)
                except ConnectionResetError:
                    print("PARTED", flush=True)
                time.sleep(60 if options.half_close else 0)

connections = 0
while True:
    with socket.create_connection((host, int(port)), 10) as sock:
        connections += 1
        print("CONNECTED", connections, flush=True)
        if options.half_close:
            sock.shutdown(socket.SHUT_WR)
            time.sleep(60)
            sys.exit(0)
        try:
            while True:
                sock.sendall(b"ping")
                answer = b""
                while len(answer) < 4:
                    more = sock.recv(4 - len(answer))
                    if not more:
                        print("WRONG: a clean end where a reset should be", flush=True)
                        sys.exit(1)
                    answer += more
                print("answer", connections, flush=True)
                time.sleep(0.05)
        except ConnectionResetError:
            print("RESET", connections, flush=True)
