"""Who may act on the page: operators with a token or a certificate, in requests that come from the page itself.

Invariants: a token is compared by its digest, and is neither logged nor recorded. It travels in the Authorization header,
which a browser never adds by itself, so a page of another origin cannot act with it. A browser shows a certificate to
every page, so this header must say that it is to be used ("Certificate"). A request that names another origin is refused
also with a valid token or certificate.

A file of tokens has a line "NAME TOKEN" for each operator. The name is recorded with what the operator does.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import BadConfig
from snapshotd.api.revocation import peer_of, revocations_of

FILE = "page-tokens"
LEAST_CHARACTERS = 32
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._@-]{0,63})\s+([!-~]+)")


@dataclass(frozen=True)
class Tokens:
    names: Mapping[bytes, str]  # by the digest of the token

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Raises BadConfig if the file cannot be used, or other users can read it."""
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                lines = file.read().decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadConfig(
                f"the tokens in {path} cannot be read: {error}", remedy="correct the file, or name another one"
            ) from error
        if mode & 0o077:
            raise BadConfig(f"other users can read the tokens in {path}", remedy=f"chmod 600 {path}")
        names: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None or len(match[2]) < LEAST_CHARACTERS:
                raise BadConfig(
                    f"{path}, line {number}: not a name and a token of at least {LEAST_CHARACTERS} characters",
                    remedy="make a token with `openssl rand -hex 32`",
                )
            names[_digest(match[2])] = match[1]
        if not names:
            raise BadConfig(f"{path} contains no token", remedy='add a line "NAME TOKEN" for each operator')
        return cls(names)

    @classmethod
    def of_folder(cls, folder: Path) -> tuple[Tokens, Path]:
        """The tokens in the state folder. If there are none, one is made for "operator"."""
        path = folder / FILE
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return cls.read(path), path
        with os.fdopen(descriptor, "w") as file:
            file.write(f"operator {secrets.token_hex(32)}\n")
        return cls.read(path), path

    def operator(self, authorization: str) -> str:
        """The name for an Authorization header; empty if it allows no action."""
        scheme, _, token = authorization.partition(" ")
        given, found = _digest(token.strip()), ""
        for known, name in self.names.items():
            if hmac.compare_digest(known, given) and scheme.lower() == "bearer":
                found = name
        return found


class Certificates:
    """Operators with a certificate of the cluster's CA, as daemons know them: its one common name is "operator:NAME", and it
    is not in the list of revoked certificates beside the CA's file. TLS has verified it."""

    def __init__(self, ca: Path) -> None:
        """Raises BadConfig if the list of revoked certificates is damaged."""
        self._revocations = revocations_of(ca)

    def operator(self, pem: bytes) -> str:
        """The name of the operator; empty if the certificate allows no action."""
        try:
            peer = peer_of(pem)
        except ValueError:  # there is none
            return ""
        role, _, name = peer.common_names[0].partition(":") if len(peer.common_names) == 1 else ("", "", "")
        return name if role == "operator" and not self._revocations.revoked(peer.serial) else ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def from_elsewhere(headers: Mapping[str, str], scheme: str) -> bool:
    """Whether a browser says that the request was made by a page of another origin. Other programs say nothing."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin != f"{scheme}://{headers.get('host', '')}":
        return True
    return site is not None and site != "same-origin"
