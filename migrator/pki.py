"""A small certificate authority for a cluster that has none.

Invariants: an existing CA is never overwritten, nor is an identity that is still valid. A private key is created with mode
0600 and never exists on disk with another mode. The common name, "node:NAME" or "operator:NAME", is the identity that
`snapshotd/api/access.py` checks. The name is also in the SAN, where TLS looks for the name of a node.

The directory contains ca.crt, ca.key, nodes/NAME.{crt,key} and operators/NAME.{crt,key}. A node or an operator needs only
ca.crt and its own pair.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from snapshotd.api.errors import BadConfig, Busy, NotFound, Usage

CA_VALID = timedelta(days=3653)
LEAF_VALID = timedelta(days=731)
#: The clocks of a cluster differ slightly, and a new certificate must be valid on all nodes at once.
CLOCK_SKEW = timedelta(minutes=10)

#: A name is used as a host name in a certificate and as a file name, so no other characters are allowed.
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Identity:
    """The three PEM files that the [tls] table of a configuration names."""

    ca: Path
    cert: Path
    key: Path


def init(folder: Path) -> Path:
    """Creates a CA in `folder` and returns the path of its certificate. Raises Busy if the folder already has one."""
    cert_path, key_path = folder / "ca.crt", folder / "ca.key"
    for path in (cert_path, key_path):
        if path.exists():
            raise Busy(
                f"{path} exists: a CA is never overwritten",
                remedy="use the CA that is there, or name another folder",
            )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Usage(f"{folder} cannot be made: {error.strerror}", remedy="name a folder you may write to") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "snapshotd CA")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + CA_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    # The key is written first, so that a CA whose certificate exists has its key even after an interruption.
    _write(key_path, _pem(key), 0o600)
    _write(cert_path, builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), 0o644)
    return cert_path


def issue_node(folder: Path, name: str, addresses: Iterable[str] = ()) -> Identity:
    """Creates the identity of a node's daemon, which serves calls and calls other daemons; `addresses` are its IPs."""
    checked = []
    for address in addresses:
        try:
            checked.append(ipaddress.ip_address(address))
        except ValueError as error:
            raise Usage(
                f"{address!r} is not an IP address", remedy="give addresses like 10.0.0.1 or fd00::1"
            ) from error
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _issue(folder, "node", name, [x509.IPAddress(address) for address in checked], purposes)


def issue_operator(folder: Path, name: str) -> Identity:
    """Creates the identity of a person or program that requests moves. It cannot be used as a server certificate."""
    return _issue(folder, "operator", name, [], [ExtendedKeyUsageOID.CLIENT_AUTH])


def _issue(
    folder: Path,
    role: str,
    name: str,
    addresses: list[x509.IPAddress],
    purposes: list[x509.ObjectIdentifier],
) -> Identity:
    common_name = f"{role}:{name}"
    # X.509 limits a common name to 64 characters.
    if not NAME.fullmatch(name) or ".." in name or len(common_name) > 64:
        raise Usage(
            f"{name!r} cannot be the name of a certificate",
            remedy="use letters, digits, '-' and '.', a letter or digit at both ends, at most 55 characters",
        )
    ca_cert, ca_key = _load_ca(folder)
    leaf = folder / f"{role}s"
    identity = Identity(ca=folder / "ca.crt", cert=leaf / f"{name}.crt", key=leaf / f"{name}.key")
    _make_room(identity, common_name)
    leaf.mkdir(mode=0o700, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(ca_cert.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(min(now + LEAF_VALID, ca_cert.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name), *addresses]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    _write(identity.key, _pem(key), 0o600)
    _write(identity.cert, builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), 0o644)
    return identity


def _load_ca(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        cert_pem, key_pem = (folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"there is no CA in {folder}", remedy="make one with `migrator pki init`") from error
    except OSError as error:
        raise BadConfig(f"{error.filename} cannot be read: {error.strerror}", remedy="run it as the owner") from error
    try:
        cert = x509.load_pem_x509_certificate(cert_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise BadConfig(f"the CA in {folder} is damaged: {error}", remedy="restore ca.crt and ca.key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise BadConfig(f"ca.key in {folder} is not the key of ca.crt", remedy="restore ca.crt and ca.key")
    if cert.not_valid_after_utc <= datetime.now(UTC):
        raise BadConfig(
            f"the CA in {folder} expired on {cert.not_valid_after_utc:%Y-%m-%d}",
            remedy="make a new CA in another folder and give every node and operator a new identity",
        )
    return cert, key


def _make_room(identity: Identity, common_name: str) -> None:
    """Removes an expired or incomplete identity. Raises Busy if the identity is still valid."""
    if not identity.cert.exists():
        identity.key.unlink(missing_ok=True)
        return
    try:
        expires = x509.load_pem_x509_certificate(identity.cert.read_bytes()).not_valid_after_utc
    except ValueError as error:
        raise BadConfig(
            f"{identity.cert} is damaged: {error}", remedy="delete it and its key, then try again"
        ) from error
    if expires > datetime.now(UTC):
        raise Busy(
            f"{common_name} has a certificate in {identity.cert}, valid until {expires:%Y-%m-%d}",
            remedy="use it, or delete it and its key first",
        )
    identity.cert.unlink()
    identity.key.unlink(missing_ok=True)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Creates `path` with its final mode. Raises Busy if the file already exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError as error:
        raise Busy(f"another process has just created {path}", remedy="try again") from error
    except OSError as error:
        raise Usage(f"{path} cannot be written: {error.strerror}", remedy="name a folder you may write to") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
