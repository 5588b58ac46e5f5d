"""The state that several autopilots share: a history of changes in etcd, of which each SQLite database is a copy.

Every transaction of the database is one entry: its statements with their values. Entries are numbered without gaps, and each
has the digest of the one before it. The key `head` names the newest one. `publish` adds an entry before the transaction is
committed here, in one transaction of etcd that compares the head with what is known here.

Invariant: two copies with the same position have made the same changes in the same order. A change with a fence was made by
the leader of that term, because the same transaction of etcd compares the leader's key (leader.py). A copy that has changes
which the history does not have is refused, never merged.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection, DatabaseError
from typing import Any

import msgspec

from migrator.autopilot import snapshots
from migrator.autopilot.etcd import Etcd, after
from snapshotd.api import etcd_pb2 as pb
from snapshotd.api.errors import BadConfig, Full

#: In a database: of which history it is a copy, and up to which entry.
TABLE = """
CREATE TABLE IF NOT EXISTS shared (
  one INTEGER PRIMARY KEY CHECK (one = 1), history TEXT NOT NULL, position INTEGER NOT NULL, digest TEXT NOT NULL) STRICT;
"""
#: etcd takes 1.5 MiB in one request.
MAX_ENTRY_BYTES = 1 << 20
#: Entries that are read at a time.
PAGE = 32
#: A snapshot is written after so many entries, and so many more for each part of the last one: about as much as it has.
EVERY, EVERY_CHUNK = 2000, 500
#: A copy that was compared with etcd so long ago is compared again before the next change.
FRESH_S = 1.0

#: All that an entry may do. Who can write to etcd must not get more than the state of the autopilots.
_CHANGES = ("INSERT ", "UPDATE ", "DELETE ")
_SAME_VERSION = "use the same version of migrator on all machines with an autopilot"

Statement = tuple[str, bool, Sequence[Any]]  # the values of one execution, or of several


class Behind(Exception):
    """The history has entries that this copy has not."""


class TooLarge(Exception):
    """The change does not fit into one entry."""


class TermOver(Exception):
    """This process does not lead any more, or cannot know. No error for users: the loop of the autopilot ends by it."""


@dataclass(frozen=True)
class Head:
    """A place in a history. `digest` is that of the entry with this number."""

    history: str
    position: int
    digest: str

    def __bytes__(self) -> bytes:
        return f"{self.history} {self.position} {self.digest}".encode()

    @classmethod
    def of(cls, value: bytes) -> Head:
        history, position, digest = value.decode().split(" ")
        return cls(history, int(position), digest)


class Entry(msgspec.Struct, array_like=True):
    schema: int
    token: str  # so that no two entries are the same
    previous: str
    statements: list[Statement]


def local(connection: Connection) -> Head | None:
    """Where this copy is; None if it is not a copy of a history."""
    row = connection.execute("SELECT history, position, digest FROM shared").fetchone()
    return Head(row["history"], row["position"], row["digest"]) if row else None


def leave(connection: Connection) -> None:
    """Makes a copy a state of its own."""
    connection.execute("DELETE FROM shared")


class Shared:
    """The history in one etcd. Used by the thread of the database. With a `fence`, it changes something only as long as the
    leader's key was created in that revision."""

    def __init__(self, etcd: Etcd, schema: int, fence: int = 0) -> None:
        self.etcd, self.fence, self._schema = etcd, fence, schema
        prefix = etcd.settings.prefix.rstrip("/")
        self.head_key, self.leader_key = f"{prefix}/head".encode(), f"{prefix}/leader".encode()
        self._entries = f"{prefix}/entry/".encode()
        self.snapshots = snapshots.Snapshots(etcd, prefix)
        self._compared_s = float("-inf")

    # ---------------------------------------------------------------- joining

    def join(self, connection: Connection) -> None:
        """Makes a database a copy of the history. If there is no history yet, it begins with this database."""
        found = self.etcd.get(self.head_key)
        here = local(connection)
        if here is not None and here.position == 0 and (found is None or Head.of(found.value).history != here.history):
            leave(connection)  # its beginning never came to etcd
            here = None
        if found is None and here is None:
            self._begin(connection)
        elif here is None and connection.execute("SELECT count(*) FROM events").fetchone()[0]:
            raise BadConfig(
                f"etcd at {self.etcd.settings} has the state of other autopilots, and this folder has one of its own",
                remedy="to join them, name an empty folder with --state; to begin with this state instead, give another"
                " --etcd-prefix",
            )
        elif here is None:
            self._restore(connection)
        self.catch_up(connection)

    def _begin(self, connection: Connection) -> None:
        first = Head(secrets.token_hex(8), 0, "-")
        # In the snapshot too, so that a new copy knows where it is. If another autopilot begins first, it is taken back.
        connection.execute("INSERT INTO shared VALUES (1, ?, ?, ?)", (first.history, first.position, first.digest))
        try:
            written = self.snapshots.write(connection, first.position)
        except BaseException:
            leave(connection)
            raise
        none = pb.Compare(target=pb.Compare.CREATE, key=self.head_key, create_revision=0)
        puts = [_put(self.head_key, bytes(first)), _put(self.snapshots.key, written)]
        made = self.etcd.transact(pb.TxnRequest(compare=[none], success=puts, failure=[_get(self.head_key)]))
        if not made.succeeded and made.responses[0].response_range.kvs[0].value != bytes(first):
            leave(connection)
            self.join(connection)

    # ---------------------------------------------------------------- changing

    def publish(self, connection: Connection, statements: list[Statement]) -> None:
        """Adds the open transaction to the history. Raises Behind, TooLarge or TermOver; then it must not be committed."""
        here = local(connection)
        if here is None:
            raise Behind
        assert all(query.startswith(_CHANGES) for query, _, _ in statements)
        entry = Entry(self._schema, secrets.token_hex(8), here.digest, statements)
        value = zlib.compress(msgspec.json.encode(entry), 1)
        if len(value) > MAX_ENTRY_BYTES:
            raise TooLarge
        new = Head(here.history, here.position + 1, hashlib.sha256(value).hexdigest())
        compares = [pb.Compare(target=pb.Compare.VALUE, key=self.head_key, value=bytes(here))]
        if self.fence:
            compares.append(pb.Compare(target=pb.Compare.CREATE, key=self.leader_key, create_revision=self.fence))
        puts = [_put(self._entry_key(new.position), value), _put(self.head_key, bytes(new))]
        gets = [_get(self.head_key), _get(self.leader_key), _get(self._entry_key(new.position))]
        answer = self.etcd.transact(pb.TxnRequest(compare=compares, success=puts, failure=gets))
        if not answer.succeeded:
            heads, leaders, entries = (one.response_range.kvs for one in answer.responses)
            is_newest = bool(heads) and heads[0].value == bytes(new)
            # A request whose answer was lost is sent again, and then fails because it has succeeded. Others may have added
            # entries meanwhile.
            if not is_newest and not (entries and entries[0].value == value):
                if self.fence and (not leaders or leaders[0].create_revision != self.fence):
                    raise TermOver("another autopilot leads")
                raise Behind
        else:
            is_newest = True
        _set(connection, new)
        self._compared_s = time.monotonic() if is_newest else float("-inf")

    # ---------------------------------------------------------------- following

    def refresh(self, connection: Connection) -> None:
        if time.monotonic() > self._compared_s + FRESH_S:
            self.catch_up(connection)

    def catch_up(self, connection: Connection) -> bool:
        """Makes the changes of others here. Returns whether there were any. Raises BadConfig if this is not a copy."""
        changed = False
        while True:
            found, here = self.etcd.get(self.head_key), local(connection)
            head = None if found is None else Head.of(found.value)
            if here is None or head is None or head.history != here.history or head.position < here.position:
                raise self._foreign(here, head)
            if head.position == here.position:
                if head != here:
                    raise self._foreign(here, head)
                self._compared_s = time.monotonic()
                return changed
            changed = True
            first = self._entry_key(here.position + 1)
            kept = self.etcd.range(pb.RangeRequest(key=first, range_end=after(self._entries), limit=PAGE))
            if kept and kept[0].key == first:
                self._apply(connection, here, [one.value for one in kept])
            else:
                self._restore(connection)

    def _apply(self, connection: Connection, here: Head, values: list[bytes]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            if local(connection) == here:  # else another process of this machine was faster
                for value in values:
                    here = self._apply_one(connection, here, value)
                _set(connection, here)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _apply_one(self, connection: Connection, here: Head, value: bytes) -> Head:
        entry = msgspec.json.decode(zlib.decompress(value), type=Entry)
        if entry.previous != here.digest:
            raise self._foreign(here, Head(here.history, here.position + 1, ""))
        if entry.schema != self._schema:
            raise BadConfig(
                f"an autopilot of another version has changed the shared state (format {entry.schema}, this program knows"
                f" {self._schema})",
                remedy=_SAME_VERSION,
            )
        try:
            for query, many, given in entry.statements:
                if not query.startswith(_CHANGES):
                    raise DatabaseError(f"{query[:40]!r} is no statement of an autopilot")
                if many:
                    connection.executemany(query, given)
                else:
                    connection.execute(query, given)
        except DatabaseError as error:
            raise BadConfig(
                f"a change of another autopilot cannot be made here: {error}", remedy=_SAME_VERSION
            ) from error
        return Head(here.history, here.position + 1, hashlib.sha256(value).hexdigest())

    def _restore(self, connection: Connection) -> None:
        """Replaces this copy by the newest snapshot, if that continues it."""
        here, newest = local(connection), connection.execute("SELECT max(id), digest FROM events").fetchone()
        with self.snapshots.read(connection) as snapshot:
            there = local(snapshot)
            assert there is not None
            query = "SELECT count(*) FROM events WHERE id = ? AND digest = ?"
            is_part = newest[0] is None or snapshot.execute(query, tuple(newest)).fetchone()[0]
            if here is not None and (here.history != there.history or here.position > there.position):
                is_part = False
            if not is_part:
                raise self._foreign(here, there)
            snapshot.backup(connection)

    # ---------------------------------------------------------------- the size of the history

    def shorten(self, connection: Connection) -> None:
        """Writes a snapshot of this copy, makes it the newest one, and removes the entries before it. For the leader."""
        here = local(connection)
        assert here is not None
        last = self.snapshots.newest()
        written = self.snapshots.write(connection, here.position)
        mine = pb.Compare(target=pb.Compare.CREATE, key=self.leader_key, create_revision=self.fence)
        made = self.etcd.transact(pb.TxnRequest(compare=[mine], success=[_put(self.snapshots.key, written)]))
        if not made.succeeded:
            raise TermOver("another autopilot leads")
        position = self.snapshots.newest().position
        self.etcd.delete(self._entries, self._entry_key(position + 1))
        self.snapshots.remove_others()
        self.etcd.compact(last.revision)

    def is_long(self, connection: Connection) -> bool:
        """Whether there are so many entries since the newest snapshot that it is worth writing another one."""
        here, newest = local(connection), self.snapshots.newest()
        return here is not None and here.position - newest.position >= EVERY + EVERY_CHUNK * newest.chunks

    def _entry_key(self, position: int) -> bytes:
        return self._entries + b"%020d" % position

    def _foreign(self, here: Head | None, there: Head | None) -> BadConfig:
        has = "no state" if there is None else f"the state {there.history} up to change {there.position}"
        mine = "none" if here is None else f"that of {here.history} up to change {here.position}"
        return BadConfig(
            f"this folder's state is not a copy of the one in etcd: etcd at {self.etcd.settings} has {has}, this folder"
            f" has {mine}, with changes that etcd does not have",
            remedy="if etcd is right, move this folder away and start with an empty one. If etcd lost its data, or was"
            " restored from an old copy: stop all autopilots, remove the keys below --etcd-prefix (`etcdctl del --prefix`),"
            " start the autopilot with the newest state with --etcd-begin-anew, and the others with empty folders",
        )


def too_large() -> Full:
    return Full(
        "a change is larger than what etcd can take at once",
        remedy="examine the node or the command that reports so much",
    )


def _set(connection: Connection, here: Head) -> None:
    connection.execute("UPDATE shared SET position = ?, digest = ?", (here.position, here.digest))


def _put(key: bytes, value: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value))


def _get(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))
