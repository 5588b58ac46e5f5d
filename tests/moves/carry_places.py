"""A place for carried files: a node with one carry path, which is like /tmp, and files for it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.files.as_user import User
from snapshotd.moves.carry import Carry, Made

USER = User(1500, 1500, (1502,))
OTHER_ID = 1501


@dataclass
class Place:
    """A node with one carry path, which is like /tmp."""

    carry: Carry
    local: Path
    images: Path
    root: Path  # only root can enter it

    def put(self, *facts: pb.FileFact, content: str = "content", user: User = USER) -> list[Made]:
        made: list[Made] = []
        for index, one in enumerate(facts):
            if stat.S_ISREG(one.mode):
                (self.images / f"carry-{index}").write_text(content)
        self.carry.place(self.images, facts, user, made.extend)
        return made

    def folder(self, name: str, user_id: int = USER.user_id) -> Path:
        path = self.local / name
        path.mkdir(mode=0o755)
        os.chown(path, user_id, user_id)
        return path


def fact(
    path: Path, mode: int = stat.S_IFREG | 0o640, user_id: int = USER.user_id, group_id: int = USER.group_id
) -> pb.FileFact:
    return pb.FileFact(path=str(path), mode=mode, mtime_ns=10**18, user_id=user_id, group_id=group_id)
