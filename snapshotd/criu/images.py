"""Changes criu's image files on the target before the restore, with pycriu's own codec.

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
from pycriu import images

from snapshotd.api.errors import Damaged, Where
from snapshotd.criu import restarts

_HEADER_BYTES = 8  # two magic numbers
_UNSET = (1 << 32) - 1


def mend(folder: Path, other_names: Mapping[str, str]) -> None:
    """Corrects what criu records but would not restore unchanged.

    `other_names` maps the removed name of a file to the name under which it is transferred. Raises Damaged if a file for
    which criu made a link is not in it.
    """
    path = folder / "files.img"
    table = _load(path)
    table["entries"] = _without_links(folder, table["entries"], other_names)
    for entry in table["entries"]:
        match entry["type"]:
            case "REG":
                _forget_size(entry["reg"])
            case "TIMERFD":
                _rearm(entry["tfd"])
    _store(path, table)


def mend_threads(folder: Path) -> None:
    """Corrects every thread's registers and audit id."""
    for path in folder.glob("core-*.img"):
        content = path.read_bytes()
        try:
            (size,) = struct.unpack("<I", content[_HEADER_BYTES : _HEADER_BYTES + 4])
            end = _HEADER_BYTES + 4 + size
            core = images.pb.core_entry.FromString(content[_HEADER_BYTES + 4 : end])
        except (struct.error, DecodeError) as error:
            raise Damaged(f"{path.name} cannot be read: {error}", where=Where.SOURCE_FROZEN) from error
        forgotten, restarted = _forget_login_id(core), restarts.restart_call(core)
        if forgotten or restarted:
            new = core.SerializeToString()
            path.write_bytes(content[:_HEADER_BYTES] + struct.pack("<I", len(new)) + new + content[end:])


def _forget_login_id(core: Any) -> bool:
    """The audit records of this node must not name another user than the process's own: one that sudo started, say, or that a
    hostile node made up. Criu leaves an id that is unset as it is. Returns whether anything was changed."""
    if not core.tc.HasField("loginuid") or core.tc.loginuid in (_UNSET, core.thread_core.creds.uid):
        return False
    core.tc.loginuid = _UNSET
    return True


def set_modes(folder: Path, modes: Mapping[str, int]) -> None:
    """Records the modes that files have on this node: criu refuses to restore a file whose mode differs."""
    if not modes:
        return
    path = folder / "files.img"
    table = _load(path)
    for entry in table["entries"]:
        if entry["type"] == "REG" and entry["reg"]["name"] in modes and "mode" in entry["reg"]:
            entry["reg"]["mode"] = modes[entry["reg"]["name"]]
    _store(path, table)


def ghosts(folder: Path) -> list[tuple[str, str]]:
    """Of each unlinked file in the images: its former name, and the name that the restore gives it for a moment."""
    path = folder / "remap-fpath.img"
    if not path.exists():
        return []
    unlinked = {
        entry["orig_id"]: entry["remap_id"] for entry in _load(path)["entries"] if entry["remap_type"] == "GHOST"
    }
    if not unlinked:
        return []
    files = [
        entry for entry in _load(folder / "files.img")["entries"] if entry["type"] == "REG" and entry["id"] in unlinked
    ]
    return [(name := entry["reg"]["name"], f"{name}.cr.{unlinked[entry['id']]:x}.ghost") for entry in files]


def _without_links(folder: Path, files: list[dict[str, Any]], other_names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The files without criu's links; each file that had one gets the name under which it is transferred."""
    path = folder / "remap-fpath.img"
    if not path.exists():
        return files
    remaps = _load(path)
    links = {entry["orig_id"]: entry["remap_id"] for entry in remaps["entries"] if entry["remap_type"] == "LINKED"}
    if not links:
        return files
    for entry in files:
        if entry["type"] == "REG" and entry["id"] in links:
            removed = entry["reg"]["name"]
            if removed not in other_names:
                raise Damaged(
                    f"{removed} was removed, and no other name of it is transferred", where=Where.SOURCE_FROZEN
                )
            entry["reg"]["name"] = other_names[removed]
    remaps["entries"] = [entry for entry in remaps["entries"] if entry["orig_id"] not in links]
    _store(path, remaps)
    made = set(links.values())
    return [entry for entry in files if entry["id"] not in made]


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        table: dict[str, Any] = images.load(file)
    return table


def _store(path: Path, table: dict[str, Any]) -> None:
    with path.open("wb") as file:
        images.dump(table, file)


def _forget_size(file: dict[str, Any]) -> None:
    """A log to which others append must not fail the restore. Preflight checks that files are equal on both nodes."""
    file.pop("size", None)


def _rearm(timer: dict[str, Any]) -> None:
    """A periodic timerfd that has expired and was not read: the kernel shows no time left, and criu would restore it
    disarmed. With one nanosecond left it is the same timer: expired, and still periodic."""
    periodic = int(timer["isec"]) or int(timer["insec"])
    if periodic and not int(timer["vsec"]) and not int(timer["vnsec"]):
        timer["vnsec"] = 1
