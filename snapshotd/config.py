"""The daemon's configuration: one TOML file, checked as a whole before anything starts.

Invariant: a `Config` that exists can be used as it is: every value has its type and range, every file it names
was there, images go to memory and nowhere else. Whatever is wrong with the file is said at once, in one BadConfig,
since a daemon that is restarted for each mistake in turn is a bad way to read a file.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.api import certificates
from snapshotd.api.channel import Credentials
from snapshotd.api.errors import BadConfig
from snapshotd.proc.host import is_ram_backed
from snapshotd.runtime import logs

DEFAULT_PATH = Path("/etc/snapshotd/snapshotd.toml")
CRIU_LEAST = (4, 2)
#: Where tools/get-criu and `make setup` put one: on a node, and in a checkout.
PRIVATE_CRIU = (Path("/opt/snapshotd/criu/criu"), Path(__file__).resolve().parents[1] / ".criu" / "criu")
PAGE_BYTES = 4096
_SOCKET_PATH_BYTES = 107  # sun_path, without its final zero

_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_GET_CRIU = "tools/get-criu /opt/snapshotd/criu installs one that is"


@dataclass(frozen=True)
class Config:
    """One field for each key of the file, and what was found out while checking it."""

    node: str
    listen: str
    advertise: str
    credentials: Credentials  # [tls] ca, cert, key
    state_dir: Path  # the journal: on disk, it has to outlive a reboot
    run_dir: Path
    image_dir: Path  # in memory
    criu: str
    criu_version: str
    log_format: str
    log_level: str
    metrics_listen: str  # empty: off
    carry_paths: tuple[str, ...]
    streams: int
    chunk_bytes: int
    lease_s: float
    gpu_library_dir: str  # empty: where the loader looks
    device_lane: str  # "encrypted", or "plain" for device memory on a network that nobody else reads

    @property
    def admin_socket(self) -> Path:
        return self.run_dir / "admin.sock"

    @property
    def keeper_socket(self) -> Path:
        return self.run_dir / "keeper.sock"

    @classmethod
    def load(cls, path: Path | str) -> Config:
        """The configuration in `path`, or BadConfig with every problem of it."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadConfig(f"{path} is not TOML: {error}") from error
        return cls.from_values(values, str(path))

    @classmethod
    def from_values(cls, values: Mapping[str, Any], origin: str) -> Config:
        found: list[str] = []
        top = _Table(values, "", found)
        config = cls(
            node=top.node("node"),
            listen=(listen := top.address("listen")),
            advertise=top.address("advertise", default=listen),
            credentials=top.credentials("tls"),
            state_dir=top.path("state_dir", "/var/lib/snapshotd"),
            run_dir=(run_dir := top.path("run_dir", "/run/snapshotd")),
            image_dir=top.path("image_dir", str(run_dir / "images")),
            criu=(criu := top.criu("criu"))[0],
            criu_version=criu[1],
            log_format=top.choice("log_format", logs.FORMATS, "text"),
            log_level=top.choice("log_level", logs.LEVELS, "info"),
            metrics_listen=top.address("metrics_listen", default="127.0.0.1:9470", may_be_empty=True),
            carry_paths=top.paths("carry_paths", ("/tmp", "/var/tmp", "/dev/shm")),
            streams=top.integer("streams", 4, least=1, most=64),
            chunk_bytes=top.integer("chunk_bytes", 2 << 20, least=64 << 10, most=8 << 20),
            lease_s=top.seconds("lease_s", 30.0, least=1.0, most=3600.0),
            gpu_library_dir=top.folder("gpu_library_dir"),
            device_lane=top.choice("device_lane", ("encrypted", "plain"), "encrypted"),
        )
        top.finish()
        found += _contradictions(config, top.wrong)
        if found:
            count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
            raise BadConfig("\n  - ".join([f"{origin} has {count}:", *found]))
        return config


