"""After a rollback: files that the rank had open for writing at the snapshot get the size back that they had then. Blocking.

Only what the rank's user could change is changed, by a child with that user's rights. The processes that have written since
have all ended before a rank is restored. What cannot be put back well is refused, and the job stays rolled back and
suspended. What was changed before the file's end at the snapshot stays changed: there is no copy of it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Sequence

from snapshotd.api.errors import Refused, Where
from snapshotd.files.as_user import User, UserFiles
from snapshotd.moves.tree_facts import File, TreeFacts
from snapshotd.preflight.objects import Kind, is_carried
from snapshotd.proc.maps import DELETED

log = logging.getLogger(__name__)


def cut_back(
    described: TreeFacts, user: User, record: str, carry_paths: Sequence[str], *, same_node: bool
) -> list[str]:
    """Cuts the files back, and returns what was done, for display. The tail of FILE is kept as FILE.rolled-back-RECORD. Files
    below `carry_paths` are in the image, and are put into place later; only those that the rank had on this node are cut
    back. Raises Refused if a file cannot be put back."""
    done: list[str] = []
    refused: list[str] = []
    for file in written(described):
        in_image = is_carried(file.link, carry_paths)
        if _is_as_it_was(file) or (in_image and not same_node):
            continue
        folder = os.path.dirname(file.link)
        if not os.path.isdir(folder):
            if not in_image:
                refused.append(f"{file.link} was deleted or renamed since the snapshot, with its directory")
            continue
        suffix = f"rolled-back-{record}"
        try:
            with UserFiles(user, Where.SUSPENDED, write=[folder]) as files:
                answer, _ = files.ask(
                    "cut_back",
                    size_bytes=file.size,
                    path=file.link,
                    inode=file.inode,
                    size=file.size,
                    suffix=suffix,
                )
        except OSError as error:
            if not in_image:
                refused.append(f"{file.link} {error.strerror}")
            continue
        if removed := int(answer["removed"]):
            name = f"{os.path.basename(file.link)[:200]}.{suffix}"
            done.append(f"{file.link} is cut back to {file.size} bytes; the {removed} bytes after that are in {name}")
            log.warning("rolled back: %s", done[-1])
    if refused:
        raise Refused(
            f"files that were open for writing at the snapshot cannot be put back: {'; '.join(refused[:10])}",
            remedy="put each file back (the same file, by its inode, with its name and at least its size), then `migrator job"
            " rollback` again; or give the job up with `migrator job drop`",
            where=Where.SUSPENDED,
        )
    return done


def written(described: TreeFacts) -> Iterator[File]:
    """The regular files, with a name, that processes of the rank had open for writing, or mapped so."""
    opened = {
        one.file
        for process in described.processes
        for one in process.open_files
        if one.flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
    }
    mapped = {
        one.file
        for process in described.processes
        for one in process.mapped_files
        if one.rights[1:2] == "w" and one.rights[3:4] == "s"
    }
    for index in sorted(opened | mapped):
        file = described.files[index]
        is_named = file.link.startswith("/") and not file.link.endswith(DELETED)
        if file.kind == Kind.FILE.name and stat.S_ISREG(file.mode) and is_named:
            yield file


def _is_as_it_was(file: File) -> bool:
    """Whether there is nothing to do, as far as can be seen without the user's rights. Anything else the child finds out."""
    try:
        found = os.lstat(file.link)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and (found.st_ino, found.st_size) == (file.inode, file.size)
