"""The registry of the ranks on this node: their processes, users, cgroups and keepers.

Invariants: a rank is a (pid, start time) inside a cgroup that was created for it. After a restart, the registry in memory
is rebuilt from keepers that reconnect. What must be known even if a keeper has died meanwhile (its identity, the cgroup,
whether the rank is on another node) is in a small file for each rank under STATE_DIR/ranks, so that no rank outlives its
keeper unnoticed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, NotFound, Usage, Where
from snapshotd.keepers.link import KeeperLink
from snapshotd.moves.reserve import Reserve
from snapshotd.proc import cgroup, host, sizes
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.files import GONE
from snapshotd.proc.tree import Process
from snapshotd.transport.image.sync import sync_folder

log = logging.getLogger(__name__)

RANK_UID = re.compile(r"[A-Za-z0-9_.-]{1,80}")
JOB_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")


def check_rank_uid(uid: str) -> str:
    """Validates a rank's uid from the wire, before it becomes part of a path."""
    if not RANK_UID.fullmatch(uid) or uid.startswith("."):
        raise Usage(f"{uid[:40]!r} is not a valid rank uid")
    return uid


@dataclass
class RankEntry:
    """A rank that this node knows: its process, or only its home keeper, is on this node."""

    uid: str
    job: str
    rank: int
    role: str  # "home": its keeper was started by the launcher; "guest": it was restored here
    keeper_pid: int
    keeper_start_ticks: int
    cgroup: str
    home_node: str
    home_endpoint: str
    relay_key: str  # its keeper's: the daemon recognises the keeper by it
    boot_id: str
    user_id: int  # of its home keeper, as the kernel reports it
    process_user_id: int = -1  # guest: with which user its process and its guest keeper run; -1: not known
    command: str = ""
    started_unix_s: float = 0.0
    moves: int = 0
    restored_by: str = ""  # guest: the move that brought it here; empty: an older version restored it
    incarnation: str = ""  # of its job: the record of the resumption that began it; empty: as its launcher started it
    coordinator_node: str = ""  # which may end this incarnation; empty: none
    coordinator_endpoint: str = ""
    tethered: bool = False  # its job has snapshots: it must end if it is cut off from the coordinator (jobs/tether.py)
    away_node: str = ""  # home only: the node that the rank is on now, if not this one
    ended_by: str = ""  # home only: the record by which a copy was ended last; the next one presents a key made from it
    home_boot_id: str = ""  # guest: of its home node when its launcher started it; empty: an older version restored it
    holder_key: str = ""  # home: the key of the node that has the rank (relay_keys.py); empty: `relay_key`
    own_key: str = ""  # guest: this node's key for the relay; empty: an older version restored it
    former_keys: list[str] = field(default_factory=list)  # guest: of earlier nodes; the home node may still expect one
    former: list[list[str]] = field(default_factory=list)  # [old address, current address] of its listeners
    nodes: list[list[Any]] = field(
        default_factory=list
    )  # [name, endpoint, addresses] of the nodes that forward the old addresses
    pid: int = 0
    start_ticks: int = 0
    link: KeeperLink | None = field(default=None, compare=False)
    moving: str = field(default="", compare=False)
    failed: int | None = field(default=None, compare=False)  # its wait status, which its keeper holds back
    cut_off: str = field(default="", compare=False)  # why this node has ended it by itself: its job may run elsewhere

    @property
    def keeper(self) -> Process:
        return Process(self.keeper_pid, self.keeper_start_ticks)

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)

    @property
    def group(self) -> Cgroup:
        return Cgroup(Path(self.cgroup))

    def keeper_alive(self) -> bool:
        return self.boot_id == host.boot_id() and self.keeper.alive()

    def memory_bytes(self) -> int:
        total = 0
        for pid in self.group.pids():
            try:
                total += sizes.resident_bytes(pid)
            except GONE:
                continue
        return total

    def to_proto(self, node: str, *, brief: bool = False) -> pb.Rank:
        here = not self.away_node
        return pb.Rank(
            uid=self.uid,
            job=self.job,
            rank=self.rank,
            place=pb.Rank.HERE if here else pb.Rank.AWAY,
            at_node=self.away_node or node,
            home_node=self.home_node,
            home_endpoint=self.home_endpoint,
            home_boot_id=self.boot_id if self.role == "home" else self.home_boot_id,
            process=pb.ProcessId(pid=self.pid, start_ticks=self.start_ticks) if here else None,
            keeper=pb.ProcessId(pid=self.keeper_pid, start_ticks=self.keeper_start_ticks),
            user_id=self.user_id,
            command=self.command,
            started_unix_s=self.started_unix_s,
            moves=self.moves,
            moving=self.moving,
            incarnation=self.incarnation,
            failed=self.failed if here else None,
            memory_bytes=self.memory_bytes() if here and not brief else 0,
        )


_STORED = tuple(item.name for item in fields(RankEntry) if item.name not in {"link", "moving", "failed", "cut_off"})


