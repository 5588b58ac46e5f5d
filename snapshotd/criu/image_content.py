"""What an image contains, compared with what its source described. Runs in a child without rights (image_parser.py).

The bytes come from another node and may be crafted. Every function raises Forged, or any exception of the codec: the image is
refused in both cases.
"""

from __future__ import annotations

import io
import itertools
import re
import stat as mode_of
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pycriu.images import magic, pb

from snapshotd.criu import below, page_ranges, pagemap_image
from snapshotd.criu.image_request import Check, Described, Forged, Image
from snapshotd.criu.pagemap_image import Pagemap
from snapshotd.proc import priorities
from snapshotd.proc.priorities import Priorities
from snapshotd.proc.privileges import Credentials

#: The images that a rank's dump can have. Not among them: mounts, network devices and rules, archives, namespaces other
#: than that of time, cgroup properties, security policies, and credentials and limits in files of their own, which criu
#: would read if the core images had none.
_IMAGES = re.compile(
    r"(core|fdinfo|fs|ids|mm|pagemap|pagemap-shmem|pages|timens)-\d+\.img"
    r"|(ghost-file|tcp-stream)-[0-9a-f]+\.img|ahead-(pagemap|pages)-\d+-\d+\.img"
    r"|(files|inventory|memfd|pipes-data|fifo-data|pstree|remap-fpath|seccomp|filelocks|sk-queues|tty-info|tty-data|cgroup"
    r"|inotify-wd|itimers|posix-timers|signal-[sp]-\d+|sigacts-\d+|eventpoll-tfd)\.img"
)
#: Namespaces that criu must neither make nor enter. It always makes one for time.
_NAMESPACES = ("pid", "net", "ipc", "uts", "mnt", "user", "cgroup")
#: Most files begin with one of these and another number, a few only with the other.
_FIRST_MAGIC = (magic.by_name["IMG_COMMON"], magic.by_name["IMG_SERVICE"])
_ENTRY_BYTES = 1 << 20
#: Kinds of open files that a rank can have.
_KINDS = frozenset(
    (
        *("REG", "FIFO", "MEMFD", "UNIXSK", "INETSK", "PIPE", "TTY", "EVENTFD", "EVENTPOLL", "SIGNALFD", "TIMERFD"),
        *("INOTIFY", "NETLINKSK", "PIDFD"),
    )
)
_ZOMBIE_STATES = (2, 6)  # dead, zombie: without credentials


class _Refused(Exception):
    def __init__(self, check: Check, reason: str) -> None:
        super().__init__(reason)
        self.forged = Forged(check, reason)


Files = Mapping[str, bytes]


def examine(image: Image) -> Forged | None:
    """Why the image must not be restored; None if it has what was described and nothing else."""
    try:
        _names(image.names)
        threads = _threads(image.files)
        _namespaces(image.files, [process for process, _ in threads])
        _credentials(image.files, threads, image.wanted, image.granted)
        owners = [who for own, others in image.wanted.values() for who in (own, *others.values())]
        _files(image.files, frozenset(image.paths), owners)
        _pages(image)
    except _Refused as refusal:
        return refusal.forged
    except (ValueError, struct.error) as error:
        return Forged("image-content", f"the image cannot be read: {error}")
    except KeyError as error:
        return Forged("image-content", f"the image cannot be read: it lacks {error.args[0]}")
    except Exception as error:  # noqa: BLE001 - the codec's own errors, which have no common class
        return Forged("image-content", f"the image cannot be read: {type(error).__name__}: {error}")
    return None


def _names(names: list[str]) -> None:
    for name in names:
        if not _IMAGES.fullmatch(name) and name != "files.img.dumped":
            raise _Refused("image-content", f"the image contains {name}, which no rank has")


def _entries(files: Files, name: str, kind: Any) -> Iterator[Any]:
    """The messages of an image file, without what follows each of them in some files. Raises ValueError, KeyError."""
    file = io.BytesIO(files[name])
    (first,) = struct.unpack("<I", file.read(4))
    if first in _FIRST_MAGIC:
        file.seek(4, io.SEEK_CUR)
    while header := file.read(4):
        (size,) = struct.unpack("<I", header)
        if size > _ENTRY_BYTES:
            raise ValueError(f"{name} has an entry of {size} bytes")
        content = file.read(size)
        if len(content) != size:
            raise ValueError(f"{name} ends early")
        yield kind.FromString(content)


