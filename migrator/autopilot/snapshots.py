"""Whole copies of the database in etcd, for autopilots that join, and so that the history need not be kept for ever.

Invariant: the key `snapshot` always names a copy of which every part is there. Parts are written under a name of their own
before that key is, and removed only when it names another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from migrator.autopilot.etcd import Etcd
from snapshotd.api import etcd_pb2 as pb
from snapshotd.api.errors import Damaged

CHUNK_BYTES = 512 << 10
#: Parts that are read at a time.
PAGE = 16


class _Named(msgspec.Struct):
    """What the key `snapshot` says."""

    position: int
    name: str
    chunks: int
    sha256: str


@dataclass(frozen=True)
class Newest:
    position: int
    chunks: int
    revision: int  # of etcd, when it became the newest one


class Snapshots:
    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self.key = f"{prefix}/snapshot".encode()
        self._chunks = f"{prefix}/chunk/".encode()

    def write(self, connection: sqlite3.Connection, position: int) -> bytes:
        """Writes the parts of a copy. Returns the value with which the key `snapshot` makes it the newest one."""
        with _beside(connection) as folder:
            file = folder / "snapshot"
            connection.execute("VACUUM INTO ?", (str(file),))
            packed = zlib.compress(file.read_bytes(), 6)
        name = f"{position:020d}-{secrets.token_hex(4)}"
        parts = [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]
        for number, part in enumerate(parts):
            self._etcd.put(self._chunk(name, number), part)
        return msgspec.json.encode(_Named(position, name, len(parts), hashlib.sha256(packed).hexdigest()))

    def newest(self) -> Newest:
        found, revision = self._named()
        return Newest(found.position, found.chunks, revision)

    @contextlib.contextmanager
    def read(self, beside: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
        """The newest copy, as a database in the folder of that one."""
        named, _ = self._named()
        packed = b""
        for number in range(0, named.chunks, PAGE):
            last = self._chunk(named.name, min(number + PAGE, named.chunks))
            found = self._etcd.range(pb.RangeRequest(key=self._chunk(named.name, number), range_end=last))
            packed += b"".join(part.value for part in found)
        if hashlib.sha256(packed).hexdigest() != named.sha256:
            raise Damaged("the snapshot in etcd is not complete", remedy="retry: a newer one may have replaced it")
        with _beside(beside) as folder:
            file = folder / "snapshot"
            file.write_bytes(zlib.decompress(packed))
            connection = sqlite3.connect(file, isolation_level=None)
            try:
                connection.row_factory = sqlite3.Row
                yield connection
            finally:
                connection.close()

    def remove_others(self) -> None:
        """Removes the parts of older copies, also of those that never became the newest one."""
        named, _ = self._named()
        self._etcd.delete(self._chunks, self._chunk(named.name, 0))

    def _named(self) -> tuple[_Named, int]:
        found = self._etcd.get(self.key)
        if found is None:
            raise Damaged("etcd has no snapshot of the shared state", remedy="restore etcd from a copy of its data")
        return msgspec.json.decode(found.value, type=_Named), found.mod_revision

    def _chunk(self, name: str, number: int) -> bytes:
        return self._chunks + f"{name}/{number:06d}".encode()


@contextlib.contextmanager
def _beside(connection: sqlite3.Connection) -> Iterator[Path]:
    """A temporary folder beside a database: there is room for a second one, which /tmp may not have."""
    home = Path(connection.execute("PRAGMA database_list").fetchone()[2]).parent
    with tempfile.TemporaryDirectory(prefix="snapshot-", dir=home) as folder:
        yield Path(folder)
