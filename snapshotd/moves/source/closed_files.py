"""Sends the files that a rank made and has closed: most of them while the rank runs, the rest after the freeze. To the
target of a move, or into the store of a snapshot.

`snapshotd/moves/closed_files.py` says which files these are. Their content goes into *packs*, image files in which one
content follows the other. The manifest, which is sent last, says what there is at the moment of the freeze, and where its
content is.

Invariant: the manifest names content only of files that looked the same before it was read and after the freeze. A pack that
was sent ahead of a restart of this daemon is named by no manifest, and the target drops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed, SnapshotError, Timeout, Where
from snapshotd.files.as_user import User, spares, user_of_rank
from snapshotd.files.closed import Row
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import closed_manifest
from snapshotd.moves.closed_files import FRESH_S, Ahead, Found, Key, Scope
from snapshotd.moves.closed_manifest import Manifest
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.rules import Mark
from snapshotd.moves.source.sink import sink_of
from snapshotd.proc import host, maps, users
from snapshotd.proc.files import GONE
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.spans import span
from snapshotd.transport.image.receiving import AHEAD
from snapshotd.transport.image.sender import Sender

log = logging.getLogger(__name__)

LATE = "late"
#: Less than the step may take.
AHEAD_S = 240.0


def scope_of(node: Node, entry: RankEntry) -> Scope:
    """Which files count as the rank's here. Blocking, and slow if its user has many processes.

    Moves that brought the rank to this node count by this node's clock: other nodes' clocks may differ."""
    if not node.config.carry_closed_bytes:
        return Scope(entry.started_unix_s, [], set())
    user = user_of_rank(entry.pid, entry.user_id)
    since_unix_s, brought = entry.started_unix_s, set[str]()
    for move_log in node.journal.all():
        if (move_log.begin.role, move_log.begin.rank_uid) == ("target", entry.uid):
            since_unix_s = min(since_unix_s, move_log.begin.begun_unix_s)
            brought.update(closed_manifest.load_placed(move_log.folder).tops)
    with span("find files of other processes"):
        elsewhere = node.carry.closed.held_elsewhere(user, entry.group.pids())
    return Scope(since_unix_s, sorted(brought), elsewhere)


def look(node: Node, entry: RankEntry, facts: pb.RankFacts, scope: Scope) -> tuple[Found, pb.Check]:
    """What would be sent now, and the check of it. Nothing is looked at if carrying is switched off. Blocking."""
    limit_bytes = node.config.carry_closed_bytes
    if not limit_bytes:
        return Found([], [], complete=True), preflight.closed_files(0, 0, 0, 0, complete=True)
    user = user_of_rank(entry.pid, entry.user_id)
    used = [fact.path for fact in facts.files if fact.carried]
    kept = _find(node, user, scope, [*used, *facts.directories]).without(used).within(limit_bytes)
    check = preflight.closed_files(
        len(kept.rows), kept.all_bytes, kept.older_left, limit_bytes, complete=kept.complete, crowd=kept.crowd
    )
    return kept, check


def _find(node: Node, user: User, scope: Scope, used: Sequence[str], where: Where = Where.SOURCE_RUNNING) -> Found:
    config = node.config
    own = [config.state_dir, config.run_dir, config.image_dir, config.spool_dir]
    own += [Path(config.snapshot_spill_dir)] if config.snapshot_spill_dir else []
    return node.carry.closed.find(user, scope, used, own, where)


def _mapped(entry: RankEntry) -> set[str]:
    """Paths that the rank has mapped now: it may change them without a trace in their times. Blocking."""
    found: set[str] = set()
    for pid in entry.group.pids():
        with contextlib.suppress(*GONE, OSError):
            found.update(mapping.path for mapping in maps.read(pid, ("/",)) if not mapping.path.endswith(maps.DELETED))
    return found


async def send_ahead(node: Node, moving: Moving, entry: RankEntry) -> Ahead:
    """Sends what is there now, or puts it into the store of a job that is suspended or snapshotted. If it fails the rank
    keeps running, and the driver aborts."""
    if not node.config.carry_closed_bytes:
        return Ahead()
    await in_thread(spares.fill, 2)  # for what is left to do in the pause
    began_unix_s = time.time()
    user = await in_thread(user_of_rank, entry.pid, entry.user_id)
    scope = moving.scope if moving.scope is not None else await in_thread(scope_of, node, entry)
    mapped = await in_thread(_mapped, entry)
    found, _ = await in_thread(look, node, entry, moving.facts, scope)
    found = found.without(mapped)
    fresh_ns = int((began_unix_s - FRESH_S) * 1e9)
    rows = [row for row in found.rows if row.kind == "f" and row.seen[4] < fresh_ns]
    ahead = Ahead(scope=scope)
    if not rows:
        return ahead
    began_s = host.boottime_s()
    name = AHEAD + secrets.token_hex(8)
    try:
        async with (
            asyncio.timeout(AHEAD_S),
            sink_of(node, moving.log, moving.facts).streams() as streams,
            Sender(streams, node.config.chunk_bytes) as sender,
        ):
            bad, ahead.digests = await _send(node, sender, name, found, rows, user)
            (ahead.pack,) = await sender.finish()
    except SnapshotError as error:
        error.where = Where.SOURCE_RUNNING
        raise
    except TimeoutError as error:
        place = (
            "the memory or disk of the snapshots" if moving.log.begin.coordinator else "the connection to the target"
        )
        raise Timeout(
            f"{sum(row.size for row in rows) >> 20} MiB of closed files were not stored within {AHEAD_S:.0f} s",
            remedy=f"check {place}, or set a smaller carry_closed_bytes on the source",
            where=Where.SOURCE_RUNNING,
        ) from error
    offset = 0
    for row in rows:
        if found.key(row) not in bad:
            ahead.content[found.key(row)] = (row.seen, offset)
        offset += row.size
    log.info("sent %d closed files ahead, %d bytes, in %.1f s", len(rows), offset, host.boottime_s() - began_s)
    return ahead


async def send_rest(
    node: Node,
    move_log: MoveLog,
    entry: RankEntry,
    sender: Sender,
    ahead: Ahead | None,
    carried: Sequence[pb.FileFact],
    user: User,
) -> list[pb.ImageFile]:
    """Sends what has changed since, and the manifest. Returns what the target has beside the files of this sender.

    The rank is frozen. What other jobs of its user change meanwhile may be missing."""
    limit_bytes = node.config.carry_closed_bytes
    if not limit_bytes:
        return _beside(ahead)
    used = [fact.path for fact in carried]
    scope = ahead.scope if ahead is not None else None
    if scope is None:
        scope = await in_thread(scope_of, node, entry)
    found = await in_thread(_find, node, user, scope, used, Where.SOURCE_FROZEN)
    found = found.without(used).within(limit_bytes)
    if found.changed_bytes > limit_bytes or not found.complete:
        raise Changed(
            f"closed-files: {found.changed_bytes >> 20} MiB in {len(found.rows)} files since the check",
            remedy="retry: preflight will then say what exceeds the limit",
            where=Where.SOURCE_FROZEN,
        )
    sent = ahead.content if ahead is not None else {}
    there = {found.key(row): row for row in found.rows if sent.get(found.key(row), ([], 0))[0] == row.seen}
    if ahead is not None and ahead.digests:
        same = await in_thread(node.carry.closed.unchanged, found, list(there.values()), user, ahead.digests)
        there = {key: row for key, row in there.items() if key in same or key not in ahead.digests}
    rest = [row for row in found.rows if row.kind == "f" and found.key(row) not in there]
    bad: set[Key] = set()
    if rest:
        bad, _ = await _send(node, sender, LATE, found, rest, user)
    packs = ([ahead.pack.name] if ahead is not None and ahead.pack is not None else []) + ([LATE] if rest else [])
    rows = _located(found, {found.key(row) for row in rest}, bad, sent, packs)
    if bad:
        names = sorted(f"{root}/{path}" for root, path in bad)
        log.warning("%d closed files cannot be read, and stay here: %s", len(bad), "; ".join(names[:5]))
    manifest = json.dumps(msgspec.to_builtins(Manifest(found.roots, packs, rows))).encode()
    await _send_bytes(sender, closed_manifest.FILE, manifest)
    left = [(*found.key(row), row.seen) for row in rows]
    try:
        await in_thread(closed_manifest.save, move_log.folder / closed_manifest.FILE, left)
    except OSError as error:  # no undo needs it: at worst these files stay here for good
        log.warning("the closed files of the rank are not recorded: %s", error)
    return _beside(ahead)


def _located(
    found: Found, rest: set[Key], bad: set[Key], sent: dict[Key, tuple[list[int], int]], packs: list[str]
) -> list[Row]:
    """The rows with the places of their content."""
    rows, offset = [], 0
    for row in found.rows:
        key = found.key(row)
        if row.kind != "f":
            rows.append(row)
        elif key in rest:
            if key not in bad:
                rows.append(row._replace(pack=packs.index(LATE), offset=offset))
            offset += row.size
        else:
            rows.append(row._replace(pack=0, offset=sent[key][1]))
    return rows


def _beside(ahead: Ahead | None) -> list[pb.ImageFile]:
    return [ahead.pack] if ahead is not None and ahead.pack is not None else []


async def _send(
    node: Node, sender: Sender, name: str, found: Found, rows: Sequence[Row], user: User
) -> tuple[set[Key], dict[Key, str]]:
    """Sends the content of these files as one image file. Returns those that could not be read, and digests."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    packing: asyncio.Task[tuple[set[Key], dict[Key, str]]] | None = None
    try:
        os.set_blocking(reading, False)
        packing = asyncio.create_task(in_thread(_pack_and_close, node, found, rows, user, writing))
        await sender.put_fd(name, reading)
        return await packing
    finally:
        os.close(reading)  # a child that is still writing fails
        if packing is not None:
            await asyncio.gather(packing, return_exceptions=True)