def _name(message: Any, field: str) -> str:
    """The name of an enumeration's value. Raises ValueError if the message has none that this codec knows."""
    if not message.HasField(field):
        raise ValueError(f"an entry has no known {field}")
    names = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    return str(names[getattr(message, field)].name)


def _threads(files: Files) -> list[tuple[int, list[int]]]:
    """Every process, and its threads if it lives. Of a zombie criu writes one thread, whose number it never set."""
    found = []
    for entry in _entries(files, "pstree.img", pb.pstree_entry):
        pid, threads = int(entry.pid), [int(thread) for thread in entry.threads]
        if _zombie(files, pid):
            if len(threads) > 1:
                raise ValueError(f"process {pid} has ended and has {len(threads)} threads")
            threads = []
        elif pid not in threads:
            raise ValueError(f"process {pid} is not one of its own threads")
        found.append((pid, sorted(threads)))
    if not found:
        raise ValueError("pstree.img is empty")
    return found


def _zombie(files: Files, pid: int) -> bool:
    (core,) = _entries(files, f"core-{pid}.img", pb.core_entry)
    return core.tc.task_state in _ZOMBIE_STATES


def _namespaces(files: Files, pids: list[int]) -> None:
    (inventory,) = _entries(files, "inventory.img", pb.inventory_entry)
    for pid in pids:
        name = f"ids-{pid}.img"
        if name not in files:
            continue  # a zombie
        (ids,) = _entries(files, name, pb.task_kobj_ids_entry)
        for kind in _NAMESPACES:
            field = f"{kind}_ns_id"
            if getattr(ids, field) != getattr(inventory.root_ids, field):
                raise _Refused("image-content", f"the image would put process {pid} into a new {kind} namespace")


def _credentials(
    files: Files, threads: list[tuple[int, list[int]]], wanted: Mapping[int, Described], granted: Priorities
) -> None:
    seen = set()
    for pid, numbers in threads:
        for number in numbers:
            (core,) = _entries(files, f"core-{number}.img", pb.core_entry)
            if pid not in wanted:
                raise _Refused("image-credentials", f"the image has process {pid}, which the source did not describe")
            seen.add(pid)
            own, others = wanted[pid]
            _compare(number, core, others.get(number, own))
            _priorities(number, core, others.get(number, own), granted, leads=number == pid)
    if missing := sorted(wanted.keys() - seen):
        raise _Refused("image-credentials", f"the image lacks process {missing[0]}, which the source described")
    known = {f"core-{number}.img" for pid, numbers in threads for number in {pid, *numbers}}
    if extra := sorted({name for name in files if name.startswith("core-")} - known):
        raise _Refused("image-content", f"the image contains {extra[0]}, which belongs to no process")


def _compare(number: int, core: Any, wanted: Credentials) -> None:
    if not core.thread_core.HasField("creds"):
        raise _Refused("image-credentials", f"the image has no credentials of process {number}")
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
            raise _Refused("image-credentials", f"the image gives process {number} the {name} {image}, not {described}")
    if creds.secbits and 0 not in wanted.user_ids:
        raise _Refused("image-credentials", f"the image gives process {number} the securebits {creds.secbits:x}")


def _priorities(number: int, core: Any, who: Credentials, granted: Priorities, *, leads: bool) -> None:
    """Criu sets these as root. A process with root's rights could do so itself."""
    if 0 in who.user_ids or who.capabilities:
        return
    thread = core.thread_core
    found = [priorities.of_thread(thread.sched_nice, thread.sched_policy, thread.sched_prio)]
    if leads:  # limits are those of a process, not of a thread
        hard = [int(limit.max) for limit in core.tc.rlimits.rlimits]
        if len(hard) != priorities.LIMIT_KINDS:
            raise _Refused("image-content", f"the image has {len(hard)} resource limits of process {number}")
        found.append(priorities.of_limits(hard))
    if beyond := priorities.beyond(priorities.highest(found), granted):
        raise _Refused(
            "image-priorities", f"the image gives process {number} more than this node grants: {', '.join(beyond)}"
        )


def _mask(words: Any) -> int:
    return sum(int(word) << (32 * index) for index, word in enumerate(words))


