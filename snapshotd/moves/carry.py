"""Places and removes node-local files that move with a rank: those it has open or mapped below the carry paths (/tmp, …).
Those that it has closed are the subject of snapshotd/moves/closed_files.py.

Invariants: a foreign file is never overwritten. A path is used only if it is free, has the same file already, or has a file
that a rank left there when it moved away (same inode, unchanged since). A move that is undone removes the files that it made,
and only those. All work below the carry paths, looking included, is done by a child with the rank's own rights, through no
link. What another user owns, or a group that the rank's user is not in, is not made: it must be there already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Refused, SnapshotError, Where
from snapshotd.files.as_user import User, UserFiles
from snapshotd.files.closed import PERMISSIONS
from snapshotd.files.user_look import Seen, UserLook
from snapshotd.moves.closed_files import ClosedFiles

log = logging.getLogger(__name__)

#: Path, device and inode of something that a move made.
Made = tuple[str, int, int]
#: Files that ranks left behind, in the ledger; the oldest are forgotten first.
_MOST_LEFT = 20_000


class Carry:
    """The files carried to and from this node."""

    def __init__(self, state_dir: Path, carry_paths: Sequence[str]) -> None:
        # path -> its identity when the rank left: device, inode, time, size; then the rank's user, except in older ones
        self.ledger = state_dir / "carried.json"
        # An administrator may have made a carry path a link. It is resolved here, once: no user can change it.
        self.roots = {path.rstrip("/"): os.path.realpath(path) for path in carry_paths}
        self.closed = ClosedFiles(state_dir, self.roots, self._read)

    def may_replace(self, path: str, seen: Seen) -> bool:
        """Whether the file at `path`, as it looks now, is one that a rank left here, unchanged since."""
        return self._left(path) == _looks(seen)

    def remember(self, files: Iterable[str], user: User) -> None:
        """Records files that a rank left behind; they may be replaced when they come back. Blocking.

        A child with the rank's rights looks at them, and at others of that user, which are forgotten if they have changed."""
        ledger = self._read()
        mine = [path for path, looks in ledger.items() if looks[4:] == [user.user_id]]
        try:
            with UserLook(user) as look:
                for path in mine:
                    if _look(look, path) != self._left(path, ledger):
                        del ledger[path]
                for path in files:
                    ledger.pop(path, None)  # the newest are last
                    if (looks := _look(look, path)) is not None:
                        ledger[path] = [*looks, user.user_id]
        except SnapshotError as error:
            log.warning("what the rank of user %d left here is not known in full: %s", user.user_id, error)
        newest = dict(list(ledger.items())[-_MOST_LEFT:])
        self.ledger.with_suffix(".new").write_text(json.dumps(newest))
        os.rename(self.ledger.with_suffix(".new"), self.ledger)

    def place(
        self,
        folder: Path,
        facts: Sequence[pb.FileFact],
        user: User,
        journal: Callable[[list[Made]], None],
        left: Container[str] = (),
    ) -> dict[str, int]:
        """Puts carried files where the rank expects them; journals those that are new, also if it fails. Blocking. `left`:
        paths of files that stay as they are.

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
                    if fact.path in left:
                        continue
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

    def _left(self, path: str, ledger: dict[str, list[int]] | None = None) -> list[int] | None:
        """How a file looked that a rank left here."""
        known = (self._read() if ledger is None else ledger).get(path)
        if known is None and ledger is None:
            known = self.closed.left(path)
        return known[:4] if known is not None else None

    def _read(self) -> dict[str, list[int]]:
        try:
            ledger = json.loads(self.ledger.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        if not isinstance(ledger, dict):
            return {}
        return {path: looks for path, looks in ledger.items() if isinstance(looks, list) and len(looks) in (4, 5)}


class _Placing:
    """The child that places the files of one move, and the directories that are open meanwhile."""

    def __init__(self, carry: Carry, user: User) -> None:
        self._carry, self._user = carry, user
        self._roots = sorted(carry.roots.values())
        self._stack = contextlib.ExitStack()
        self._folders: dict[str, int] = {}  # descriptors

    def __enter__(self) -> _Placing:
        self._files = self._stack.enter_context(UserFiles(self._user, write=self._roots))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._folders.values():
            os.close(handle)
        self._stack.close()

    def keep(self) -> None:
        self._files.ask("keep")

    def place(self, image: Path, fact: pb.FileFact, made: list[Made]) -> int:
        """Returns the mode of what is there now."""
        try:
            if stat.S_ISDIR(fact.mode):
                return self._make_folder(fact, made)
            if stat.S_ISFIFO(fact.mode):
                return _new(fact, self._files.ask("make_fifo", [self._folder_for(fact)], **self._order(fact))[0], made)
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
        owners = [0, fact.user_id, self._user.user_id]
        answer, given = self._files.ask("make_folder", [self._folder_for(fact)], owners=owners, **self._order(fact))
        if given:  # what it was made as, whatever has its name by now
            self._folders[fact.path] = given[0]
        return _new(fact, answer, made)

    def _place_file(self, image: Path, fact: pb.FileFact, made: list[Made]) -> int:
        folder = self._folder_for(fact)
        order = self._order(fact) | {"left": self._carry._left(fact.path)}
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
                    answer, _ = self._files.ask("make_file", [folder, content], size, **order)
                except BaseException:
                    self._forget(folder, order["side"])
                    raise
                mode = _new(fact, answer, made)
                os.unlink(image)  # its memory is needed for the restore
                return mode
        return _new(fact, answer | {"there": True}, made)

    def _forget(self, folder: int, side: str) -> None:
        """Removes an unfinished file whose child was killed. Its name is random, and no other file's."""
        with contextlib.suppress(OSError, SnapshotError), UserFiles(self._user, write=self._roots) as files:
            files.ask("remove", [folder], name=side, made=None)

    def _folder_for(self, fact: pb.FileFact) -> int:
        """The directory of a file."""
        path = os.path.dirname(fact.path)
        if path not in self._folders:
            root, below, _ = self._carry._split(fact.path)
            _, self._folders[path] = self._files.ask_fd("folder", root=root, path=below)
        return self._folders[path]

    def remove(self, path: str, device: int, inode: int) -> str:
        root, below, name = self._carry._split(path)
        return _remove(self._files, root, below, name, [device, inode])

    def _order(self, fact: pb.FileFact) -> dict[str, Any]:
        return {
            "name": os.path.basename(fact.path),
            "side": f".carried-{secrets.token_hex(16)}",
            "mode": fact.mode & PERMISSIONS,
            "user_id": fact.user_id,
            "group_id": fact.group_id,
            "mtime_ns": fact.mtime_ns,
            "foreign": self._user.could_not_own(fact.user_id, fact.group_id),
        }


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


def _looks(seen: Seen) -> list[int]:
    return [seen.device, seen.inode, seen.mtime_ns, seen.size]


def _look(look: UserLook, path: str) -> list[int] | None:
    """None if there is nothing that the user can see."""
    try:
        seen = look.stat_without_links(path)
    except OSError:
        return None
    return _looks(seen) if seen is not None else None