def _contradictions(config: Config, wrong: set[str]) -> list[str]:
    """What is wrong with values that are right by themselves; keys already found `wrong` are left alone."""
    found = []
    if not wrong & {"listen", "advertise"}:
        host = split_address(config.advertise)[0]
        if host in ("0.0.0.0", "::"):
            found.append(f"advertise: other nodes cannot reach {config.advertise}; name this node's own address")
    if not wrong & {"tls", "node"}:
        found += certificates.problems(config.credentials, config.node)
    if "run_dir" not in wrong and len(os.fsencode(config.keeper_socket)) > _SOCKET_PATH_BYTES:
        found.append(f"run_dir: {config.run_dir} is too long to hold a socket ({_SOCKET_PATH_BYTES} bytes in all)")
    if "chunk_bytes" not in wrong and config.chunk_bytes % PAGE_BYTES:
        found.append(f"chunk_bytes: {config.chunk_bytes} is no multiple of {PAGE_BYTES}, the size of a page")
    if not wrong & {"image_dir", "run_dir"}:
        try:
            in_memory = is_ram_backed(config.image_dir)
        except OSError as error:
            found.append(f"image_dir: {config.image_dir}: {error.strerror}")
        else:
            if not in_memory:
                found.append(
                    f"image_dir: {config.image_dir} is not on tmpfs or ramfs: images hold the job's memory and must "
                    "never reach a disk; mount a tmpfs there"
                )
    for name in ("state_dir", "run_dir", "image_dir"):
        place: Path = getattr(config, name)
        try:
            blocked = name not in wrong and place.exists() and not place.is_dir()
        except OSError as error:
            found.append(f"{name}: {place}: {error.strerror}")
        else:
            found += [f"{name}: {place} is not a directory"] if blocked else []
    return found