def _files(files: Files, paths: Collection[str], owners: Collection[Credentials]) -> None:
    users = {user for who in owners for user in who.all_user_ids}
    groups = {group for who in owners for group in who.all_group_ids}
    ghosts, links = _remaps(files)
    for entry in _entries(files, "files.img", pb.file_entry):
        kind = _name(entry, "type")
        if kind not in _KINDS:
            raise _Refused("image-content", f"the image contains a file of the kind {kind}, which no rank has")
        if kind == "REG":
            name = entry.reg.name
            if not _is_plain(name) or (name not in paths and entry.id not in links):
                raise _Refused("image-content", f"the image opens {name!r}, which the source did not describe")
        elif kind == "UNIXSK" and entry.usk.HasField("file_perms"):
            perms = entry.usk.file_perms
            if not _owned(perms.uid, perms.gid, users, groups) or perms.mode & _SPECIAL:
                raise _Refused("image-content", f"the image has a socket of user {perms.uid} and group {perms.gid}")
    for number in ghosts:
        ghost = next(_entries(files, f"ghost-file-{number:x}.img", pb.ghost_file_entry))
        plain = mode_of.S_ISREG(ghost.mode) or mode_of.S_ISFIFO(ghost.mode) or mode_of.S_ISDIR(ghost.mode)
        if not plain or ghost.mode & _SPECIAL:
            raise _Refused("image-content", f"the image creates a file with the mode {ghost.mode:o}")
        if not _owned(ghost.uid, ghost.gid, users, groups):
            raise _Refused("image-content", f"the image creates a file of user {ghost.uid} and group {ghost.gid}")


def _pages(image: Image) -> None:
    """Every page that an image leaves out must be in one that lies below it."""
    parents = {int(entry.pid): int(entry.ppid) for entry in _entries(image.files, "pstree.img", pb.pstree_entry)}
    decoded: dict[str, Pagemap] = {}
    seen: set[tuple[str, str | None]] = set()  # a process's rounds lie below those of its children, too
    for pid in image.below:
        chain = below.chain_of(pid, parents, image.below)
        for name in chain:
            if name not in decoded:
                decoded[name] = _pagemap(image, name)
        for name, under in itertools.zip_longest(chain, chain[1:]):
            if (name, under) in seen:
                continue
            seen.add((name, under))
            has = decoded[under].has() if under else []
            if missing := page_ranges.without(decoded[name].below, has):
                raise _Refused("image-content", f"{name} leaves out the page at {missing[0][0]:x}, which no image has")
    if extra := sorted(name for name in image.names if name.startswith("ahead-") and not _is_used(name, image.below)):
        raise _Refused("image-content", f"the image contains {extra[0]}, which the source did not describe")


def _pagemap(image: Image, name: str) -> Pagemap:
    try:
        found = pagemap_image.decode(image.files[name])
        pages = below.pages_of(name, found.pages_id)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if page_ranges.size_bytes(found.present) > image.sizes[pages]:
        raise _Refused("image-content", f"{name} has more pages than {pages}")
    return found


def _is_used(name: str, described: Mapping[int, int]) -> bool:
    _, _, pid, number = name.removesuffix(".img").split("-")
    return 1 <= int(number) <= described.get(int(pid), 0)


_SPECIAL = mode_of.S_ISUID | mode_of.S_ISGID


def _owned(user_id: int, group_id: int, users: Collection[int], groups: Collection[int]) -> bool:
    """A rank of root may have files of anyone."""
    return 0 in users or (user_id in users and group_id in groups)


def _remaps(files: Files) -> tuple[set[int], set[int]]:
    """The numbers of unlinked files, and the ids of the links that criu made."""
    ghosts: set[int] = set()
    links: set[int] = set()
    if "remap-fpath.img" not in files:
        return ghosts, links
    for entry in _entries(files, "remap-fpath.img", pb.remap_file_path_entry):
        match _name(entry, "remap_type"):
            case "GHOST":
                ghosts.add(int(entry.remap_id))
            case "LINKED":
                links.add(int(entry.remap_id))
            case "PROCFS":
                pass
            case kind:
                raise _Refused("image-content", f"the image contains a remap of the kind {kind}")
    return ghosts, links


def _is_plain(name: str) -> bool:
    return name.startswith("/") and ".." not in name.split("/") and "\0" not in name
