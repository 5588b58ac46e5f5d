"""Records metrics in the ways of TensorBoard and of wandb without a network, and checks at the end that none is missing.

    trackers.py FOLDER [--end-file FILE]

TensorBoard: a thread takes records from a queue, and appends them with their length and checksum to a file that stays open.
wandb: a second process listens on a loopback port, which a file in /tmp names, and appends what it is sent to a file of its
own; every record is acknowledged.
"""

import os
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "workloads"))

from steps import say, steps, wrong

HEAD = struct.Struct("<QI")


def record(step: int) -> bytes:
    data = f"loss {step} {1 / (step + 1)}".encode()
    return HEAD.pack(len(data), zlib.crc32(data)) + data


def records(path: Path) -> list[bytes]:
    found: list[bytes] = []
    content = path.read_bytes()
    while content:
        length, checksum = HEAD.unpack_from(content)
        data, content = content[HEAD.size : HEAD.size + length], content[HEAD.size + length :]
        if zlib.crc32(data) != checksum:
            wrong(f"{path}: record {len(found)} is damaged")
        found.append(HEAD.pack(length, checksum) + data)
    return found


def serve(path: str, port_file: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, open(path, "wb") as file:
        Path(f"{port_file}.new").write_text(str(listener.getsockname()[1]))
        os.rename(f"{port_file}.new", port_file)
        connection, _ = listener.accept()
        stream = connection.makefile("rb")
        while head := stream.read(HEAD.size):
            file.write(head + stream.read(HEAD.unpack(head)[0]))
            file.flush()
            connection.sendall(b".")


def write_events(path: Path, events: "queue.Queue[bytes | None]") -> None:
    with path.open("wb") as file:
        while (event := events.get()) is not None:
            file.write(event)
            if events.empty():
                file.flush()


if sys.argv[1] == "--serve":
    serve(*sys.argv[2:])
    sys.exit()

folder = Path(sys.argv[1])
run = folder / "run.wandb"
port_file = Path(tempfile.mkdtemp()) / "port"
service = subprocess.Popen([sys.executable, __file__, "--serve", str(run), str(port_file)])
while not port_file.exists():
    if service.poll() is not None:
        wrong("the service has ended")
link = socket.create_connection(("127.0.0.1", int(port_file.read_text())))
events: "queue.Queue[bytes | None]" = queue.Queue()
writer = threading.Thread(target=write_events, args=(folder / "events.out.tfevents", events))
writer.start()
done = 0
for step in steps():
    events.put(record(step))
    link.sendall(record(step))
    if link.recv(1) != b".":
        wrong("the service does not answer")
    done = step + 1
    say(step)
link.close()
events.put(None)
writer.join()
if service.wait() != 0:
    wrong("the service failed")
for path in (run, folder / "events.out.tfevents"):
    if records(path) != [record(step) for step in range(done)]:
        wrong(f"{path} is not complete")