class _Table:
    """One table of the file: hands values out by type, writes down what is wrong, and never raises."""

    def __init__(self, values: Mapping[str, Any], prefix: str, found: list[str]) -> None:
        self._values, self._prefix, self._found = values, prefix, found
        self._known: list[str] = []
        self.wrong: set[str] = set()

    def _complain(self, name: str, problem: str) -> None:
        self.wrong.add(name)
        self._found.append(f"{self._prefix}{name}: {problem}")

    def _take(self, name: str, kind: type | tuple[type, ...], words: str, default: Any) -> Any:
        """The value, `default` where there is none or it has another type (which is written down), None: required."""
        self._known.append(name)
        if name not in self._values:
            if default is None:
                self._complain(name, f"is missing ({words})")
            return default
        value = self._values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._complain(name, f"should be {words}, not {value!r}")
            return default
        return value

    def text(self, name: str, words: str, default: str | None = None) -> str:
        value = self._take(name, str, words, default)
        return value if isinstance(value, str) else ""

    def node(self, name: str) -> str:
        value = self.text(name, "the name of this node")
        if name not in self.wrong and not _NODE_NAME.fullmatch(value):
            self._complain(name, f"{value!r} is no name: letters, digits, '.' and '-', at most 63 of them")
        return value

    def address(self, name: str, default: str | None = None, *, may_be_empty: bool = False) -> str:
        value = self.text(name, 'an address like "10.0.0.1:7070"', default)
        given = name in self._values and name not in self.wrong
        if given and not (may_be_empty and not value):
            try:
                split_address(value)
            except ValueError as error:
                self._complain(name, str(error))
        return value

    def path(self, name: str, default: str | None = None) -> Path:
        value = self.text(name, "an absolute path", default)
        if name not in self.wrong and not _is_absolute(value):
            self._complain(name, f"{value!r} is not an absolute path without '..'")
        return Path(value or "/")

    def folder(self, name: str) -> str:
        """A folder that has to be there, or "" where none is named."""
        if not self.text(name, "an absolute path", ""):
            return ""
        path = self.path(name)
        if name not in self.wrong and not os.path.isdir(path):
            self._complain(name, f"{path} is not a directory")
        return str(path)

    def paths(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        values = self._take(name, list, "a list of absolute paths", list(default))
        bad = [value for value in values if not isinstance(value, str) or not _is_absolute(value)]
        if bad:
            self._complain(name, f"these are not absolute paths: {', '.join(map(repr, bad))}")
            return ()
        return tuple(str(Path(value)) for value in values)

    def credentials(self, name: str) -> Credentials:
        values = self._take(name, dict, "a table [tls] with ca, cert and key", None)
        if name in self.wrong:
            return Credentials(Path("/"), Path("/"), Path("/"))
        table = _Table(values, f"{name}.", self._found)
        credentials = Credentials(table.path("ca"), table.path("cert"), table.path("key"))
        table.finish()
        if table.wrong:
            self.wrong.add(name)
        return credentials

    def criu(self, name: str) -> tuple[str, str]:
        explicit = str(self.path(name, "/")) if name in self._values else None
        self._known.append(name)
        if name in self.wrong:
            return "", ""
        try:
            return find_criu(explicit)
        except BadConfig as error:
            self._complain(name, error.message)
            return "", ""

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self.text(name, f"one of {', '.join(choices)}", default)
        if name not in self.wrong and value not in choices:
            self._complain(name, f"{value!r} is none of {', '.join(choices)}")
        return value

    def integer(self, name: str, default: int, *, least: int, most: int) -> int:
        value: int = self._take(name, int, "a whole number", default)
        if not least <= value <= most:
            self._complain(name, f"{value} is not between {least} and {most}")
        return value

    def seconds(self, name: str, default: float, *, least: float, most: float) -> float:
        value = float(self._take(name, (int, float), "a number of seconds", default))
        if not least <= value <= most:
            self._complain(name, f"{value:g} is not between {least:g} and {most:g} seconds")
        return value

    def finish(self) -> None:
        """Whatever nobody asked for is a mistake: a misspelt key must not be a silent default."""
        for name in sorted(set(self._values) - set(self._known)):
            near = difflib.get_close_matches(name, sorted(set(self._known) - set(self._values)) or self._known, n=1)
            self._complain(name, "unknown key" + (f"; did you mean {self._prefix}{near[0]}?" if near else ""))


def _is_absolute(path: str) -> bool:
    return path.startswith("/") and "\0" not in path and ".." not in Path(path).parts


def split_address(address: str) -> tuple[str, int]:
    """("10.0.0.1", 7070) from "10.0.0.1:7070"; IPv6 in brackets. ValueError says what is wrong with it."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f'{address!r} is no address with a port, like "10.0.0.1:7070"')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{address!r}: {host!r} is no IPv6 address") from None
        return host, int(port)
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"{address!r}: {host!r} is no IPv4 address") from None
    elif not _NODE_NAME.fullmatch(host):
        raise ValueError(f"{address!r}: {host!r} is neither an address nor a name (IPv6 goes into brackets)")
    return host, int(port)


def find_criu(explicit: str | None) -> tuple[str, str]:
    """(path, version) of the CRIU to use, at least 4.2; BadConfig says what was found instead.

    One that is named, in the file or by $SNAPSHOT_CRIU, is the only one looked at; otherwise the first that is new
    enough: on PATH, in /opt/snapshotd/criu, in the checkout's .criu.
    """
    least = ".".join(map(str, CRIU_LEAST))
    named = explicit or os.environ.get("SNAPSHOT_CRIU")
    if named:
        version = _criu_version(named)
        if _numbers(version) < CRIU_LEAST:
            raise BadConfig(f"{named} is CRIU {version}; at least {least} is needed ({_GET_CRIU})")
        return named, version
    seen = []
    for candidate in [shutil.which("criu"), *(str(path) for path in PRIVATE_CRIU if path.exists())]:
        if candidate is None:
            continue
        try:
            version = _criu_version(candidate)
        except BadConfig as error:
            seen.append(error.message)
            continue
        if _numbers(version) >= CRIU_LEAST:
            return candidate, version
        seen.append(f"{candidate} is CRIU {version}")
    raise BadConfig(f"no CRIU {least} or newer ({_GET_CRIU}); found: {'; '.join(seen) or 'none at all'}")


def _criu_version(path: str) -> str:
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not answer --version"
        raise BadConfig(f"{path} cannot be run: {reason}") from error
    match = re.search(r"^Version: (\d+(?:\.\d+)*)", asked.stdout, re.MULTILINE)
    if asked.returncode != 0 or match is None:
        raise BadConfig(f"{path} is no CRIU: `--version` said {(asked.stdout + asked.stderr).strip()[:200]!r}")
    return match[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
