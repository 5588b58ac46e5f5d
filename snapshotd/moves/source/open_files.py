"""Sends files with an image as the rank itself has them open or mapped: a path may lead to another user's file by now."""

from __future__ import annotations

import errno
import logging
import os

from snapshotd.api.errors import Refused, SnapshotError, Where
from snapshotd.files.as_user import User
from snapshotd.files.held import Held, open_held
from snapshotd.moves.kept_files import Small
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.sender import Sender

log = logging.getLogger(__name__)


async def send_carried(sender: Sender, name: str, path: str, held: Held, user: User) -> None:
    """Sends a file that moves with the rank. Raises Refused if its user cannot read it."""
    try:
        fd = await in_thread(open_held, held, user)
    except OSError as error:
        raise Refused(
            f"carried-files: {path} cannot be read with the rights of user {user.user_id}: {error}",
            remedy="have the job close the file, or open it for reading too, and retry",
            where=Where.SOURCE_FROZEN,
        ) from error
    try:
        await sender.put_open_file(name, fd)
    finally:
        os.close(fd)


async def send_kept(sender: Sender, small: Small, user: User) -> None:
    """Sends a small file for a rollback, which does without it if it can: a file that cannot be read is left out."""
    try:
        fd = await in_thread(_copied, small, user)
    except (OSError, SnapshotError) as error:
        log.warning("a file that the rank has open for writing is not copied: %s", error)
        return
    try:
        await sender.put_open_file(small.name, fd)
    finally:
        os.close(fd)


def _copied(small: Small, user: User) -> int:
    """The file as it was at the snapshot, in memory: processes outside the rank may make it longer or shorter meanwhile."""
    fd = open_held(small.held, user)
    try:
        content = b""
        while len(content) < small.size:
            block = os.pread(fd, small.size - len(content), len(content))
            if not block:
                raise OSError(errno.ESTALE, f"only {len(content)} of its {small.size} bytes are left")
            content += block
    finally:
        os.close(fd)
    copy = os.memfd_create("kept", os.MFD_CLOEXEC)
    try:
        while content:
            content = content[os.write(copy, content) :]
    except BaseException:
        os.close(copy)
        raise
    return copy
