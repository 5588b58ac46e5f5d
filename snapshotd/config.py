"""The daemon's configuration: one TOML file, checked as a whole before anything starts.

Invariant: a `Config` that exists can be used as it is. Every value has its type and range, the files it names existed, and
images of moves are stored in memory only. All problems of a file are reported in one BadConfig, so that an operator need not
restart the daemon once for each mistake.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from snapshotd.api import certificates, toml_file
from snapshotd.api.addresses import NODE_NAME, split_address
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig
from snapshotd.criu.find import find_criu
from snapshotd.health.settings import Settings
from snapshotd.proc.host import is_ram_backed
from snapshotd.transport.pace import Limit
from snapshotd.transport.routes import MAX_ROUTES

DEFAULT_PATH = Path("/etc/snapshotd/snapshotd.toml")
PAGE_BYTES = 4096
_SOCKET_PATH_BYTES = 107  # sun_path, without its final zero

_NODE = re.compile(NODE_NAME)

#: Keys by their former names, which are still accepted.
_RENAMED = {"device_lane": "device_channel"}


def _address(text: str) -> str:
    split_address(text)
    return text


def _ip_address(text: str) -> str:
    address = ipaddress.ip_address(text)
    if address.is_unspecified or address.is_multicast or address.is_link_local:
        raise ValueError(f"{text} is not the address of a network interface")
    return str(address)


def _address_or_empty(text: str) -> str:
    return _address(text) if text else ""


def _absolute(text: str) -> str:
    if not text.startswith("/") or "\0" in text or ".." in Path(text).parts:
        raise ValueError(f"{text!r} is not an absolute path without '..'")
    return str(Path(text))


def _user_name(text: str) -> str:
    try:
        pwd.getpwnam(text)
    except (KeyError, ValueError):
        raise ValueError(f"there is no user {text!r}") from None
    return text


def _directory_or_empty(text: str) -> str:
    if text and not os.path.isdir(_absolute(text)):
        raise ValueError(f"{_absolute(text)} is not a directory")
    return _absolute(text) if text else ""


def _absolute_or_empty(text: str) -> str:
    return _absolute(text) if text else ""


def _limit(text: str) -> str:
    if text:
        Limit.parse(text)
    return text


_ADDRESS = toml_file.text('an address like "10.0.0.1:7070"', _address)
_PATH = toml_file.text("an absolute path", _absolute)


class _Tls(msgspec.Struct):
    ca: Annotated[Path, _PATH]
    cert: Annotated[Path, _PATH]
    key: Annotated[Path, _PATH]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One field for each key of the file. A description completes the sentence "KEY must be …".

    Text is plain str, no subclass: it goes into the journal, whose encoder accepts no other types.
    """

    node: Annotated[
        str,
        Meta(
            pattern=rf"^{NODE_NAME}\Z",
            description="the name of this node: at most 63 letters, digits, '.' and '-'",
        ),
    ]
    listen: Annotated[str, _ADDRESS]
    advertise: Annotated[str, _ADDRESS] = ""  # empty in the file: the same as `listen`
    credentials: Annotated[Credentials, toml_file.table("a table with ca, cert and key", _Tls)] = msgspec.field(
        name="tls"
    )
    state_dir: Annotated[Path, _PATH] = Path("/var/lib/snapshotd")  # the journal: on a disk, to survive a reboot
    run_dir: Annotated[Path, _PATH] = Path("/run/snapshotd")
    spool_dir: Annotated[Path, _PATH] = Path()  # output of ranks without their home node; empty: state_dir/spool
    image_dir: Annotated[Path, _PATH] = Path()  # in memory; empty in the file: run_dir/images
    # What moves have reserved of this machine's memory, for other daemons on it; empty in the file: run_dir/memory
    memory_claims_dir: Annotated[Path, _PATH] = Path()
    criu: Annotated[str, _PATH] = ""  # empty in the file: see find_criu
    criu_version: str = ""  # not a key: the version of `criu`
    network_user: Annotated[str, Meta(min_length=1, max_length=64, description="the name of a user")] = "snapshotd"
    log_format: Annotated[Literal["text", "json"], Meta(description="text or json")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="debug, info, warning or error")
    ] = "info"
    metrics_listen: Annotated[str, toml_file.text(_ADDRESS.description or "", _address_or_empty)] = (
        "127.0.0.1:9470"  # empty: off
    )
    carry_paths: Annotated[tuple[str, ...], toml_file.text("a list of absolute paths", _absolute)] = (
        "/tmp",
        "/var/tmp",
        "/dev/shm",
    )
    # How much a rank's closed files below carry_paths may have to move with it; 0: only open and mapped files move.
    carry_closed_bytes: Annotated[int, Meta(ge=0, lt=1 << 50, description="a number of bytes")] = 2 << 30
    # Addresses of this node for images and device memory, one for each network interface; none: the host of `advertise`.
    data_addresses: Annotated[
        tuple[str, ...],
        toml_file.text('a list of IP addresses of this node, like ["10.1.0.1", "10.2.0.1"]', _ip_address),
    ] = ()
    streams: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 8
    chunk_bytes: Annotated[
        int,
        Meta(
            ge=64 << 10,
            le=8 << 20,
            multiple_of=PAGE_BYTES,
            description=f"a multiple of {PAGE_BYTES} (the page size) from {64 << 10} to {8 << 20}",
        ),
    ] = 8 << 20
    # Finished moves leave the journal after this many days, or when there are more than so many newer ones.
    history_days: Annotated[int, Meta(ge=1, le=3650, description="a whole number from 1 to 3650")] = 30
    history_moves: Annotated[int, Meta(ge=1, le=1000000, description="a whole number from 1 to 1000000")] = 1000
    # Limits of the spool: of one rank, of all ranks, and what must stay free on its file system. At a limit the rank waits.
    spool_rank_bytes: Annotated[int, Meta(ge=0, lt=1 << 50, description="a number of bytes")] = 1 << 30
    spool_total_bytes: Annotated[int, Meta(ge=0, lt=1 << 50, description="a number of bytes")] = 8 << 30
    spool_free_bytes: Annotated[int, Meta(ge=0, lt=1 << 50, description="a number of bytes")] = 1 << 30
    # Ranks, and connections of their keepers, that one user may have on this node. Root has no limit.
    ranks_per_user: Annotated[int, Meta(ge=1, le=100000, description="a whole number from 1 to 100000")] = 1024
    # How long communicators may take to be taken down or built again: so long, and more for each member of each of them.
    nccl_timeout_s: Annotated[int, Meta(ge=5, le=1800, description="a whole number from 5 to 1800")] = 60
    nccl_member_timeout_ms: Annotated[int, Meta(ge=0, le=10000, description="a whole number from 0 to 10000")] = 20
    gpu_library_dir: Annotated[str, toml_file.text("an absolute path", _directory_or_empty)] = (
        ""  # empty: where the loader looks
    )
    allow_root_ranks: Annotated[bool, Meta(description="true or false")] = False  # whether this node receives them
    # Users besides the rank's own whose connections to ranks are re-pointed here when those move.
    connection_users: Annotated[tuple[str, ...], toml_file.text("a list of names of users", _user_name)] = ()
    # All nodes of the cluster. They are asked whether a job's name is taken, and nothing else depends on this table.
    nodes: Annotated[dict[str, str] | None, Meta(description='a table with NAME = "host:port" for each node')] = None
    health: Annotated[Settings, toml_file.table("a table", Settings)] = Settings()
    # Whether device memory stays on its GPU until it is sent, or goes through files in this node's memory.
    hold_device_memory: Annotated[bool, Meta(description="true or false")] = True
    # Whether such memory is handed over, and not sent, between nodes of one machine that use the same GPU.
    hand_over_device_memory: Annotated[bool, Meta(description="true or false")] = True
    # Whether large memory of a rank that leaves is read by several threads beside criu.
    send_beside_criu: Annotated[bool, Meta(description="true or false")] = True
    # How fast copies of snapshots leave this node while their jobs run; empty: no limit.
    copy_limit: Annotated[str, toml_file.text('a speed like "2GB/s", or a part of the link like "30%"', _limit)] = ""
    # Whether the memory of a rank that is snapshotted is copied while the rank goes on, from a process that shares it.
    snapshot_copy_on_write: Annotated[bool, Meta(description="true or false")] = True
    # A directory on a local disk for images of snapshots for which there is no memory; empty: they are refused.
    snapshot_spill_dir: Annotated[str, toml_file.text("an absolute path", _absolute_or_empty)] = ""
    # Whether jobs whose lowest rank is here can be snapshotted. They are rolled back to snapshots that they have in any case.
    job_snapshots: Annotated[bool, Meta(description="true or false")] = True
    device_channel: Annotated[Literal["encrypted", "plain"], Meta(description="encrypted or plain")] = "encrypted"

    @property
    def admin_socket(self) -> Path:
        return self.run_dir / "admin.sock"

    @property
    def keeper_socket(self) -> Path:
        return self.run_dir / "keeper.sock"

    @classmethod
    def load(cls, path: Path | str) -> Config:
        """The configuration in `path`. Raises BadConfig with all its problems."""
        try:
            values = toml_file.load(Path(path))
        except FileNotFoundError as error:
            raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
        return cls.from_values(values, str(path))

    @classmethod
    def from_values(cls, values: Mapping[str, Any], origin: str) -> Config:
        problems: list[str] = []
        renamed = {_RENAMED.get(key, key): value for key, value in values.items()}
        found = toml_file.read(cls, renamed, "", problems, without=("criu_version",))
        _fill_in(found, problems)
        problems += _contradictions(found)
        toml_file.check(problems, origin)
        return cls(**found)


