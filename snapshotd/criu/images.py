"""Changes criu's image files on the target before the restore.

A file that lost the name it was opened by, but has others, is dumped by criu through a hard link that criu makes,
`link_remap.N`, and removes after the dump. The restored rank opens the file by the name under which it is transferred
instead, so that neither the rank nor a name on the target ever depends on criu's link.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from pycriu.images import pb

from snapshotd.api.errors import Damaged, Where
from snapshotd.criu import image_entries, restarts
from snapshotd.criu.image_entries import HEADER_BYTES

_REG, _TIMERFD = pb.REG, pb.TIMERFD
_UNSET = (1 << 32) - 1


def mend(folder: Path, other_names: Mapping[str, str]) -> None:
    """Corrects what criu records but would not restore unchanged.

    `other_names` maps the removed name of a file to the name under which it is transferred. Raises Damaged if a file for
    which criu made a link is not in it.
    """
    path = folder / "files.img"
    files = _without_links(folder, image_entries.load(path, pb.file_entry), other_names)
    for entry in files:
        if entry.type == _REG:  # a log to which others append must not fail the restore; preflight compares files
            entry.reg.ClearField("size")
        elif entry.type == _TIMERFD:
            _rearm(entry.tfd)
    image_entries.store(path, files)


def mend_threads(folder: Path) -> None:
    """Corrects every thread's registers and audit id."""
    for path in folder.glob("core-*.img"):
        content = path.read_bytes()
        try:
            (size,) = struct.unpack("<I", content[HEADER_BYTES : HEADER_BYTES + 4])
            end = HEADER_BYTES + 4 + size
            core = pb.core_entry.FromString(content[HEADER_BYTES + 4 : end])
        except (struct.error, DecodeError) as error:
            raise Damaged(f"{path.name} cannot be read: {error}", where=Where.SOURCE_FROZEN) from error
        forgotten, restarted = _forget_login_id(core), restarts.restart_call(core)
        if forgotten or restarted:
            new = core.SerializeToString()
            path.write_bytes(content[:HEADER_BYTES] + struct.pack("<I", len(new)) + new + content[end:])


def _forget_login_id(core: Any) -> bool:
    """The audit records of this node must not name another user than the process's own: one that sudo started, say, or that a
    hostile node made up. Criu leaves an id that is unset as it is. Returns whether anything was changed."""
    if not core.tc.HasField("loginuid") or core.tc.loginuid in (_UNSET, core.thread_core.creds.uid):
        return False
    core.tc.loginuid = _UNSET
    return True


def set_modes(folder: Path, modes: Mapping[str, int]) -> None:
    """Records the modes that files have on this node: criu refuses to restore a file whose mode differs."""
    _set(folder, "mode", modes)


def set_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Records the sizes that files have now: criu refuses to restore a file whose size differs."""
    _set(folder, "size", sizes)


def _set(folder: Path, field: str, values: Mapping[str, int]) -> None:
    """Sets a field of the entries of regular files, by name, where criu has recorded one."""
    if not values:
        return
    path = folder / "files.img"
    files = image_entries.load(path, pb.file_entry)
    for entry in files:
        if entry.type == _REG and entry.reg.name in values and entry.reg.HasField(field):
            setattr(entry.reg, field, values[entry.reg.name])
    image_entries.store(path, files)


def ghosts(folder: Path) -> list[tuple[str, str]]:
    """Of each unlinked file in the images: its former name, and the name that the restore gives it for a moment."""
    unlinked = {entry.orig_id: entry.remap_id for entry in _remaps(folder) if entry.remap_type == pb.GHOST}
    if not unlinked:
        return []
    files = image_entries.load(folder / "files.img", pb.file_entry)
    return [
        (entry.reg.name, f"{entry.reg.name}.cr.{unlinked[entry.id]:x}.ghost")
        for entry in files
        if entry.type == _REG and entry.id in unlinked
    ]


def _remaps(folder: Path) -> list[Any]:
    """criu writes no file without entries."""
    path = folder / "remap-fpath.img"
    return image_entries.load(path, pb.remap_file_path_entry) if path.exists() else []


def _without_links(folder: Path, files: list[Any], other_names: Mapping[str, str]) -> list[Any]:
    """The files without criu's links; each file that had one gets the name under which it is transferred."""
    remaps = _remaps(folder)
    links = {entry.orig_id: entry.remap_id for entry in remaps if entry.remap_type == pb.LINKED}
    if not links:
        return files
    for entry in files:
        if entry.type == _REG and entry.id in links:
            removed = entry.reg.name
            if removed not in other_names:
                raise Damaged(
                    f"{removed} was removed, and no other name of it is transferred", where=Where.SOURCE_FROZEN
                )
            entry.reg.name = other_names[removed]
    image_entries.store(folder / "remap-fpath.img", [entry for entry in remaps if entry.orig_id not in links])
    made = set(links.values())
    return [entry for entry in files if entry.id not in made]


def _rearm(timer: Any) -> None:
    """A periodic timerfd that has expired and was not read: the kernel shows no time left, and criu would restore it
    disarmed. With one nanosecond left it is the same timer: expired, and still periodic."""
    if (timer.isec or timer.insec) and not timer.vsec and not timer.vnsec:
        timer.vnsec = 1