def _pack_and_close(
    node: Node, found: Found, rows: Sequence[Row], user: User, writing: int
) -> tuple[set[Key], dict[Key, str]]:
    try:
        return node.carry.closed.pack(found, rows, user, writing)
    finally:
        os.close(writing)


async def _send_bytes(sender: Sender, name: str, content: bytes) -> None:
    handle = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        written = 0
        while written < len(content):  # into memory: it does not block
            written += os.pwrite(handle, content[written:], written)
        await sender.put_open_file(name, handle)
    finally:
        os.close(handle)


def leave(node: Node, move_log: MoveLog) -> None:
    """COMMIT stands, and the copy here is gone: removes what is the rank's alone, remembers the rest. Blocking.

    A file is the rank's alone if a move made it, or a directory around it, here for this rank, and the rank's user has no
    process here any more. Root always has."""
    rows = closed_manifest.load_left(move_log.folder)
    if move_log.record.rank_user is None:
        return
    user = User(*move_log.record.rank_user)
    made = _made_here(node, move_log.begin.rank_uid) if rows and user.user_id else set()
    here = {(root, path): tuple(seen[:2]) for root, path, seen in rows}

    def own(key: Key, seen: list[int]) -> bool:
        root, path = key
        while path:
            if (file := here.get((root, path))) is not None and ((root, path), *file) in made:
                return True
            path = os.path.dirname(path)
        return False

    if not any(own((root, path), seen) for root, path, seen in rows) or not _has_gone(user.user_id):
        made.clear()
    node.carry.closed.leave(rows, user, own, move_log.record.carried)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(move_log.folder / closed_manifest.FILE)


def _made_here(node: Node, rank_uid: str) -> set[tuple[Any, ...]]:
    """What moves made here for this rank: path, device, inode."""
    made: set[tuple[Any, ...]] = set()
    for move_log in node.journal.all():
        begin = move_log.begin
        if (begin.role, begin.rank_uid, move_log.last_mark) == ("target", rank_uid, Mark.ACTIVATED):
            placed = closed_manifest.load_placed(move_log.folder)
            made.update(((placed.roots[root], path), *file[:2]) for root, path, *file in placed.made)
    return made


def _has_gone(user_id: int) -> bool:
    """Whether the user has no process here. The rank's own keeper may need a moment to end."""
    for _ in range(20):
        if not users.has_processes(user_id):
            return True
        time.sleep(0.05)
    return False
