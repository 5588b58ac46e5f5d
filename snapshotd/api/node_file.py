"""The file that makes a machine a node of a cluster: `migrator cluster add` writes it, `snapshotd join` reads it.

It is TOML, so that a person can see what is in it. It contains the node's private key: it is created with mode 0600, and is
refused if users other than its owner can read it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Meta

from snapshotd.api import toml_file
from snapshotd.api.addresses import NODE_NAME, split_address
from snapshotd.api.errors import BadConfig, NotFound

FORM = 1
SUFFIX = ".join"
#: With long chains and a long list of revoked certificates it stays far below this.
_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class NodeFile:
    """Texts are PEM; `crl` is empty if nothing was revoked."""

    node: str
    endpoint: str
    ca: str
    cert: str
    key: str
    crl: str = ""

    def text(self) -> str:
        lines = [
            f"# Makes a machine the node {self.node}. As root on that machine: snapshotd join {self.node}{SUFFIX}",
            "# It contains the private key of the node: copy it to no other place, and delete it after that.",
            f"form = {FORM}",
            f"node = {json.dumps(self.node)}",
            f"endpoint = {json.dumps(self.endpoint)}",
        ]
        parts = {"ca": self.ca, "cert": self.cert, "key": self.key, "crl": self.crl}
        lines += [f"{name} = '''\n{text.strip()}\n'''" for name, text in parts.items() if text]
        return "\n".join(lines) + "\n"


def _endpoint(text: str) -> str:
    split_address(text)
    return text


_PEM = Meta(pattern=r"^-----BEGIN ", description="a PEM text")


class _File(msgspec.Struct):
    form: Annotated[
        Literal[1],
        Meta(description=f"{FORM}: another one is of another version of snapshotd; install the same everywhere"),
    ]
    node: Annotated[str, Meta(pattern=rf"^{NODE_NAME}\Z", description="the name of a node")]
    endpoint: Annotated[str, toml_file.text('an address like "10.0.0.1:7070"', _endpoint)]
    ca: Annotated[str, _PEM]
    cert: Annotated[str, _PEM]
    key: Annotated[str, _PEM]
    crl: Annotated[str, Meta(pattern=r"^(-----BEGIN |\Z)", description="a PEM text")] = ""


def read(path: Path) -> NodeFile:
    """The file; "-" is standard input. Raises NotFound, and BadConfig with all its problems."""
    content = sys.stdin.buffer.read(_MAX_BYTES) if str(path) == "-" else _content(path)
    origin = "standard input" if str(path) == "-" else str(path)
    try:
        values = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(
            f"{origin} is not a file of `migrator cluster add`: {error}",
            remedy="copy it again: it may have been cut short",
        ) from error
    if "form" not in values:
        raise BadConfig(
            f"{origin} is not a file of `migrator cluster add`", remedy=f"give the file NODE{SUFFIX} that it wrote"
        )
    problems: list[str] = []
    found = toml_file.read(_File, _without_values(values), "", problems)
    toml_file.check(problems, origin)
    del found["form"]
    return NodeFile(**found)


def is_for(path: Path, node: str) -> bool:
    """True if `path` is such a file of that node, so that another one may replace it."""
    try:
        with _open_regular(path) as file:
            values = tomllib.loads(file.read(_MAX_BYTES).decode())
    except (OSError, ValueError):
        return False
    return "form" in values and values.get("node") == node and bool(re.match("-----BEGIN ", str(values.get("key"))))


def _without_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """A message quotes a wrong value, but never the text of a key."""
    wrong = isinstance(values.get("key"), str) and not str(values["key"]).startswith("-----BEGIN ")
    return {**values, "key": "(not shown)"} if wrong else dict(values)


def _content(path: Path) -> bytes:
    try:
        with _open_regular(path) as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in _trusted():
                raise BadConfig(
                    f"{path} belongs to user {found.st_uid}, who may know the key in it, or have exchanged it",
                    remedy=f"if that was you, run `chown root {path}`; if not, have a new one made with `migrator cluster"
                    " rotate NODE`, and copy it to a folder that only root can write to",
                )
            if found.st_mode & 0o077:
                raise BadConfig(
                    f"{path} contains a private key, and users other than its owner can read it",
                    remedy=f"run `chmod 600 {path}`; if another user may have read it, have a new one made with"
                    " `migrator cluster rotate NODE`",
                )
            return file.read(_MAX_BYTES)
    except _NotRegular as error:
        raise BadConfig(
            f"{path} is not a file", remedy=f"give the file NODE{SUFFIX}, or - for standard input"
        ) from error
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}", remedy="`migrator cluster add NODE ADDRESS` makes it") from error
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}", remedy="check its owner and mode") from error


class _NotRegular(OSError):
    pass


def _open_regular(path: Path) -> BinaryIO:
    """Opened without waiting: another user may have put a FIFO or a link to a device there. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _NotRegular(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def _trusted() -> set[int]:
    """Users whose files may be joined: root, this one, and the one who ran sudo."""
    by_sudo = os.environ.get("SUDO_UID", "")
    return {0, os.geteuid(), *([int(by_sudo)] if by_sudo.isascii() and by_sudo.isdigit() else [])}
