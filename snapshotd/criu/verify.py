"""Verifies an image on the target before criu, which believes what it reads, restores it as root.

An image comes from another node. Criu would give its processes whatever credentials it names, create device nodes and
set-uid files from it, mount, and run programs. So it may contain only what a rank's dump contains, and only credentials that
its source described and this node's policy allows.

Nothing is changed here. Every function raises Refused, with the name of the check at the start of its message.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat as mode_of
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pycriu import images
from pycriu.images import magic, pb

from snapshotd.api.errors import Refused, Where
from snapshotd.preflight.target import ROOT_REMEDY
from snapshotd.proc.privileges import Credentials

#: The images that a rank's dump can have. Not among them: mounts, network devices and rules, archives, namespaces other
#: than that of time, cgroup properties, security policies.
_IMAGES = re.compile(
    r"(core|fdinfo|fs|ids|mm|pagemap|pagemap-shmem|pages|timens)-\d+\.img"
    r"|(ghost-file|tcp-stream)-[0-9a-f]+\.img"
    r"|(files|inventory|memfd|pipes-data|fifo-data|pstree|remap-fpath|seccomp|filelocks|sk-queues|tty-info|tty-data|cgroup"
    r"|inotify-wd|itimers|posix-timers|signal-[sp]-\d+|rlimit-\d+|creds-\d+|sigacts-\d+|eventpoll-tfd)\.img"
)
#: Namespaces that criu must neither make nor enter. It always makes one for time.
_NAMESPACES = ("pid", "net", "ipc", "uts", "mnt", "user", "cgroup")
#: Most files begin with one of these and another number, a few only with the other.
_FIRST_MAGIC = (magic.by_name["IMG_COMMON"], magic.by_name["IMG_SERVICE"])
_ENTRY_BYTES = 1 << 20
#: The largest id that distributions give to their own groups (disk, shadow, docker …).
_LAST_SYSTEM_GROUP = 999
_ZOMBIE_STATES = (2, 6)  # dead, zombie: without credentials


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


#: The credentials of a process, and of those of its threads that have others.
Described = tuple[Credentials, Mapping[int, Credentials]]


def must_match(folder: Path, wanted: Mapping[int, Described], paths: Collection[str]) -> None:
    """Raises Refused unless the images have exactly the processes, credentials and paths that the source described. Blocks.

    `wanted` has the credentials of each process that is no zombie, `paths` all that may be opened. Unlinked files and
    sockets must belong to the processes."""
    try:
        _names(folder)
        threads = _threads(folder)
        _namespaces(folder, [process for process, _ in threads])
        _credentials(folder, threads, wanted)
        _files(folder, paths, [who for own, others in wanted.values() for who in (own, *others.values())])
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise refuse("image-content", f"the image cannot be read: {error}") from error
    except Exception as error:  # the codec's own errors, which have no common class
        if isinstance(error, Refused):
            raise
        raise refuse("image-content", f"the image cannot be read: {type(error).__name__}: {error}") from error


def _names(folder: Path) -> None:
    for path in sorted(folder.glob("*.img*")):
        if not _IMAGES.fullmatch(path.name) and path.name != "files.img.dumped":
            raise refuse("image-content", f"the image contains {path.name}, which no rank has")


def entries(path: Path, kind: Any) -> Iterator[Any]:
    """The messages of an image file, without what follows each of them in some files. Raises ValueError."""
    with path.open("rb") as file:
        (first,) = struct.unpack("<I", file.read(4))
        if first in _FIRST_MAGIC:
            file.seek(4, os.SEEK_CUR)
        while header := file.read(4):
            (size,) = struct.unpack("<I", header)
            if size > _ENTRY_BYTES:
                raise ValueError(f"{path.name} has an entry of {size} bytes")
            content = file.read(size)
            if len(content) != size:
                raise ValueError(f"{path.name} ends early")
            yield kind.FromString(content)


def _threads(folder: Path) -> list[tuple[int, list[int]]]:
    found = [
        (int(entry.pid), [int(thread) for thread in entry.threads])
        for entry in entries(folder / "pstree.img", pb.pstree_entry)
    ]
    if not found:
        raise ValueError("pstree.img is empty")
    return found


def _namespaces(folder: Path, pids: list[int]) -> None:
    (inventory,) = entries(folder / "inventory.img", pb.inventory_entry)
    for pid in pids:
        path = folder / f"ids-{pid}.img"
        if not path.exists():
            continue  # a zombie
        (ids,) = entries(path, pb.task_kobj_ids_entry)
        for name in _NAMESPACES:
            field = f"{name}_ns_id"
            if getattr(ids, field) != getattr(inventory.root_ids, field):
                raise refuse("image-content", f"the image would put process {pid} into a new {name} namespace")


def _credentials(folder: Path, threads: list[tuple[int, list[int]]], wanted: Mapping[int, Described]) -> None:
    seen = set()
    for pid, numbers in threads:
        for number in sorted({pid, *numbers}):
            (core,) = entries(folder / f"core-{number}.img", pb.core_entry)
            if number == pid and core.tc.task_state in _ZOMBIE_STATES:
                break
            if pid not in wanted:
                raise refuse("image-credentials", f"the image has process {pid}, which the source did not describe")
            seen.add(pid)
            own, others = wanted[pid]
            _compare(number, core, others.get(number, own))
    if missing := sorted(wanted.keys() - seen):
        raise refuse("image-credentials", f"the image lacks process {missing[0]}, which the source described")
    known = {f"core-{number}.img" for pid, numbers in threads for number in {pid, *numbers}}
    if extra := sorted({path.name for path in folder.glob("core-*.img")} - known):
        raise refuse("image-content", f"the image contains {extra[0]}, which belongs to no process")


def _compare(number: int, core: Any, wanted: Credentials) -> None:
    if not core.thread_core.HasField("creds"):
        raise refuse("image-credentials", f"the image has no credentials of process {number}")
    creds = core.thread_core.creds
    here = {
        "user ids": ((creds.uid, creds.euid, creds.suid, creds.fsuid), wanted.user_ids),
        "group ids": ((creds.gid, creds.egid, creds.sgid, creds.fsgid), wanted.group_ids),
        "groups": (tuple(sorted(creds.groups)), wanted.groups),
        "inheritable capabilities": (_mask(creds.cap_inh), wanted.inheritable),
        "permitted capabilities": (_mask(creds.cap_prm), wanted.permitted),
        "effective capabilities": (_mask(creds.cap_eff), wanted.effective),
        "ambient capabilities": (_mask(creds.cap_amb), wanted.ambient),
        "no_new_privs": (bool(creds.no_new_privs), wanted.no_new_privs),
        "seccomp mode": (int(core.thread_core.seccomp_mode), wanted.seccomp),
    }
    for name, (image, described) in here.items():
        if image != described:
            raise refuse("image-credentials", f"the image gives process {number} the {name} {image}, not {described}")
    if creds.secbits and 0 not in wanted.user_ids:
        raise refuse("image-credentials", f"the image gives process {number} the securebits {creds.secbits:x}")


def _mask(words: Any) -> int:
    return sum(int(word) << (32 * index) for index, word in enumerate(words))


def _files(folder: Path, paths: Collection[str], owners: Collection[Credentials]) -> None:
    users = {user for who in owners for user in who.all_user_ids}
    groups = {group for who in owners for group in who.all_group_ids}
    ghosts, links = _remaps(folder)
    with (folder / "files.img").open("rb") as file:
        table = images.load(file)["entries"]
    for entry in table:
        match entry["type"]:
            case "REG" | "FIFO" | "MEMFD" | "UNIXSK" | "INETSK" | "PIPE" | "TTY" | "EVENTFD" | "EVENTPOLL" | "SIGNALFD":
                pass
            case "TIMERFD" | "INOTIFY" | "NETLINKSK" | "PIDFD":
                pass
            case kind:
                raise refuse("image-content", f"the image contains a file of the kind {kind}, which no rank has")
        if entry["type"] == "REG":
            name = entry["reg"]["name"]
            if not _is_plain(name) or (name not in paths and entry["id"] not in links):
                raise refuse("image-content", f"the image opens {name!r}, which the source did not describe")
        elif entry["type"] == "UNIXSK":
            perms = entry["usk"].get("file_perms")
            if perms and (not _owned(perms["uid"], perms["gid"], users, groups) or perms["mode"] & _SPECIAL):
                raise refuse("image-content", f"the image has a socket of user {perms['uid']} and group {perms['gid']}")
    for number in ghosts:
        ghost = next(entries(folder / f"ghost-file-{number:x}.img", pb.ghost_file_entry))
        plain = mode_of.S_ISREG(ghost.mode) or mode_of.S_ISFIFO(ghost.mode) or mode_of.S_ISDIR(ghost.mode)
        if not plain or ghost.mode & _SPECIAL:
            raise refuse("image-content", f"the image creates a file with the mode {ghost.mode:o}")
        if not _owned(ghost.uid, ghost.gid, users, groups):
            raise refuse("image-content", f"the image creates a file of user {ghost.uid} and group {ghost.gid}")


_SPECIAL = mode_of.S_ISUID | mode_of.S_ISGID


def _owned(user_id: int, group_id: int, users: Collection[int], groups: Collection[int]) -> bool:
    """A rank of root may have files of anyone."""
    return 0 in users or (user_id in users and group_id in groups)


def _remaps(folder: Path) -> tuple[set[int], set[int]]:
    """The numbers of unlinked files, and the ids of the links that criu made."""
    path = folder / "remap-fpath.img"
    if not path.exists():
        return set(), set()
    ghosts, links = set(), set()
    with path.open("rb") as file:
        for entry in images.load(file)["entries"]:
            match entry["remap_type"]:
                case "GHOST":
                    ghosts.add(int(entry["remap_id"]))
                case "LINKED":
                    links.add(int(entry["remap_id"]))
                case "PROCFS":
                    pass
                case kind:
                    raise refuse("image-content", f"the image contains a remap of the kind {kind}")
    return ghosts, links


def _is_plain(name: str) -> bool:
    return name.startswith("/") and ".." not in name.split("/") and "\0" not in name
