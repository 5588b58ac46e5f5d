"""What the daemon asks the child that examines images, and what it answers. Both are MessagePack."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from snapshotd.proc.priorities import Priorities
from snapshotd.proc.privileges import Credentials

REASON_CHARACTERS = 2000
ANSWER_BYTES = 16 << 10

Check = Literal["image-content", "image-credentials", "image-priorities"]
#: The credentials of a process, and of those of its threads that have others.
Described = tuple[Credentials, dict[int, Credentials]]


class Image(msgspec.Struct, frozen=True):
    """An image, and what its source described."""

    names: list[str]  # of all its files
    files: dict[str, bytes]  # the content of those that are examined
    wanted: dict[int, Described]  # the credentials of each process that is no zombie
    paths: list[str]  # all that may be opened
    granted: Priorities  # what processes may have that are not root's
    below: dict[int, int] = {}  # processes whose image leaves out pages; see `below.chain_of`
    sizes: dict[str, int] = {}  # of the files with pages, if there are any such processes


class Forged(msgspec.Struct, frozen=True):
    """Why an image is refused. The reason may quote the image: it is shown to people as it is, so it has a limit."""

    check: Check
    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS)]
