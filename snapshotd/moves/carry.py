"""Places and removes node-local files that move with a rank: those it has open or mapped below the carry paths (/tmp, …).

Invariants: a foreign file is never overwritten. A path is used only if it is free, has the same file already, or has a file
that a rank left there when it moved away (same inode, unchanged since). A move that is undone removes the files that it made,
and only those. All work below the carry paths is done by a child with the rank's own rights, through no link; a child of
root gives to another user or group what the rank has of theirs, in a directory that the first child opened.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Refused, SnapshotError, Where
from snapshotd.files import paths
from snapshotd.files.as_user import ROOT, User, UserFiles
from snapshotd.files.worker import PERMISSIONS, identity

log = logging.getLogger(__name__)

#: Path, device and inode of something that a move made.
Made = tuple[str, int, int]


class Carry:
    """The files carried to and from this node."""

    def __init__(self, state_dir: Path, carry_paths: Sequence[str]) -> None:
        self.ledger = state_dir / "carried.json"  # path -> its identity when the rank left
        # An administrator may have made a carry path a link. It is resolved here, once: no user can change it.
        self.roots = {path.rstrip("/"): os.path.realpath(path) for path in carry_paths}

    def may_replace(self, path: str) -> bool:
        """Whether the file at `path` is one that a rank left here, unchanged since."""
        return self._left(path) is not None

    def remember(self, files: Iterable[str]) -> None:
        """Records files that a rank left behind; they may be replaced when they come back."""
        ledger = {path: looks for path, looks in self._read().items() if _looks(path) == looks}
        ledger |= {path: looks for path in files if (looks := _looks(path)) is not None}
        self.ledger.with_suffix(".new").write_text(json.dumps(ledger))
        os.rename(self.ledger.with_suffix(".new"), self.ledger)

    def place(
        self, folder: Path, facts: Sequence[pb.FileFact], user: User, journal: Callable[[list[Made]], None]
    ) -> dict[str, int]:
        """Puts carried files where the rank expects them; journals those that are new, also if it fails. Blocking.

        If this daemon is killed before that, the children remove them. Directories come before their content. Returns the
        modes that differ from the facts: set-user-id, set-group-id and sticky bits are not carried. Raises Refused when a
        path is taken, or the rank's user may not make files there.
        """
        if not facts:
            return {}
        modes = {}
        for fact in facts:
            self._split(fact.path)  # all are checked before the first one is made
        made: list[Made] = []
        with _Placing(self, user) as placing:
            try:
                for index, fact in enumerate(facts):
                    mode = placing.place(folder / f"carry-{index}", fact, made)
                    if mode != fact.mode:
                        modes[fact.path] = mode
            finally:
                journal(made)
            placing.keep()
        return modes

    def take_away(self, made: Iterable[Made], user: User) -> None:
        """Undo of `place`: removes what is still the file that was made. Blocking."""
        made = list(made)
        if not made:
            return
        try:
            with _Placing(self, user) as placing:
                for path, device, inode in reversed(made):
                    try:
                        if placing.remove(path, device, inode) == "other":
                            log.warning("%s stays: it is not the file that the move made", path)
                    except (OSError, SnapshotError) as error:
                        log.warning("%s stays: %s", path, error)
        except SnapshotError as error:
            log.warning("%s and %d more stay: %s", made[0][0], len(made) - 1, error)

    def _split(self, path: str) -> tuple[str, str, str]:
        """Checks a path from the wire: absolute, plain, below a carry path. Returns that carry path, the directory below it,
        and the name."""
        if path.startswith("/") and os.path.normpath(path) == path and "\0" not in path:
            for root, real in self.roots.items():
                for prefix in (root, real):
                    if path.startswith(f"{prefix}/"):
                        below, name = os.path.split(path.removeprefix(f"{prefix}/"))
                        return real, below, name
        raise Damaged(f"{path!r} is not below this node's carry_paths", where=Where.SOURCE_FROZEN)

    def _left(self, path: str) -> list[int] | None:
        known = self._read().get(path)
        return known if known is not None and known == _looks(path) else None

    def _read(self) -> dict[str, list[int]]:
        try:
            ledger = json.loads(self.ledger.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return ledger if isinstance(ledger, dict) else {}


class _Placing:
    """The children that place the files of one move, and the directories that are open meanwhile."""

    def __init__(self, carry: Carry, user: User) -> None:
        self._carry, self._user = carry, user
        self._stack = contextlib.ExitStack()
        self._root_files: UserFiles | None = None
        self._folders: dict[str, tuple[int, bool]] = {}  # descriptor; whether the rank's user may make files in it

    def __enter__(self) -> _Placing:
        self._files = self._stack.enter_context(UserFiles(self._user))
        return self

    def __exit__(self, *_: object) -> None:
        for handle, _writable in self._folders.values():
            os.close(handle)
        self._stack.close()

    @property
    def _as_root(self) -> UserFiles:
        if self._root_files is None:
            self._root_files = self._stack.enter_context(UserFiles(ROOT))
        return self._root_files

    def keep(self) -> None:
        for files in (self._files, self._root_files):
            if files is not None:
                files.ask("keep")

    def place(self, image: Path, fact: pb.FileFact, made: list[Made]) -> int:
        """Returns the mode of what is there now."""
        try:
            if stat.S_ISDIR(fact.mode):
                return self._make_folder(fact, made)
            if stat.S_ISFIFO(fact.mode):
                folder, files = self._folder_for(fact)
                return _new(fact, files.ask("make_fifo", [folder], **_order(fact))[0], made)
            if stat.S_ISREG(fact.mode):
                return self._place_file(image, fact, made)
        except FileExistsError as error:
            raise _refused(fact.path, f"exists on this node already: {error.strerror}") from error
        except OSError as error:
            raise _refused(
                fact.path, f"cannot be made with the rights of user {self._user.user_id}: {error}"
            ) from error
        return fact.mode

    def _make_folder(self, fact: pb.FileFact, made: list[Made]) -> int:
        folder, files = self._folder_for(fact)
        owners = [0, fact.user_id, self._user.user_id]
        answer, given = files.ask("make_folder", [folder], owners=owners, **_order(fact))
        if given:  # it is this move's own: files of other users may be made in it whatever its mode
            self._folders[fact.path] = given[0], True
        return _new(fact, answer, made)

    def _place_file(self, image: Path, fact: pb.FileFact, made: list[Made]) -> int:
        folder, files = self._folder_for(fact)
        order = _order(fact) | {"left": self._carry._left(fact.path)}
        with _opened(image) as content:
            size = os.fstat(content).st_size
            answer, _ = self._files.ask("examine", [folder, content], size, **order)
            match answer.get("state"):
                case "taken":
                    raise _refused(fact.path, f"is taken on this node {answer.get('by')}")
                case "free":
                    order["left"] = None
            if answer.get("state") != "same":
                try:
                    answer, _ = files.ask("make_file", [folder, content], size, **order)
                except BaseException:
                    self._forget(folder, order["side"])
                    raise
                mode = _new(fact, answer, made)
                os.unlink(image)  # its memory is needed for the restore
                return mode
        return _new(fact, answer | {"there": True}, made)

    def _forget(self, folder: int, side: str) -> None:
        """Removes an unfinished file whose child was killed. Its name is random, and no other file's."""
        with contextlib.suppress(OSError, SnapshotError), UserFiles(ROOT) as files:
            files.ask("remove", [folder], name=side, made=None)

    def _folder_for(self, fact: pb.FileFact) -> tuple[int, UserFiles]:
        """The directory of a file, and the child that can give the file its owner and group."""
        folder, writable = self._open_folder(os.path.dirname(fact.path))
        if fact.user_id == self._user.user_id and fact.group_id in self._user.all_groups:
            return folder, self._files
        if not writable:
            raise PermissionError(f"user {self._user.user_id} may not make files in {os.path.dirname(fact.path)}")
        return folder, self._as_root

    def _open_folder(self, path: str) -> tuple[int, bool]:
        if path not in self._folders:
            root, below, _ = self._carry._split(f"{path}/name")
            answer, handle = self._files.ask_fd("folder", root=root, path=below)
            self._folders[path] = handle, answer.get("writable") is True
        return self._folders[path]

    def remove(self, path: str, device: int, inode: int) -> str:
        """Removes it with the rights of the rank's user, or with those of root if it belongs to another user."""
        root, below, name = self._carry._split(path)
        try:
            return _remove(self._files, root, below, name, [device, inode])
        except PermissionError:
            return _remove(self._as_root, root, below, name, [device, inode])


