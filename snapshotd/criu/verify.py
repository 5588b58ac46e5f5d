"""Verifies an image on the target before criu, which believes what it reads, restores it as root.

An image comes from another node. Criu would give its processes whatever credentials it names, create device nodes and
set-uid files from it, mount, and run programs. So it may contain only what a rank's dump contains, only credentials that
its source described and this node's policy allows, and no priority or resource limit that a user could not have here.

The images are parsed by a child without rights (parsers.py): they are a stranger's bytes, and this process is root's.
Nothing is changed here. Every function raises Refused, with the name of the check at the start of its message.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from snapshotd.api.errors import Refused, Where
from snapshotd.criu import parsers
from snapshotd.criu.image_request import Described, Image
from snapshotd.preflight.target import PRIORITIES_REMEDY, ROOT_REMEDY
from snapshotd.proc import priorities
from snapshotd.proc.privileges import Credentials

#: The largest id that distributions give to their own groups (disk, shadow, docker …).
_LAST_SYSTEM_GROUP = 999


def refuse(check: str, reason: str, remedy: str = "") -> Refused:
    advice = remedy or "if the source node is not compromised, report this together with the logs of both daemons"
    return Refused(f"{check}: {reason}", remedy=advice, where=Where.SOURCE_FROZEN)


# ---------------------------------------------------------------- policy


def must_be_allowed(who: Credentials, shown_user_ids: Collection[int], *, allow_root: bool) -> None:
    """Raises Refused unless a rank with these credentials may be restored on this node.

    `shown_user_ids` are those that preflight was shown."""
    hidden = sorted(who.all_user_ids - set(shown_user_ids))
    if hidden:
        raise refuse("image-credentials", f"the image has a process of user {hidden[0]}, whom preflight was not shown")
    if allow_root:
        return
    if 0 in who.all_user_ids:
        raise refuse("root-rank", "the rank runs as root, which this node does not allow", ROOT_REMEDY)
    if who.capabilities:
        raise refuse("image-credentials", f"a process has the capabilities {who.capabilities:x}", ROOT_REMEDY)
    foreign = sorted(who.all_group_ids - _groups_of(who.user_ids[0], who.all_group_ids))
    if foreign:
        raise refuse(
            "credentials",
            f"user {who.user_ids[0]} is not in the groups {', '.join(map(str, foreign))} on this node",
            "give the user the same groups on all nodes",
        )


def _groups_of(user_id: int, asked: Collection[int]) -> frozenset[int]:
    """The groups among `asked` that this node grants to a user. A user without an account here gets no system group."""
    try:
        account = pwd.getpwuid(user_id)
    except KeyError:
        return frozenset(group for group in asked if group > _LAST_SYSTEM_GROUP)
    return frozenset(os.getgrouplist(account.pw_name, account.pw_gid)) | _same_name(account.pw_name, asked)


def _same_name(name: str, asked: Collection[int]) -> frozenset[int]:
    """The user's own group, if the account database does not list it."""
    found = set()
    for group in asked:
        try:
            if grp.getgrgid(group).gr_name == name:
                found.add(group)
        except KeyError:
            continue
    return frozenset(found)


# ---------------------------------------------------------------- images

#: What the child gets of each file that it examines, and of all. Those of unlinked files begin with what concerns it.
_FILE_BYTES = 16 << 20
_GHOST_BYTES = 64 << 10
_ALL_BYTES = 256 << 20
_READ = re.compile(r"((core|ids)-\d+|ghost-file-[0-9a-f]+|pstree|inventory|files|remap-fpath)\.img")
#: Only if pages are left out.
_PAGEMAPS = re.compile(r"(ahead-)?pagemap-\d+(-\d+)?\.img")
_PAGES = re.compile(r"(ahead-)?pages-\d+(-\d+)?\.img")


def must_match(
    folder: Path, wanted: Mapping[int, Described], paths: Collection[str], below: Mapping[int, int] | None = None
) -> None:
    """Raises Refused unless the images have exactly the processes, credentials and paths that the source described. Blocks.

    `wanted` has the credentials of each process that is no zombie, `paths` all that may be opened, `below` the processes
    whose images leave out pages, all of which must be in other images. Unlinked files and sockets must belong to the
    processes."""
    try:
        names = sorted(path.name for path in folder.glob("*.img*"))
        read = [name for name in names if _READ.fullmatch(name) or (below and _PAGEMAPS.fullmatch(name))]
        files = dict(_contents(folder, read))
        sizes = {name: (folder / name).stat().st_size for name in names if below and _PAGES.fullmatch(name)}
    except (OSError, ValueError) as error:
        raise refuse("image-content", f"the image cannot be read: {error}") from error
    granted = priorities.granted()
    forged = parsers.examine(
        Image(
            names=names,
            files=files,
            wanted=dict(wanted),
            paths=sorted(paths),
            granted=granted,
            below=dict(below or {}),
            sizes=sizes,
        )
    )
    if forged is not None:
        raise refuse(forged.check, forged.reason, PRIORITIES_REMEDY if forged.check == "image-priorities" else "")


def _contents(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The beginning of each file that is examined. Raises ValueError if they are too large together."""
    left = _ALL_BYTES
    for name in names:
        most = _GHOST_BYTES if name.startswith("ghost-file-") else _FILE_BYTES
        with (folder / name).open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            if not name.startswith("ghost-file-"):
                raise ValueError(f"{name} has more than {most} bytes")
            content = content[:most]
        left -= len(content)
        if left < 0:
            raise ValueError(f"the files of the image have more than {_ALL_BYTES} bytes together")
        yield name, content