class Ranks:
    """The registry. A rank that has returned to its home node has two entries: one for each of its keepers."""

    def __init__(self, state_dir: Path, reserve: Reserve | None = None) -> None:
        self._reserve = reserve
        self._storing = threading.Lock()  # several threads store the same entry
        self.folder = state_dir / "ranks"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._entries: dict[tuple[str, str], RankEntry] = {}
        for path in sorted(self.folder.glob("*.json")):
            stored = json.loads(path.read_text())
            entry = RankEntry(**{key: value for key, value in stored.items() if key in _STORED})
            if entry.boot_id == host.boot_id() or entry.role == "guest":
                self._entries[entry.uid, entry.role] = (
                    entry  # a guest of an earlier boot has ended: its home node must be informed
                )
            elif not entry.away_node:
                path.unlink()  # the node was rebooted: keeper, rank and launcher have ended

    def all(self) -> list[RankEntry]:
        return sorted(self._entries.values(), key=lambda entry: (entry.job, entry.user_id, entry.rank, entry.role))

    def put(self, entry: RankEntry) -> None:
        """Adds or updates an entry, in memory and on disk."""
        self._entries[entry.uid, entry.role] = entry
        self._store(entry)

    def update(self, entry: RankEntry) -> None:
        """Updates an entry, unless it was removed meanwhile: a rank can end at any time."""
        if self._entries.get((entry.uid, entry.role)) is entry:
            self._store(entry)
        if (entry.uid, entry.role) not in self._entries:  # removed while it was written
            (self.folder / f"{entry.uid}.{entry.role}.json").unlink(missing_ok=True)

    def _store(self, entry: RankEntry) -> None:
        path = self.folder / f"{entry.uid}.{entry.role}.json"
        fresh = path.with_suffix(".new")
        with self._storing:
            text = json.dumps({name: getattr(entry, name) for name in _STORED})
            self._write(lambda: fresh.write_text(text))
            os.rename(fresh, path)

    def _write(self, write: Callable[[], object]) -> None:
        """Writes with the journal's reserve if the disk is full: a rank that is not recorded could outlive its keeper."""
        if self._reserve is None:
            write()
        else:
            self._reserve.within(write)

    def remove(self, entry: RankEntry) -> None:
        if self._entries.get((entry.uid, entry.role)) is entry:
            del self._entries[entry.uid, entry.role]
            (self.folder / f"{entry.uid}.{entry.role}.json").unlink(missing_ok=True)
        entry.group.remove()

    def here(self, uid: str) -> RankEntry:
        """The entry whose process is on this node. Raises NotFound."""
        check_rank_uid(uid)
        for role in ("guest", "home"):
            entry = self._entries.get((uid, role))
            if entry is not None and not entry.away_node:
                return entry
        raise NotFound(f"rank {uid} is not on this node")

    def get(self, uid: str, role: str) -> RankEntry | None:
        return self._entries.get((check_rank_uid(uid), role))

    def end(self, uid: str, incarnation: str, coordinator: str) -> None:
        """Records permanently that an incarnation of a rank is over, in the word of this coordinator. Blocking."""
        path = self.folder / f"{check_rank_uid(uid)}.ended"
        with self._storing:
            ended = _ended_in(path)
            if [incarnation, coordinator] not in ended:
                fresh = path.with_suffix(".ended-new")
                self._write(lambda: _write_synced(fresh, json.dumps([*ended, [incarnation, coordinator]])))
                os.rename(fresh, path)
                sync_folder(self.folder)

    def has_ended(self, entry: RankEntry) -> bool:
        """Whether the incarnation to which this copy belongs is over. Blocking, briefly. Raises Damaged if that is not known:
        the copy must then neither be woken nor ended."""
        if not entry.coordinator_node:
            return False
        path = self.folder / f"{entry.uid}.ended"
        return [entry.incarnation, entry.coordinator_node] in _ended_in(path)

    def bury(self, entry: RankEntry) -> None:
        """Records permanently that the home keeper of a rank on another node has died; that node asks and ends the rank."""
        self._write((self.folder / f"{entry.uid}.gone").touch)
        self.remove(entry)

    def is_buried(self, uid: str) -> bool:
        """Whether the rank's home keeper is known to have died.

        A reboot of the home node does not count: moves exist to leave failing nodes, so the rank then runs without it.
        """
        return (self.folder / f"{check_rank_uid(uid)}.gone").exists()


def _ended_in(path: Path) -> list[list[str]]:
    try:
        found: list[list[str]] = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise Damaged(
            f"{path}, which says which copies of a rank may not run here, cannot be read: {error}",
            remedy=f"if `migrator ps` shows no copy of the rank on this node, delete {path}",
            where=Where.UNKNOWN,
        ) from error
    return found


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def new_uid(job: str, rank: int) -> str:
    if not JOB_NAME.fullmatch(job) or job.startswith("."):
        raise Usage(f"{job[:60]!r} is not a valid job name", remedy="use at most 60 letters, digits, '_', '.' and '-'")
    return f"{job}-{rank}-{secrets.token_hex(4)}"


def cgroup_for_home(keeper_pid: int, uid: str) -> Cgroup:
    """Below the launcher's own cgroup, so that its limits (of a scheduler or a container) still apply."""
    return Cgroup(cgroup.of_process(keeper_pid) / f"snapshotd-{uid}").create()


def cgroup_for_guest(uid: str, move: str) -> Cgroup:
    return Cgroup(cgroup.for_guests() / f"{uid}-{move}").create()