def _fill_in(found: dict[str, Any], problems: list[str]) -> None:
    """The defaults that depend on other values."""
    if "listen" in found and not found.get("advertise", "?"):
        found["advertise"] = found["listen"]
    if found.get("spool_dir") == Path():
        del found["spool_dir"]
        if "state_dir" in found:
            found["spool_dir"] = found["state_dir"] / "spool"
    if found.get("image_dir") == Path():
        del found["image_dir"]
        if "run_dir" in found:
            found["image_dir"] = found["run_dir"] / "images"
    if found.get("memory_claims_dir") == Path():
        del found["memory_claims_dir"]
        if "run_dir" in found:
            found["memory_claims_dir"] = found["run_dir"] / "memory"
    if "criu" in found:
        try:
            found["criu"], found["criu_version"] = find_criu(found["criu"] or None)
        except BadConfig as error:
            problems.append(f"criu: {error.message}")


def _contradictions(found: dict[str, Any]) -> list[str]:
    """The problems of values that are valid by themselves. Keys with a problem are not in `found`."""
    problems = []
    if found.get("advertise") and split_address(found["advertise"])[0] in ("0.0.0.0", "::"):
        problems.append(f"advertise: other nodes cannot reach {found['advertise']}; set it to an address of this node")
    if len(data := found.get("data_addresses", ())) > MAX_ROUTES or len(set(data)) < len(data):
        problems.append(f"data_addresses: at most {MAX_ROUTES} addresses are allowed, each once")
    if "credentials" in found and "node" in found:
        problems += certificates.problems(found["credentials"], found["node"])
    problems += _node_problems(found.get("nodes") or {})
    if "health" in found:
        problems += found["health"].problems()
    if "network_user" in found:
        problems += _user_problems(found["network_user"])
    if "run_dir" in found and len(os.fsencode(found["run_dir"] / "keeper.sock")) > _SOCKET_PATH_BYTES:
        problems.append(
            f"run_dir: {found['run_dir']} is too long; the path of a socket in it may have {_SOCKET_PATH_BYTES} bytes"
        )
    if "image_dir" in found:
        try:
            in_memory = is_ram_backed(found["image_dir"])
        except OSError as error:
            problems.append(f"image_dir: {found['image_dir']}: {error.strerror}")
        else:
            if not in_memory:
                problems.append(
                    f"image_dir: {found['image_dir']} is not on tmpfs or ramfs; mount a tmpfs there, because images contain"
                    " the job's memory and must never reach a disk"
                )
    if spill := found.get("snapshot_spill_dir"):
        others = [found[name] for name in ("state_dir", "run_dir", "image_dir", "spool_dir") if name in found]
        if near := [other for other in others if Path(spill).is_relative_to(other) or other.is_relative_to(spill)]:
            problems.append(f"snapshot_spill_dir: {spill} must be a directory of its own, apart from {near[0]}")
    for name in ("state_dir", "run_dir", "image_dir", "spool_dir", "memory_claims_dir"):
        if name not in found or (name == "spool_dir" and found[name].parent == found.get("state_dir")):
            continue
        try:
            blocked = found[name].exists() and not found[name].is_dir()
        except OSError as error:
            problems.append(f"{name}: {found[name]}: {error.strerror}")
        else:
            problems += [f"{name}: {found[name]} is not a directory"] if blocked else []
    return problems


def _node_problems(nodes: Mapping[str, str]) -> list[str]:
    problems = [f"nodes.{name}: the name of a node must be a host name" for name in nodes if not _NODE.fullmatch(name)]
    for name, endpoint in nodes.items():
        try:
            split_address(endpoint)
        except ValueError:
            problems.append(f'nodes.{name}: must be an address like "10.0.0.1:7070", not {endpoint!r}')
    return problems


def _user_problems(name: str) -> list[str]:
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        create = f"create it with `systemd-sysusers` (systemd/snapshotd.sysusers.conf) or `useradd --system {name}`"
        return [f"network_user: there is no user {name!r}; {create}"]
    if found.pw_uid == 0:
        return [f"network_user: {name!r} is root; the network process must have no privileges"]
    return []
