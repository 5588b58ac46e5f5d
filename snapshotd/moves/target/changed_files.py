"""After a rollback: files that the rank had open for writing at the snapshot become as they were then. Blocking.

Only what the rank's user could change is changed, by a child with that user's rights. The processes that have written since
have all ended before a rank is restored. A file that has grown is cut back. One that was deleted, renamed, replaced or
shortened is dealt with as the user has chosen (`Policy`). What cannot be done well is refused, and the job stays rolled back
and suspended. Everything can be repeated. What was changed before the file's end at the snapshot stays changed in a file that
is otherwise the same: there may be no copy of it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from snapshotd.api.errors import Refused, SnapshotError, Where
from snapshotd.files import cut_back, paths
from snapshotd.files.as_user import User, UserFiles, file_user
from snapshotd.files.closed import PERMISSIONS
from snapshotd.files.put_back import NAME_CHARACTERS, identity
from snapshotd.moves import kept_files
from snapshotd.moves.changed_file import Action, Change, ChangedFile, Policy
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.kept_files import PutBack
from snapshotd.moves.node import Node
from snapshotd.moves.record import MoveRecord
from snapshotd.moves.rules import Mark
from snapshotd.moves.tree_facts import File, TreeFacts
from snapshotd.preflight.objects import is_carried
from snapshotd.proc.maps import DELETED

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """What there is of the files as they were."""

    folder: Path  # of the image
    carried: Mapping[str, str] = field(default_factory=dict)  # path -> name in the image
    descriptors: Mapping[int, int] = field(default_factory=dict)  # by index: O_PATH, kept since the snapshot
    put_back: PutBack = field(default_factory=PutBack)  # by ranks of this node

    def in_image(self, index: int, file: File) -> int | None:
        """A descriptor for reading of the copy of a file; None: there is none."""
        name = self.carried.get(file.link) or kept_files.name_in_image(index)
        try:
            return os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def kept(self, index: int, file: File, user: User) -> int | None:
        """The same of the file that was kept, if the user may read it. Raises OSError."""
        if (handle := self._handle(index, file)) is None:
            return None
        with UserFiles(user, Where.SUSPENDED) as files:
            return files.reopen(handle)

    def now(self, index: int, file: File) -> str:
        """The path of a file that was renamed; empty: it has none, was not kept, or a rollback before has set it aside."""
        if (handle := self._handle(index, file)) is None or not os.fstat(handle).st_nlink:
            return ""
        path = os.readlink(f"/proc/self/fd/{handle}")
        is_ours = path.startswith(f"{file.link}.rolled-back-")
        return "" if is_ours or path == file.link or path.endswith(DELETED) else path

    def _handle(self, index: int, file: File) -> int | None:
        handle = self.descriptors.get(index)
        return handle if handle is not None and os.fstat(handle).st_ino == file.inode else None


@dataclass
class Settled:
    """What was done."""

    changed: list[ChangedFile] = field(default_factory=list)
    #: Of files that stay as they are: criu must not miss the size that they had.
    sizes: dict[str, int] = field(default_factory=dict)
    #: Carried files that stay as they are, and are not put into place.
    left: set[str] = field(default_factory=set)
    #: The files that the rank finds as they are now, and their identity: no other rank may change them.
    files: dict[str, list[int]] = field(default_factory=dict)


def put_back(node: Node, move_log: MoveLog, folder: Path, image: ImageDescription, described: TreeFacts) -> Settled:
    """Does it for a rank that is restored from the image in `folder`, and journals what was done. Raises as `settle`."""
    record = move_log.record
    carried = {fact.path: f"carry-{index}" for index, fact in enumerate(image.carried) if stat.S_ISREG(fact.mode)}
    descriptors = _descriptors(node, move_log, image.kept)
    node.kept_files.put_back.recall(_suffix(record), _of_held_ranks(node, record))
    try:
        done = settle(
            described,
            file_user(image.identity, image.user_id),
            _suffix(record),
            move_log.begin.rank,
            Policy(record.file_policy or Policy.RESTORE),
            Data(folder, carried, descriptors, node.kept_files.put_back),
            node.config.carry_paths,
            same_node=record.from_node == node.config.node,
        )
    finally:
        for handle in descriptors.values():
            os.close(handle)
    if done.changed or done.files:  # before anything of the rank is restored, which has them open then
        move_log.mark(Mark.RESTORING, changed_files=done.changed, settled_files=list(done.files.items()))
    return done


def _suffix(record: MoveRecord) -> str:
    """Of the names of what is kept beside the files. All attempts of a rollback, and all its ranks, have the same."""
    return f"rolled-back-{record.ended_before.split()[-1]}"


def _of_held_ranks(node: Node, record: MoveRecord) -> dict[str, list[int]]:
    """The files that ranks of this rollback have open here, in copies that are restored already."""
    found: dict[str, list[int]] = {}
    for move_log in node.journal.all():
        other = move_log.known
        if (
            isinstance(other, MoveRecord)
            and move_log.last_mark is Mark.HELD
            and other.ended_before == record.ended_before
        ):
            found.update(other.settled_files)
    return found


def _descriptors(node: Node, move_log: MoveLog, kept: str) -> dict[int, int]:
    """What this node keeps for the snapshot; none if another node has made it. The description names the move, and comes from
    another node, so it must be one of this rank."""
    source = node.journal.find(check_move_id(kept)) if kept else None
    if source is None or (source.begin.rank_uid, source.begin.role) != (move_log.begin.rank_uid, "source"):
        return {}
    try:
        return node.kept_files.descriptors(kept)
    except SnapshotError as error:
        log.warning("%s", error.message)
        return {}


def settle(
    described: TreeFacts,
    user: User,
    suffix: str,
    rank: int,
    policy: Policy,
    data: Data,
    carry_paths: Sequence[str] = (),
    *,
    same_node: bool,
) -> Settled:
    """Raises Refused if a file cannot be put back. What is at the name of FILE, or is cut off, is kept as FILE.SUFFIX.
    Files below `carry_paths` are in the image, and are put into place later if they are missing; only those that the rank had
    on this node are looked at."""
    settling = _Settling(user, suffix, str(rank), policy, data, kept_files.mapped(described))
    for index, file in kept_files.written(described):
        in_image = is_carried(file.link, carry_paths)
        if in_image and not same_node:
            continue
        try:
            with data.put_back.turn(settling.suffix) as settling.by_others:
                settling.settle(index, file, in_image=in_image)
        except OSError as error:
            settling.refused.append(f"{file.link} {error.strerror or error}")
    for one in settling.done.changed:
        log.warning("rolled back: %s", one.words)
    if settling.refused:
        raise Refused(
            f"files that were open for writing at the snapshot cannot be put back: {'; '.join(settling.refused[:10])}",
            remedy="put each file back (the same file, by its inode, with its name and at least its size), then `migrator job"
            " rollback` again, or have the ranks get what is there now: `migrator job rollback --changed-files keep`; or"
            " give the job up with `migrator job drop`",
            where=Where.SUSPENDED,
        )
    return settling.done


class _Settling:
    def __init__(self, user: User, suffix: str, token: str, policy: Policy, data: Data, mapped: set[int]) -> None:
        self.user, self.suffix, self.token, self.policy, self.data = user, suffix, token, policy, data
        self.mapped = mapped
        #: Files that other ranks of this node have settled, while it is our turn.
        self.by_others: dict[str, list[int]] = {}
        self.done = Settled()
        self.refused: list[str] = []

    def settle(self, index: int, file: File, *, in_image: bool) -> None:
        """Raises OSError with the reason for a refusal."""
        here = _look(file.link)
        if here is not None and cut_back.is_same(here, paths.born_ns(file.link), file.inode, file.born_ns):
            change = Change.SHORTENED if here.st_size < file.size else Change.GROWN
            if here.st_size != file.size and identity(here) in self.by_others.values():
                self._share(index, file, here, change, in_image=in_image)
                return
            if change is Change.GROWN:
                self._cut(file, here)
                if in_image:
                    self._settle_carried(index, file, here)
                self._have(file)
                return
        elif here is not None:
            change = Change.REPLACED
        else:
            change = Change.RENAMED if self.data.now(index, file) else Change.DELETED
        if in_image and here is None:  # it is put into place with all others
            self._note(file, change, Action.RESTORED)
        elif self.policy is Policy.REFUSE:
            if not in_image:  # else it is refused if what is there has other content
                raise OSError(0, _refusal(change, file, here))
        elif self.policy is Policy.KEEP and here is not None:
            self._leave(index, file, here, change, in_image=in_image)
        else:
            self._restore(index, file, change, in_image=in_image)

    def _share(self, index: int, file: File, here: os.stat_result, change: Change, *, in_image: bool) -> None:
        """Another rank has the file open by now, with the size that it has. This one had it with another size, because one of
        them went on, and wrote, before the other was dumped."""
        if self.policy is not Policy.KEEP:
            raise OSError(
                0,
                f"is open in another rank of the job with {here.st_size} bytes, which it had in that rank's snapshot,"
                f" and had {file.size} in this rank's",
            )
        self._leave(index, file, here, change, in_image=in_image)

    def _have(self, file: File) -> None:
        """Lets other ranks know that this one has the file as it is now."""
        if (here := _look(file.link)) is not None:
            self.by_others[file.link] = self.done.files[file.link] = identity(here)

    def _settle_carried(self, index: int, file: File, here: os.stat_result) -> None:
        """A file that is the same one, of which there is a copy: it may have been overwritten. One of another user must not
        have been, which is found out when it is put into place."""
        if self.user.user_id not in (0, file.user_id):
            return
        if self.policy is Policy.RESTORE:
            self._restore(index, file, Change.OVERWRITTEN, in_image=True)
        elif self.policy is Policy.KEEP:
            self.done.left.add(file.link)
            if (here.st_size, here.st_mtime_ns) == (file.size, file.mtime_ns):
                return
            if here.st_size == file.size:
                self._note(file, Change.OVERWRITTEN, Action.KEPT)

    def _cut(self, file: File, here: os.stat_result) -> None:
        """The file is the same one, and at least as long as it was."""
        folder, name = os.path.split(file.link)
        beside = f"{name[:NAME_CHARACTERS]}.{self.suffix}"
        if here.st_size > file.size:
            with UserFiles(self.user, Where.SUSPENDED, write=[folder]) as files:
                files.ask(
                    "cut_back",
                    size_bytes=here.st_size,
                    path=file.link,
                    inode=file.inode,
                    born_ns=file.born_ns,
                    size=file.size,
                    suffix=self.suffix,
                )
            self._note(file, Change.GROWN, Action.CUT_BACK, beside)
        elif os.path.lexists(os.path.join(folder, beside)):  # by an attempt before this one, or by another rank
            self._note(file, Change.GROWN, Action.CUT_BACK, beside)

    def _leave(self, index: int, file: File, here: os.stat_result, change: Change, *, in_image: bool) -> None:
        looks = (here.st_mode, here.st_uid, here.st_gid)
        if looks != (file.mode, file.user_id, file.group_id):
            raise OSError(0, f"{_refusal(change, file, here)}, of another type, owner, group or mode")
        if index in self.mapped and here.st_size < file.size:
            raise OSError(0, f"{_refusal(change, file, here)}, and the rank has it mapped")
        self.done.sizes[file.link] = here.st_size
        if in_image:
            self.done.left.add(file.link)
        self._have(file)
        self._note(file, change, Action.KEPT)

    def _restore(self, index: int, file: File, change: Change, *, in_image: bool) -> None:
        if self.user.user_id not in (0, file.user_id):
            raise OSError(0, f"{change.words} since the snapshot, and belongs to user {file.user_id}")
        if file.mode & ~PERMISSIONS & 0o7777 and not in_image:
            raise OSError(
                0, f"{change.words} since the snapshot, and set-user-id, set-group-id and sticky bits are not set again"
            )
        now = self.data.now(index, file)
        with ExitStack() as opened:
            content = self.data.in_image(index, file)
            if content is None and change is not Change.SHORTENED:
                content = self.data.kept(index, file, self.user)
            if content is not None:
                opened.callback(os.close, content)
            elif self.policy is not Policy.KEEP or index in self.mapped:
                raise OSError(0, f"{_refusal(change, file, _look(file.link))}, and its data was not kept on this node")
            size = file.size
            if content is None:
                content, size = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0
                opened.callback(os.close, content)
                self.done.sizes[file.link] = 0
            above = _existing(os.path.dirname(file.link))
            files = opened.enter_context(UserFiles(self.user, Where.SUSPENDED, write=[above]))
            answer, _ = files.ask(
                "put_back",
                [content],
                size_bytes=3 * size,
                path=file.link,
                above=above,
                wanted=[size, file.mode & PERMISSIONS, file.user_id, file.group_id, file.mtime_ns],
                suffix=self.suffix,
                token=self.token,
                put_back=self.by_others.get(file.link),
            )
            self.by_others[file.link] = self.done.files[file.link] = [int(number) for number in answer["file"]]
        action = Action.RESTORED if file.link not in self.done.sizes else Action.EMPTY
        beside = str(answer["beside"])
        if answer["was_there"] and change is Change.OVERWRITTEN:
            return  # only its time has changed
        if answer["was_there"] and not beside:  # an attempt before this one has put it back
            change = Change.DELETED
        self._note(file, change, action, beside, now)

    def _note(self, file: File, change: Change, action: Action, beside: str = "", now: str = "") -> None:
        self.done.changed.append(ChangedFile(file.link, change, action, file.size, beside, now))


def _refusal(change: Change, file: File, here: os.stat_result | None) -> str:
    more = f" ({here.st_size} instead of {file.size} bytes)" if change is Change.SHORTENED and here is not None else ""
    return f"{change.words} since the snapshot{more}"


def _look(path: str) -> os.stat_result | None:
    """lstat, as far as can be seen without the user's rights; None if there is nothing. Raises OSError."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _existing(folder: str) -> str:
    """This directory, or the next one above it that exists."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
