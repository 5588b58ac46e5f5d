"""Two nodes with one carry path each, and a move of closed files between them without daemons."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotd.files.as_user import User
from snapshotd.files.closed import Row
from snapshotd.moves import closed_files, closed_manifest
from snapshotd.moves.carry import Made
from snapshotd.moves.closed_files import ClosedFiles, Found, Scope
from snapshotd.moves.closed_manifest import Manifest, Placed

USER = User(1500, 1500, (1502,))
OTHER_ID = 1501


@dataclass
class Place:
    """A node with one carry path, which is like /tmp. Every node calls it by the same name."""

    closed: ClosedFiles
    local: Path
    images: Path

    def make(self, name: str, content: str = "content", mode: int = 0o640, owner: int = USER.user_id) -> Path:
        path = self.local / name
        for above in reversed(path.relative_to(self.local).parents):
            if not (self.local / above).exists():
                self.folder(str(above), owner=owner)
        path.write_text(content)
        path.chmod(mode)
        os.chown(path, owner, owner)
        return path

    def folder(self, name: str, mode: int = 0o755, owner: int = USER.user_id) -> Path:
        path = self.local / name
        path.mkdir()
        path.chmod(mode)
        os.chown(path, owner, owner)
        return path

    def find(self, since: float = 0.0, in_use: Sequence[str] = (), exclude: Sequence[Path] = ()) -> Found:
        return self.closed.find(USER, Scope(since), in_use, exclude)

    def receive(self, found: Found, made: Sequence[Made] = ()) -> Placed:
        """Places what another node has found; `made` was made for open files."""
        placed: list[Placed] = []
        self.closed.place(self.images, USER, placed.append, made)
        return placed[0]


def nodes_at(top: Path) -> tuple[Place, Place]:
    places = []
    for name in ("here", "there"):
        local, images, state = (top / name / part for part in ("local", "images", "state"))
        for path, mode in ((local, 0o1777), (images, 0o700), (state, 0o700)):
            path.mkdir(parents=True)
            path.chmod(mode)
        places.append(Place(ClosedFiles(state, {"/carry": str(local)}), local, images))
    return places[0], places[1]


def send(source: Place, target: Place, found: Found | None = None, made: Sequence[Made] = ()) -> tuple[Found, Placed]:
    """One move of everything that counts as the rank's, in one pack."""
    found = found or source.find()
    files = [row for row in found.rows if row.kind == "f"]
    bad = pack_into(source, found, files, target.images / "late")
    rows, offset = [], 0
    for row in found.rows:
        if row.kind == "f":
            if found.key(row) not in bad:
                rows.append(row._replace(pack=0, offset=offset))
            offset += row.size
        else:
            rows.append(row)
    write_manifest(target, Manifest(found.roots, ["late"], rows))
    return found, target.receive(found, made)


def pack_into(source: Place, found: Found, files: Sequence[Row], path: Path) -> set[closed_files.Key]:
    reading, writing = os.pipe()
    content: list[bytes] = []

    def read() -> None:
        with open(reading, "rb") as pipe:
            content.append(pipe.read())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        return source.closed.pack(found, files, USER, writing)[0]
    finally:
        os.close(writing)
        reader.join()
        path.write_bytes(content[0])


def write_manifest(target: Place, manifest: Manifest) -> None:
    content = {"roots": manifest.roots, "packs": manifest.packs, "rows": manifest.rows}
    (target.images / closed_manifest.FILE).write_text(json.dumps(content))


def names(found: Found) -> set[str]:
    return {row.path for row in found.rows}


def looks(top: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in top.rglob("*"):
        seen = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        times = None if path.is_symlink() else seen.st_mtime_ns
        found[str(path.relative_to(top))] = (seen.st_mode, seen.st_uid, seen.st_gid, times, content)
    return found
