"""A signed copy of the event log, for people without access to the cluster: they need the operator's certificate alone.

A bundle is text. Line 1 is the manifest: JSON with the operator's name, the fingerprint of the certificate, the time, and the
digest of every record. Line 2 is the signature of line 1 (without its end of line) in base64: ECDSA or RSA PKCS #1 v1.5, with
SHA-256. Each line after these is a record, byte for byte as chain.py digests it, so `sha256sum` and `openssl` can check
a bundle too.

Invariant: nothing that the bundle says is believed before its signature was verified with a key from outside the bundle.
A bundle proves what the holder of the key exported. It does not prove that the log was complete before that: a digest that
was kept elsewhere does.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

from migrator.autopilot import chain
from migrator.autopilot.chain import Record
from snapshotd.api.errors import BadConfig, Damaged, NotFound

FORMAT = "migrator-report-bundle-1"


class Manifest(msgspec.Struct, frozen=True):
    """Line 1. `digests` are those of the records, in their order."""

    format: str
    operator: str
    certificate_sha256: str
    exported_unix_s: float
    digests: list[str]


@dataclass(frozen=True)
class Verified:
    """What a signed manifest says, and the first thing in the bundle that does not agree with it (empty: nothing)."""

    manifest: Manifest
    problems: list[str]

    @property
    def head(self) -> str:
        return self.manifest.digests[-1] if self.manifest.digests else chain.START


def make(records: Sequence[Record], cert: Path, key: Path, now_unix_s: float) -> bytes:
    """The bundle. Raises Damaged if the log is not intact, BadConfig if it cannot be signed with these files."""
    if problems := chain.problems(records):
        raise Damaged(
            f"the event log is not intact, so it is not signed: {problems[0]}",
            remedy="`migrator report verify` lists what is wrong; compare it with a backup of the state's folder",
        )
    certificate, private = certificate_of(cert), _key(key)
    if certificate.public_key() != private.public_key():
        raise BadConfig(f"{key} is not the key of {cert}", remedy="name the two files of one operator")
    if wrong := _unusable(certificate, now_unix_s):
        raise BadConfig(f"{cert} {wrong}", remedy="use the present certificate of an operator")
    manifest = Manifest(
        FORMAT, _name(certificate), _fingerprint(certificate), round(now_unix_s, 3), [one.digest for one in records]
    )
    first = msgspec.json.encode(manifest)
    second = base64.b64encode(_sign(private, first))
    return b"".join(line + b"\n" for line in (first, second, *(one.content() for one in records)))


def verify(bundle: bytes, cert: Path, head: str = "") -> Verified:
    """Compares a bundle with its signature. Raises Damaged if it was not signed with the key of this certificate.

    `head` is a digest that the log must contain.
    """
    certificate = certificate_of(cert)
    first, _, rest = bundle.partition(b"\n")
    second, _, body = rest.partition(b"\n")
    manifest = _manifest(first)
    own = _fingerprint(certificate)
    if manifest.certificate_sha256 != own:
        raise Damaged(
            f"the bundle says that it was signed with another certificate: {manifest.operator}, SHA-256 "
            f"{manifest.certificate_sha256}; {cert} is {_name(certificate)}, SHA-256 {own}",
            remedy="ask the operator for the certificate that was used then; if this is the one, the bundle was altered",
        )
    if not _is_signed(certificate, first, second):
        raise Damaged(
            f"the signature was not made with the key of {cert}, or line 1 or 2 was altered. Nothing in the bundle can be "
            "believed",
            remedy="get the bundle again from the operator",
        )
    if wrong := _unusable(certificate, manifest.exported_unix_s):
        return Verified(manifest, [f"{cert} {wrong}"])
    if manifest.operator != _name(certificate):
        return Verified(manifest, [f"the bundle names {manifest.operator}, the certificate {_name(certificate)}"])
    if wrong := _first_difference(body, manifest.digests):
        return Verified(manifest, [wrong])
    return Verified(manifest, chain.problems(_records(body, manifest.digests), head))


def _first_difference(body: bytes, digests: list[str]) -> str:
    """The first record that was altered, removed, added or put elsewhere, in words. Empty: there is none."""
    *lines, end = body.split(b"\n")
    found = [hashlib.sha256(line).hexdigest() for line in lines]
    for at, signed in enumerate(digests):
        number = at + 1
        if at == len(found):
            cut = "in the middle of it" if end else f"after record {at}" if at else "before the first record"
            return f"record {number} of {len(digests)} is missing: the bundle ends {cut}"
        if found[at] == signed:
            continue
        other = digests.index(found[at]) + 1 if found[at] in digests else 0
        if signed in found[at:]:
            what = f"record {other}" if other else "a line that was not signed"
            return f"record {number} is not in its place: {what} is there"
        if other:
            return f"record {number} is missing: record {other} is in its place"
        return f"record {number} was altered"
    if len(found) > len(digests) or end:
        return f"there is more after record {len(digests)}, the last one that was signed"
    return ""


def _records(body: bytes, digests: list[str]) -> list[Record]:
    """The records of a body that is as it was signed."""
    made = []
    for line, digest in zip(body.split(b"\n"), digests, strict=False):
        try:
            number, unix_s, kind, node, text, data, previous = msgspec.convert(
                json.loads(line), tuple[int, float, str, str, str, dict[str, Any], str]
            )
        except (ValueError, RecursionError) as error:
            raise Damaged(f"the bundle was signed with a line that is no record: {error}") from error
        made.append(Record(number, unix_s, kind, node, text, data, previous, digest))
    return made


def _manifest(line: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(line, type=Manifest)
    except ValueError as error:
        raise Damaged(
            f"line 1 is not the manifest of a bundle: {error}",
            remedy="check that the file was made by `migrator report export`, and get it again",
        ) from error
    if manifest.format != FORMAT:
        raise Damaged(
            f"the bundle has the format {manifest.format!r}, and this program knows {FORMAT}",
            remedy="verify it with the version of migrator that wrote it",
        )
    return manifest


# ---------------------------------------------------------------------- keys and certificates


def certificate_of(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise BadConfig(f"{path} is not a certificate: {error}", remedy="name a certificate as PEM") from error


def _key(path: Path) -> ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey:
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as error:
        raise BadConfig(f"{path} is not a key: {error}", remedy="name a key as PEM, without a password") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise BadConfig(f"{path} is neither an EC nor an RSA key", remedy="use the key of an operator")
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}", remedy="check its name") from error
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}", remedy="run it as the owner") from error


def _sign(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, content: bytes) -> bytes:
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(content, padding.PKCS1v15(), hashes.SHA256())
    return key.sign(content, ec.ECDSA(hashes.SHA256()))


def _is_signed(certificate: x509.Certificate, content: bytes, signature: bytes) -> bool:
    public = certificate.public_key()
    try:
        raw = base64.b64decode(signature, validate=True)
        if base64.b64encode(raw) != signature:  # several texts stand for the same bytes
            return False
        if isinstance(public, rsa.RSAPublicKey):
            public.verify(raw, content, padding.PKCS1v15(), hashes.SHA256())
            return True
        if isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(raw, content, ec.ECDSA(hashes.SHA256()))
            return True
    except (InvalidSignature, binascii.Error):
        pass
    return False


def _name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _unusable(certificate: x509.Certificate, unix_s: float) -> str:
    """Why nothing can have been signed with it at that time. A certificate that expired afterwards is still good."""
    if not _name(certificate).startswith("operator:"):
        return f"is the certificate of {_name(certificate) or 'an unnamed subject'}, not of an operator"
    first, last = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    if not first <= unix_s <= last:
        return f"is valid from {_day(first)} to {_day(last)}, and the time of the signature is {_day(unix_s)}"
    return ""


def _day(unix_s: float) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d}"
    except (OverflowError, ValueError, OSError):
        return f"{unix_s:g} s after 1970"
