"""Measures the transport alone, against a raw socket.

Images come from a FIFO on the source, and become verified files in the target's memory. They are sent in two ways: over
bulk connections beside gRPC, which moves use, and over gRPC with TLS, the fallback. Device memory goes from ring to ring in
stripes, encrypted and plain. In place of the processes that use a GPU, threads say that a ring has been filled or emptied:
copies that the GPU makes take no processor time. What is in the ring is sent, again in each lap.

Sender, receiver and the writers in place of CRIU are separate processes on this machine. They communicate over loopback
with mutual TLS. The receiver is also its own network process. One FIFO is what a rank of one process has; four show what
the channel itself can do. Times and processor seconds of images begin when there is something to read.

`python -m integration.bench_transport [--mib N]` prints the table.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from migrator import pki
from snapshotd.api.channel import GrpcChannel, open_channel
from snapshotd.api.credentials import Credentials
from snapshotd.api.methods import PUSH
from snapshotd.inprocess.devmem import SLOT_BYTES
from snapshotd.network.dispatch import Services
from snapshotd.transport.device.incoming import Incoming
from snapshotd.transport.device.outgoing import Outgoing
from snapshotd.transport.device.records import RECORD_BYTES
from snapshotd.transport.device.ring import BEHIND_BYTES, RING_BYTES, Ring, create
from snapshotd.transport.image.bulk_receiver import BulkReceivers
from snapshotd.transport.image.bulk_sender import open_streams
from snapshotd.transport.image.fifo import make_fifo, readable
from snapshotd.transport.image.grpc_channel import PushCall, push_handler
from snapshotd.transport.image.sender import Sender
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.image.stream import Stream
from snapshotd.transport.routes import Route
from tests.served import Linked

MOVE = "m-000000000000"
#: How images are sent, and from how many FIFOs.
IMAGE_WAYS = {"bulk": ("bulk connections", 1), "bulk_4": ("bulk connections", 4), "grpc": ("gRPC", 1)}
#: Goal: throughput relative to a raw socket, encrypted, on a machine with 16 cores.
GOAL = 2.0
_BLOCK_BYTES = 8 << 20
_REPOSITORY = Path(__file__).parents[1]


def run(total_bytes: int = 2 << 30, streams: int = 4, chunk_bytes: int = 2 << 20) -> dict[str, float]:
    """Returns the GB/s of a raw socket (memory to memory, and into tmpfs) and of the channels, and their ratios."""
    with tempfile.TemporaryDirectory(prefix="bench-transport-", dir="/dev/shm") as folder:
        raw_gbps = _raw_socket(total_bytes, None)
        raw_tmpfs_gbps = _raw_socket(total_bytes, Path(folder, "raw"))
        Path(folder, "raw").unlink()
        found = {
            "total_bytes": total_bytes,
            "streams": streams,
            "chunk_bytes": chunk_bytes,
            "raw_socket_gbps": raw_gbps,
            "raw_socket_tmpfs_gbps": raw_tmpfs_gbps,
        }
        for way in IMAGE_WAYS:
            place = Path(folder, way)
            place.mkdir()
            seconds, cpu_s, resent = asyncio.run(_image_channel(way, place, total_bytes, streams, chunk_bytes))
            gbps = total_bytes / seconds / 1e9
            found[f"{way}_gbps"] = gbps
            found[f"{way}_to_raw"] = gbps / raw_gbps
            found[f"{way}_to_raw_tmpfs"] = gbps / raw_tmpfs_gbps
            found[f"{way}_cpu_s_per_gb"] = cpu_s / (total_bytes / 1e9)
            found[f"{way}_chunks_resent"] = resent
        for encrypted, stripes in itertools.product((False, True), widths()):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                seconds, cpu_s = asyncio.run(_stripes(Path(own), total_bytes, stripes, encrypted=encrypted))
            way = stripes_key(stripes, encrypted=encrypted)
            found[f"{way}_gbps"] = total_bytes / seconds / 1e9
            found[f"{way}_to_raw"] = found[f"{way}_gbps"] / raw_gbps
            found[f"{way}_cpu_s_per_gb"] = cpu_s / (total_bytes / 1e9)
        return found


def widths() -> list[int]:
    """The numbers of stripes to measure: each stripe uses a core for its sender and one for its receiver."""
    return [stripes for stripes in (1, 2, 4, 8) if stripes <= (os.cpu_count() or 1)]


def stripes_key(stripes: int, *, encrypted: bool) -> str:
    return f"stripes_{stripes}_{'encrypted' if encrypted else 'plain'}"


def _cpu_s() -> float:
    """Processor time of this process and of the children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def _cpu_of(pid: int) -> float:
    """Processor time of a process, also of one that has ended and was not waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _child(*arguments: str) -> Iterator[tuple[int, IO[str]]]:
    """Runs this module in another process; yields its pid and output. It ends at the end of its stdin, or by itself."""
    command = [sys.executable, "-m", "integration.bench_transport", *arguments]
    with subprocess.Popen(
        command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.pid, process.stdout
        finally:
            process.stdin.close()
            process.wait(30)


# ---------------------------------------------------------------- the baseline


def _raw_socket(total_bytes: int, into: Path | None) -> float:
    with _child("sink", str(into or "")) as (_, output):
        port = int(output.readline())
        block = os.urandom(_BLOCK_BYTES)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            begun = time.perf_counter()
            for _ in range(total_bytes // _BLOCK_BYTES):
                connection.sendall(block)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b"k"
            return total_bytes / (time.perf_counter() - begun) / 1e9


def _sink(into: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection, Path(into or os.devnull).open("wb", buffering=0) as file:
            block = memoryview(bytearray(_BLOCK_BYTES))
            while count := connection.recv_into(block):
                file.write(block[:count])
            connection.sendall(b"k")


# ---------------------------------------------------------------- the channels


def _certificates(folder: Path) -> tuple[Credentials, Credentials]:
    """Of the source, node-1, and of the target, node-2."""
    pki.init(folder / "ca")
    source, target = (pki.issue_node(folder / "ca", name) for name in ("node-1", "node-2"))
    return Credentials(source.ca, source.cert, source.key), Credentials(target.ca, target.cert, target.key)


async def _image_channel(
    way: str, folder: Path, total_bytes: int, streams: int, chunk_bytes: int
) -> tuple[float, float, int]:
    """(seconds, processor seconds of all processes, chunks that were sent again)."""
    credentials, target = _certificates(folder)
    names = [f"pages-{number}.img" for number in range(1, IMAGE_WAYS[way][1] + 1)]
    arguments = [str(folder / "images"), str(target.ca), str(target.cert), str(target.key), str(total_bytes), "node-1"]
    size = total_bytes // len(names)
    with ExitStack() as opened:
        fifos = {}
        for name in names:
            fifos[name] = make_fifo(folder, name)
            opened.callback(os.close, fifos[name])
        receiver, output = opened.enter_context(_child("receive", *arguments))
        pids = [os.getpid(), receiver]
        pids += [opened.enter_context(_child("write", str(folder / name), str(size)))[0] for name in names]
        port, bulk_port, key = output.readline().split()
        endpoint = f"127.0.0.1:{port}"
        channels = [GrpcChannel(open_channel(endpoint, credentials, "node-2")) for _ in range(streams)]
        ready: Sequence[Stream]
        if way == "grpc":
            for channel in channels:
                await channel.grpc.channel_ready()
            ready = [PushCall(channel, MOVE) for channel in channels]
        else:
            routes = [Route("127.0.0.1", int(bulk_port))]
            ready = await open_streams(routes, bytes.fromhex(key), credentials, "node-2", streams)
        for fifo in fifos.values():
            await readable(fifo, None)
        before_s, begun = sum(map(_cpu_of, pids)), time.perf_counter()
        async with Sender(ready, chunk_bytes) as sender:
            await asyncio.gather(*(sender.put_fd(name, fifo) for name, fifo in fifos.items()))
            files = await sender.finish()
        seconds, cpu_s = time.perf_counter() - begun, sum(map(_cpu_of, pids)) - before_s
        assert [file.size for file in files] == [size] * len(names)
        for channel in channels:
            await channel.close()
    return seconds, cpu_s, sender.chunks_resent


def _write(path: str, total_bytes: int) -> None:
    block = os.urandom(_BLOCK_BYTES)
    with Path(path).open("wb", buffering=0) as fifo:
        for _ in range(total_bytes // _BLOCK_BYTES):
            view = memoryview(block)
            while view:
                view = view[fifo.write(view) :]


async def _receive(image_dir: str, credentials: Credentials, total_bytes: int, source_node: str) -> None:
    store = ImageStore(Path(image_dir))
    store.create(MOVE, total_bytes)

    async def authorise(_context: Any, _move: str) -> None:
        return

    services = Services()
    services.add_plain(PUSH, push_handler(store, authorise))
    receivers = BulkReceivers(store, credentials, ["127.0.0.1"])
    bulk_port, bulk_key, _ = receivers.open(MOVE, source_node)
    async with Linked(services, credentials).listening("127.0.0.1:0") as port:
        print(port, bulk_port, bulk_key.hex(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    receivers.close_all()
    store.drop(MOVE)


# ---------------------------------------------------------------- device memory


async def _stripes(folder: Path, total_bytes: int, stripes: int, *, encrypted: bool) -> tuple[float, float]:
    """(seconds from the first byte that may be sent until the last one is verified and stored, processor seconds)."""
    here, there = folder / "source", folder / "target"
    here.mkdir()
    there.mkdir()
    size = total_bytes // stripes
    names = [f"device-1-{number}" for number in range(stripes)]
    filled = [_filled_ring(here / name) for name in names]
    source, target = _certificates(folder)
    before_s = _cpu_s()
    incoming = await Incoming.open(
        there, names, ["127.0.0.1"], "node-1", target, encrypted=encrypted, ring_bytes=RING_BYTES
    )
    outgoing = await Outgoing.open(
        [Route("127.0.0.1", incoming.port)],
        incoming.key,
        "node-2",
        source,
        here,
        names,
        encrypted=encrypted,
        rings=True,
    )
    emptied = [Ring(str(there / name)) for name in names]
    begun = time.perf_counter()
    gpus = [asyncio.create_task(asyncio.to_thread(_fill, ring, size)) for ring in filled]
    gpus += [asyncio.create_task(asyncio.to_thread(_empty, ring, size)) for ring in emptied]
    for name in names:
        outgoing.advance(name, 1)
    await asyncio.gather(*gpus[:stripes])
    outgoing.finish(dict.fromkeys(names, size))
    totals = await outgoing.wait()
    seconds = time.perf_counter() - begun
    await asyncio.gather(*gpus)
    assert totals.sent == total_bytes
    await outgoing.close()
    await incoming.close()
    return seconds, _cpu_s() - before_s


def _filled_ring(path: Path) -> Ring:
    """Its content does not repeat within the window in which a repetition is noticed."""
    create(str(path), RING_BYTES)
    ring = Ring(str(path))
    block = os.urandom(RECORD_BYTES - 8)
    for number in range(ring.bytes // RECORD_BYTES):
        ring.view(number * RECORD_BYTES, RECORD_BYTES)[:] = number.to_bytes(8, "big") + block
    return ring


def _fill(ring: Ring, total_bytes: int) -> None:
    for end in _chunk_ends(total_bytes):
        ring.begin(end, BEHIND_BYTES)
        ring.wrote(end)


def _empty(ring: Ring, total_bytes: int) -> None:
    for end in _chunk_ends(total_bytes):
        ring.await_written(end)
        ring.release(end)


def _chunk_ends(total_bytes: int) -> Iterator[int]:
    for begin in range(0, total_bytes, SLOT_BYTES):
        yield min(begin + SLOT_BYTES, total_bytes)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["sink", into]:
            _sink(into)
        case ["write", path, total]:
            _write(path, int(total))
        case ["receive", image_dir, ca, cert, key, total, source_node]:
            asyncio.run(_receive(image_dir, Credentials(Path(ca), Path(cert), Path(key)), int(total), source_node))
        case ["--json"]:
            print(json.dumps(run()))
        case ["--mib", mib]:
            show(run(int(mib) << 20))
        case _:
            show(run())


def show(found: dict[str, float]) -> None:
    print(f"{found['total_bytes'] / 2**30:.1f} GiB over loopback, {os.cpu_count()} cores")
    rows = [
        ("raw socket, memory to memory", "raw_socket"),
        ("raw socket, into tmpfs", "raw_socket_tmpfs"),
        *(
            (f"{label}, {found['streams']} streams, {fifos} FIFO{'s' * (fifos > 1)}", way)
            for way, (label, fifos) in IMAGE_WAYS.items()
        ),
    ]
    for encrypted, stripes in itertools.product((False, True), widths()):
        label = f"device memory, {stripes} stripe{'s' * (stripes > 1)}, {'encrypted' if encrypted else 'plain'}"
        rows.append((label, stripes_key(stripes, encrypted=encrypted)))
    print(f"{'':<44} {'GB/s':>6} {'to raw':>7} {'CPU s/GB, all processes':>24}")
    for label, key in rows:
        share, cpu_s_per_gb = found.get(f"{key}_to_raw"), found.get(f"{key}_cpu_s_per_gb")
        numbers = "" if share is None else f"{share:7.2f} {cpu_s_per_gb:24.2f}"
        print(f"{label:<44} {found[f'{key}_gbps']:6.2f} {numbers}".rstrip())
    print(f"Goal with 16 cores: {GOAL} of the raw socket, encrypted. One FIFO has one reader, which may be the limit.")


if __name__ == "__main__":
    main(sys.argv[1:])
