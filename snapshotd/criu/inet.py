"""Rewrites inet sockets in criu's images on the target, before the restore: new addresses, and connections to be ended.

criu restores what the image contains: a connection from an address that the target does not have would be restored and then
hang for ever. So every address in the image must be accounted for, or the restore is not tried.

criu's own `tcp_close` shuts down every connection of the image. The same is done here to single ones: without a remote port
criu makes a plain socket, and with both directions shut down it is closed. That reads as a normal end of the stream;
`snapshotd.net.reset` turns it into a reset once it exists.

A connection that the peer has closed (CLOSE_WAIT) becomes an established one: criu would send itself the peer's FIN, which
the move's filter drops. Once it exists it is shut down for reading: the rank reads what had arrived, and then the end.

The dumped image is kept beside the changed one, so that the rewriting can be repeated or replaced.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycriu import images

from snapshotd.api.errors import Internal, Where
from snapshotd.net.flows import Address, Pair

#: (local, remote) of a socket; remote is None if it is not connected: listeners, and sockets that are only bound.
Endpoints = tuple[Address, Address | None]

_ESTABLISHED, _CLOSE = 1, 7
_MAPPED = b"\0" * 10 + b"\xff\xff"


@dataclass(frozen=True)
class Rewritten:
    """The result. `closed` locates the connections that were given up, `ended` those that the peer had closed: (pid in the
    rank's own pid namespace, descriptor)."""

    changed: int
    closed: tuple[tuple[int, int], ...]
    ended: tuple[tuple[int, int], ...] = ()


def rewrite(
    folder: Path,
    changes: Mapping[Endpoints, Endpoints],
    closed: Iterable[Pair] = (),
    own: Collection[str] | None = None,
    ended: Iterable[Pair] = (),
) -> Rewritten:
    """Gives the image's sockets their new endpoints. Gives up the connections in `closed`, and those that were dead already.
    Those in `ended`, which are among `changes`, must be shut down for reading afterwards.

    `own` is the target's IP addresses: a socket that would keep another local address, except loopback and wildcard, is an
    error. So is a change without a socket in the image. The image is unchanged after an error.
    """
    path, dumped = folder / "files.img", folder / "files.img.dumped"
    with (dumped if dumped.exists() else path).open("rb") as file:
        table = images.load(file)
    giving_up, reading_end = set(closed), set(ended)
    unmet: set[Endpoints] = {*changes, *giving_up}
    given_up: set[int] = set()
    at_end: set[int] = set()
    changed = 0
    for entry in (entry["isk"] for entry in table["entries"] if entry["type"] == "INETSK"):
        endpoints = _ends(entry)
        unmet.discard(endpoints)
        if _is_dead(entry):
            unmet.discard((endpoints[0], None))  # for the kernel it is bound and no longer connected
            _end(entry)
        elif endpoints in giving_up:
            _end(entry)
            given_up.add(entry["id"])
        elif endpoints in changes:
            _change(entry, *changes[endpoints])
            changed += 1
            if endpoints in reading_end:
                entry["state"] = _ESTABLISHED
                entry.pop("shutdown", None)
                at_end.add(entry["id"])
        local = _ends(entry)[0]
        if own is not None and local.port and not (local.loopback or local.wildcard or local.ip in own):
            raise _wrong(f"the image has a socket at {local}, an address that this node does not have")
    if unmet:
        raise _wrong("the image lacks the connections " + ", ".join(f"{local} → {remote}" for local, remote in unmet))
    _replace(folder, table)
    return Rewritten(changed, tuple(_descriptors(folder, given_up)), tuple(_descriptors(folder, at_end)))


def listed(folder: Path) -> list[Endpoints]:
    """The endpoints of every inet socket in the image."""
    with (folder / "files.img").open("rb") as file:
        table = images.load(file)
    return [_ends(entry["isk"]) for entry in table["entries"] if entry["type"] == "INETSK"]


def _replace(folder: Path, table: Any) -> None:
    path, dumped, new = folder / "files.img", folder / "files.img.dumped", folder / "files.img.new"
    with new.open("wb") as file:
        images.dump(table, file)
    if not dumped.exists():
        os.link(path, dumped)
    os.replace(new, path)


def _wrong(message: str) -> Internal:
    return Internal(message, where=Where.SOURCE_FROZEN)


# ---------------------------------------------------------------- one socket


def _ends(entry: Mapping[str, Any]) -> Endpoints:
    local = _address(entry["family"], entry["src_addr"], entry["src_port"])
    remote = _address(entry["family"], entry["dst_addr"], entry["dst_port"])
    return local, remote if remote.port else None


def _address(family: int, words: list[int], port: int) -> Address:
    """criu copies an address from memory into 32-bit words, so they are in this machine's byte order."""
    count = 4 if family == socket.AF_INET6 else 1
    return Address(socket.inet_ntop(family, struct.pack(f"={count}I", *words[:count])), port)


def _change(entry: dict[str, Any], local: Address, remote: Address | None) -> None:
    if (remote is None) != (entry["dst_port"] == 0):
        raise _wrong(
            f"{_ends(entry)[0]} cannot become {local} → {remote}: it must be connected both before and after, or neither"
        )
    for name, address in (("src", local), ("dst", remote)):
        if address is not None:
            entry[f"{name}_addr"] = _words(entry, address)
            entry[f"{name}_port"] = address.port


def _words(entry: Mapping[str, Any], address: Address) -> list[int]:
    """An IPv4 address in an IPv6 socket is a mapped one."""
    packed = socket.inet_pton(socket.AF_INET6 if address.version == 6 else socket.AF_INET, address.ip)
    if entry["family"] == socket.AF_INET6 and address.version == 4:
        if entry.get("v6only"):
            raise _wrong(f"{_ends(entry)[0]} is an IPv6-only socket and cannot have the address {address}")
        packed = _MAPPED + packed
    if entry["family"] == socket.AF_INET and address.version == 6:
        raise _wrong(f"{_ends(entry)[0]} is an IPv4 socket and cannot have the address {address}")
    return list(struct.unpack(f"={len(packed) // 4}I", packed))


def _is_dead(entry: Mapping[str, Any]) -> bool:
    """A connection that was reset or timed out before the move and was not closed yet: criu still has both addresses,
    although it is in no table of the kernel."""
    return bool(entry["proto"] == socket.IPPROTO_TCP and entry["state"] == _CLOSE and entry["dst_port"])


def _end(entry: dict[str, Any]) -> None:
    """Unconnected and unbound: its address may not exist here, and its port may be in use."""
    for name in ("src", "dst"):
        entry[f"{name}_port"] = 0
        entry[f"{name}_addr"] = [0] * len(entry[f"{name}_addr"])
    entry.pop("ifname", None)
    entry["state"] = _CLOSE
    entry["shutdown"] = "BOTH"


# ---------------------------------------------------------------- descriptors


def _descriptors(folder: Path, files: Collection[int]) -> list[tuple[int, int]]:
    """(pid, descriptor) of these open files, each file once, for any of the processes that hold it."""
    left = set(files)
    found: list[tuple[int, int]] = []
    if not left:
        return found
    for process in _entries(folder / "pstree.img"):
        identity = folder / f"ids-{process['pid']}.img"
        if not identity.exists():  # a zombie has nothing open
            continue
        (tables,) = _entries(identity)
        for descriptor in _entries(folder / f"fdinfo-{tables['files_id']}.img"):
            if descriptor["id"] in left:
                left.remove(descriptor["id"])
                found.append((int(process["pid"]), int(descriptor["fd"])))
    return found


def _entries(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return list(images.load(file)["entries"])
