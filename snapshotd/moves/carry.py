"""Places and removes node-local files that move with a rank: those it has open or mapped below the carry paths (/tmp, …).

Invariant: a foreign file is never overwritten. A path is used only if it is free, has the same content already, or has a file
that a rank left there when it moved away (same inode, unchanged since). A move that is undone removes its files again.
"""

from __future__ import annotations

import filecmp
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Refused, Where

log = logging.getLogger(__name__)


class Carry:
    """The files carried to and from this node."""

    def __init__(self, state_dir: Path, carry_paths: Sequence[str]) -> None:
        self.ledger = state_dir / "carried.json"  # path -> its identity when the rank left
        self.roots = [os.path.realpath(path) for path in carry_paths]

    def may_replace(self, path: str) -> bool:
        """Whether the file at `path` is one that a rank left here, unchanged since."""
        known = self._read().get(path)
        return known is not None and known == _looks(path)

    def remember(self, paths: Iterable[str]) -> None:
        """Records files that a rank left behind; they may be replaced when they come back."""
        ledger = {path: looks for path, looks in self._read().items() if _looks(path) == looks}
        ledger |= {path: looks for path in paths if (looks := _looks(path)) is not None}
        self.ledger.with_suffix(".new").write_text(json.dumps(ledger))
        os.rename(self.ledger.with_suffix(".new"), self.ledger)

    def place(self, folder: Path, facts: Sequence[pb.FileFact], placed: list[str]) -> None:
        """Puts carried files where the rank expects them; adds those that are new to `placed`. Blocking.

        Directories come before their content. Raises Refused when a path is taken.
        """
        for index, fact in enumerate(facts):
            path, mode = fact.path, fact.mode
            self._check(path)
            if stat.S_ISDIR(mode):
                if not os.path.isdir(path):
                    os.mkdir(path)
                    placed.append(path)
                    _dress(path, fact)
            elif stat.S_ISFIFO(mode):
                if not os.path.exists(path):
                    os.mkfifo(path)
                    placed.append(path)
                    _dress(path, fact)
            elif stat.S_ISREG(mode):
                self._place_file(folder / f"carry-{index}", path, fact, placed)

    def _place_file(self, image: Path, path: str, fact: pb.FileFact, placed: list[str]) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.lexists(path) and not self.may_replace(path):
            if os.path.isfile(path) and not os.path.islink(path) and filecmp.cmp(image, path, shallow=False):
                return
            raise Refused(
                f"carried-files: {path} exists on this node with other content than the rank's file",
                remedy="remove it, or let the job use another name",
                where=Where.SOURCE_FROZEN,
            )
        side = f"{path}.{os.getpid()}.carried"
        shutil.copyfile(image, side)
        _dress(side, fact)
        os.rename(side, path)
        placed.append(path)
        os.unlink(image)  # its memory is needed for the restore

    def take_away(self, placed: Iterable[str]) -> None:
        """Undo of `place`."""
        for path in reversed(list(placed)):
            try:
                os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
            except OSError as error:
                log.warning("%s stays: %s", path, error)

    def _check(self, path: str) -> None:
        """Checks a path from the wire before it is used: absolute, plain, below a carry path, through no link."""
        parent = os.path.realpath(os.path.dirname(path))
        below = any(parent == root or parent.startswith(f"{root}/") for root in self.roots)
        plain = path.startswith("/") and os.path.normpath(path) == path
        if not (below and plain):
            raise Damaged(f"{path!r} is not below this node's carry_paths", where=Where.SOURCE_FROZEN)

    def _read(self) -> dict[str, list[int]]:
        try:
            ledger = json.loads(self.ledger.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return ledger if isinstance(ledger, dict) else {}


def _looks(path: str) -> list[int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return [found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size]


def _dress(path: str, fact: pb.FileFact) -> None:
    os.chown(path, fact.user_id, fact.group_id)
    os.chmod(path, stat.S_IMODE(fact.mode))
    os.utime(path, ns=(fact.mtime_ns, fact.mtime_ns))
