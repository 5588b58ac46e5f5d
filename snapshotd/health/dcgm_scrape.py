"""Reads the metrics of a dcgm-exporter: one request, with limits of time and size.

Invariants: the exporter is not trusted. What it sends is kept only up to a limit, and only lines of the wanted fields are
parsed, in a thread. On a loopback address only a listener of root or of the configured user is asked: ports above 1023 are
free for every local user, and an alarm can have ranks moved.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from snapshotd.health.check import Unable
from snapshotd.runtime.blocking import Reader

LIMIT_S = 10.0
MAX_BYTES, MAX_HEAD_BYTES = 4 << 20, 16 << 10
MAX_LINES, MAX_LINE_BYTES = 2048, 1024
#: Of all lines that are parsed: the parser needs some microseconds for each escaped character.
MAX_PARSED_BYTES = 512 << 10
#: More than any node has.
MAX_GPUS = 64
#: Beyond that a number is DCGM's mark for a value that is missing, or nonsense.
MAX_VALUE = 1 << 53
_UUID = re.compile(r"GPU-[0-9a-f-]{36}")
_LISTEN = "0A"


@dataclass(frozen=True)
class Gpu:
    """What an exporter says of one GPU."""

    name: str  # "GPU 3"
    values: dict[str, int]  # by field


class Exporter:
    def __init__(self, url: str, user_id: int, fields: Collection[str], root: Path) -> None:
        self.url, self._user_id, self._root = url, user_id, root
        self._lines = re.compile(
            rb"^(?:%s)\{[^\n]{1,%d}$" % (b"|".join(name.encode() for name in fields), MAX_LINE_BYTES), re.MULTILINE
        )
        self._reader = Reader("dcgm-exporter")

    async def read(self) -> dict[str, Gpu]:
        """The GPUs by UUID. Raises Unable, OSError, ValueError and TimeoutError."""
        place = urlsplit(self.url)
        host, port = place.hostname or "", place.port or 80
        if _is_loopback(host):
            await self._reader.run(lambda: self._must_be_trusted(port), LIMIT_S)
        try:
            async with asyncio.timeout(LIMIT_S):
                body = await _get(host, port, place.netloc, place.path or "/metrics")
        except TimeoutError as error:
            raise Unable(f"{self.url} did not answer within {LIMIT_S:g} s") from error
        except OSError as error:
            raise Unable(f"{self.url} cannot be reached: {error.strerror or error}") from error
        return await self._reader.run(lambda: self._parsed(body), LIMIT_S)

    def _must_be_trusted(self, port: int) -> None:
        """Raises Unable if a listener on this port belongs to another user, or if there is none."""
        owners = {owner for name in ("tcp", "tcp6") for owner in _owners(self._root / "proc/net" / name, port)}
        if not owners:
            raise Unable(f"{self.url} cannot be reached: no process listens there")
        if others := owners - {0, self._user_id}:
            raise Unable(f"{self.url} is not read: its port belongs to user {min(others)}; see [health.dcgm] user")

    def _parsed(self, body: bytes) -> dict[str, Gpu]:
        found = self._lines.finditer(body)
        lines = [match[0] for match in itertools.islice(found, MAX_LINES + 1)]
        if len(lines) > MAX_LINES:
            raise Unable(f"{self.url} has more than {MAX_LINES} lines of the fields that are looked at")
        if sum(map(len, lines)) > MAX_PARSED_BYTES:
            raise Unable(f"{self.url} has more than {MAX_PARSED_BYTES} bytes of the fields that are looked at")
        if not lines:
            raise Unable(f"{self.url} has none of the fields that are looked at")
        text = b"\n".join(lines).decode(errors="replace") + "\n"
        gpus: dict[str, Gpu] = {}
        try:
            for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
                uuid, value = sample.labels.get("UUID", ""), sample.value
                if not _UUID.fullmatch(uuid) or not math.isfinite(value) or not 0 <= value < MAX_VALUE:
                    continue
                gpu = gpus.setdefault(uuid, Gpu(_name(sample.labels.get("gpu", ""), uuid), {}))
                gpu.values[sample.name] = max(int(value), gpu.values.get(sample.name, 0))  # of the parts of a GPU (MIG)
        except Exception as error:
            raise Unable(f"{self.url} cannot be parsed: {type(error).__name__}") from error
        if len(gpus) > MAX_GPUS:
            raise Unable(f"{self.url} lists more than {MAX_GPUS} GPUs")
        return gpus


def _name(index: str, uuid: str) -> str:
    return f"GPU {index}" if re.fullmatch(r"[0-9]{1,3}", index) else uuid


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _owners(path: Path, port: int) -> Iterator[int]:
    """The users whose processes listen on a port."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()[1:]]
    except FileNotFoundError:  # without IPv6
        return
    for row in rows:
        if len(row) > 7 and row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port:
            yield int(row[7])


async def _get(host: str, port: int, named: str, path: str) -> bytes:
    """The body of an answer. HTTP/1.0, so that it comes in one piece and ends with the connection."""
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {named}\r\nAccept: text/plain\r\n\r\n".encode())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise Unable("the dcgm-exporter does not answer in HTTP") from error
        status = head.split(b"\r\n", 1)[0].split()
        if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or status[1] != b"200":
            shown = b" ".join(status[1:])[:40].decode("ascii", "replace")
            raise Unable(f"the dcgm-exporter answered {shown!r} instead of 200")
        body = bytearray()
        while chunk := await reader.read(64 << 10):
            body += chunk
            if len(body) > MAX_BYTES:
                raise Unable(f"the dcgm-exporter sent more than {MAX_BYTES} bytes")
        return bytes(body)
    finally:
        writer.transport.abort()
