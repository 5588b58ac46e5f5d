"""Reads how many NCCL operations a process has launched, without its taking part (struct snapshim_counts in shim/lib/abi.h).

No thread of the process is woken and nothing is written, so reading neither delays nor disturbs it, and works while it is
stopped. What is read belongs to the rank's user and may be anything: sizes are limited here, and the numbers concern
nothing but that user's own job. The memory is read by a child that can be killed (snapshotd/proc/foreign_memory.py).

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import NamedTuple

from snapshotd.api.errors import SnapshotError, Timeout
from snapshotd.inprocess import mailbox
from snapshotd.proc import foreign_memory
from snapshotd.proc.tree import Process

VERSION = 1
#: version, bytes of a record, where its members are, the state of a used one, then where the records are and how many.
LAYOUT = struct.Struct("<10I2Q")
#: Records are handed out in order, so the first ones are those of communicators that live as long as the job.
_RECORDS_MAX = 128
_RECORD_BYTES = range(32, 4097)
_RANKS_MAX = 1 << 16
#: Of one process: a job with tensor, pipeline, data and expert parallelism has about ten.
COMMUNICATORS_MAX = 16
_PEERS_BYTES_MAX = 1 << 20
#: A page that is not swapped out is there at once. A reading that comes late is worthless.
LIMIT_S = 0.5


class Membership(NamedTuple):
    """One communicator of a process. The id is the same for all its members."""

    comm: int
    nranks: int
    member: int  # the rank in the communicator
    collectives: int
    peers: int  # address of the counts of sends and receives; 0: none


@dataclass(frozen=True)
class Layout:
    record_bytes: int
    at_id: int
    at_state: int
    at_nranks: int
    at_rank: int
    at_collectives: int
    at_peers: int
    live: int
    at_with: int
    records: int
    used: int

    @classmethod
    def unpack(cls, raw: bytes) -> Layout:
        """Raises ValueError if it is not one that can be used."""
        if len(raw) != LAYOUT.size:
            raise ValueError("it ends too early")
        version, *fields = LAYOUT.unpack(raw)
        made = cls(*fields)
        wide = (made.at_id, made.at_collectives, made.at_peers)
        narrow = (made.at_state, made.at_nranks, made.at_rank)
        if version != VERSION:
            raise ValueError(f"version {version} is not known")
        if made.record_bytes not in _RECORD_BYTES or max([*wide, *(at - 4 for at in narrow)]) + 8 > made.record_bytes:
            raise ValueError("its records have no such layout")
        return made

    def memberships(self, raw: bytes) -> tuple[Membership, ...]:
        """Of the communicators of at least two ranks that exist."""
        found = []
        for start in range(0, len(raw) - self.record_bytes + 1, self.record_bytes):
            state, nranks, member = (
                struct.unpack_from("<i", raw, start + at)[0] for at in (self.at_state, self.at_nranks, self.at_rank)
            )
            if state != self.live or not 2 <= nranks <= _RANKS_MAX or not 0 <= member < nranks:
                continue
            comm, collectives, peers = (
                struct.unpack_from("<Q", raw, start + at)[0] for at in (self.at_id, self.at_collectives, self.at_peers)
            )
            found.append(Membership(comm, nranks, member, collectives, peers))
        return tuple(found[:COMMUNICATORS_MAX])


@dataclass(frozen=True)
class Counts:
    """The counts of one process, at an address that `find` has found."""

    process: Process
    user_id: int
    address: int  # of the layout
    layout: Layout

    def renewed(self) -> Counts:
        """With the communicators that were created since. Raises as `read` does, or ValueError."""
        return replace(self, layout=Layout.unpack(self._read(self.address, LAYOUT.size)))

    def read(self) -> tuple[Membership, ...]:
        """Raises OSError (ProcessLookupError if it has ended, PermissionError if it has other users now) or Timeout."""
        count = min(self.layout.used, _RECORDS_MAX)
        return self.layout.memberships(self._read(self.layout.records, count * self.layout.record_bytes))

    def operations(self) -> int:
        """All operations so far: collectives, sends and receives. Raises as `read` does."""
        total = 0
        for one in self.read():
            total += one.collectives
            size = self.layout.at_with + 16 * one.nranks
            if one.peers and size <= _PEERS_BYTES_MAX:
                raw = self._read(one.peers, size)[self.layout.at_with :]
                total += sum(struct.unpack(f"<{len(raw) // 8}Q", raw[: len(raw) // 8 * 8]))
        return total

    def _read(self, address: int, size: int) -> bytes:
        process = self.process
        return foreign_memory.read(process.pid, process.start_ticks, address, size, LIMIT_S, user_id=self.user_id)


def find(process: Process) -> Counts | None:
    """The counts of a process; None if it has none: it has created no communicator, or has no or an older library.

    Raises Timeout if its memory does not answer.
    """
    try:
        user_id = mailbox.user_of(process)
        address = mailbox.locate(process, user_id)
        if address is None:
            return None
        connection = mailbox.Connection(process, address, user_id)
        fields = connection.fields()
        # A forked child has its parent's counts, which do not change any more.
        if not fields.counts or fields.owner != connection.inner_pid():
            return None
        address += fields.counts
        layout = Layout.unpack(connection.read(address, LAYOUT.size))
    except Timeout:
        raise
    except (SnapshotError, OSError, ValueError):
        return None
    return Counts(process, user_id, address, layout)