def _remove(files: UserFiles, root: str, below: str, name: str, made: list[int]) -> str:
    try:
        _, folder = files.ask_fd("folder", root=root, path=below)
    except (FileNotFoundError, NotADirectoryError):
        return "gone"
    try:
        answer, _ = files.ask("remove", [folder], name=name, made=made)
    finally:
        os.close(folder)
    return str(answer.get("state"))


def _order(fact: pb.FileFact) -> dict[str, Any]:
    return {
        "name": os.path.basename(fact.path),
        "side": f".carried-{secrets.token_hex(16)}",
        "mode": fact.mode & PERMISSIONS,
        "user_id": fact.user_id,
        "group_id": fact.group_id,
        "mtime_ns": fact.mtime_ns,
    }


def _new(fact: pb.FileFact, answer: dict[str, Any], made: list[Made]) -> int:
    """Notes what a child made; its mode."""
    device, inode = (int(number) for number in answer["made"])
    if not answer.get("there"):
        made.append((fact.path, device, inode))
    return int(answer["mode"])


def _refused(path: str, reason: str) -> Refused:
    return Refused(
        f"carried-files: {path} {reason}",
        remedy="remove what is in the way on the target, or let the job use another name",
        where=Where.SOURCE_FROZEN,
    )


@contextlib.contextmanager
def _opened(image: Path) -> Iterator[int]:
    handle = os.open(image, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _looks(path: str) -> list[int] | None:
    found = paths.look(path)
    return identity(found) if found is not None else None
