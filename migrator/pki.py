"""A small certificate authority for a cluster that has none.

Invariants: an existing CA is never overwritten, nor is an identity that is still valid, except by `renew`. A private key is
created with mode 0600 and never exists on disk with another mode. Every certificate is listed in `issued` before it exists,
so that all certificates of a name can be revoked, also those that were replaced. The common name, "node:NAME" or
"operator:NAME", is the identity that `snapshotd/api/access.py` checks. The name is also in the SAN, where TLS looks for the
name of a node.

The directory contains ca.crt, ca.key, issued, nodes/NAME.{crt,key}, operators/NAME.{crt,key}, and ca.crl once a certificate
was revoked. While the CA is being replaced (ca_rotation.py), ca.crt has two certificates; the one of ca.key signs. A node or
an operator needs only ca.crt and its own pair, a node also ca.crl. Certificates are valid for 90 days: `renew`, run from a
timer, replaces them in time, and daemons use the new files without a restart.
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
LEAF_VALID = timedelta(days=90)
#: `renew` replaces what expires earlier than this.
RENEW_BEFORE = timedelta(days=45)
#: How long a list of revoked certificates counts as fresh; `renew` makes a new one.
CRL_VALID = LEAF_VALID
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
    if key_path.exists() and not any((folder / name).exists() for name in ("ca.crt", "issued", "nodes", "operators")):
        key_path.unlink()  # of an `init` that was interrupted: it has signed nothing
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
    key, cert = new_authority()
    # The key is written first, so that a CA whose certificate exists has its key even after an interruption.
    write_new(key_path, pem_of(key), 0o600)
    write_new(cert_path, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return cert_path


def new_authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """A CA that is not stored yet. Each has a name of its own: two may be trusted at the same time."""
    key, serial = ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"snapshotd CA {serial:040x}"[:21])])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + CA_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, builder.sign(key, hashes.SHA256())


def issue_node(folder: Path, name: str, addresses: Iterable[str] = (), *, replace: bool = False) -> Identity:
    """Creates the identity of a node's daemon, which serves calls and calls other daemons; `addresses` are its IPs.

    With `replace` also if there is one that is still valid, which stays valid until it expires.
    """
    checked = []
    for address in addresses:
        try:
            checked.append(ipaddress.ip_address(address))
        except ValueError as error:
            raise Usage(
                f"{address!r} is not an IP address", remedy="give addresses like 10.0.0.1 or fd00::1"
            ) from error
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _issue(folder, "node", name, [x509.IPAddress(address) for address in checked], purposes, replace)


def issue_operator(folder: Path, name: str) -> Identity:
    """Creates the identity of a person or program that requests moves. It cannot be used as a server certificate."""
    return _issue(folder, "operator", name, [], [ExtendedKeyUsageOID.CLIENT_AUTH])


def renew(folder: Path, within: timedelta = RENEW_BEFORE) -> list[Identity]:
    """Replaces every identity that expires `within` that time, with a new key, and the list of revoked certificates.

    The certificates that were replaced stay valid until they expire: copy the new files before that.
    """
    renewed: list[Identity] = []
    for role in ("node", "operator"):
        paths = sorted((folder / f"{role}s").glob("*.crt"))
        soon = [path for path in paths if read_certificate(path).not_valid_after_utc - datetime.now(UTC) <= within]
        renewed += [reissue(folder, role, path.name.removesuffix(".crt")) for path in soon]
    refresh_crl(folder)
    return renewed


def reissue(folder: Path, role: str, name: str) -> Identity:
    """Replaces the identity by one with the same names, a new key, and the present CA's signature."""
    identity = identity_of(folder, role, name)
    cert = read_certificate(identity.cert)
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [x509.IPAddress(address) for address in names.get_values_for_type(x509.IPAddress)]
    purposes = list(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    _replace(folder, identity, load_ca(folder), role, name, addresses, purposes)
    return identity


def _replace(
    folder: Path,
    identity: Identity,
    ca: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    role: str,
    name: str,
    addresses: list[x509.IPAddress],
    purposes: list[x509.ObjectIdentifier],
) -> None:
    new = Identity(identity.ca, Path(f"{identity.cert}.new"), Path(f"{identity.key}.new"))
    for left in (new.cert, new.key):
        left.unlink(missing_ok=True)  # of a run that was interrupted
    _sign(folder, new, ca, role, name, addresses, purposes)
    os.replace(new.key, identity.key)
    os.replace(new.cert, identity.cert)


def identity_of(folder: Path, role: str, name: str) -> Identity:
    leaf = folder / f"{role}s"
    return Identity(ca=folder / "ca.crt", cert=leaf / f"{name}.crt", key=leaf / f"{name}.key")


def refresh_crl(folder: Path) -> None:
    """Signs the list of revoked certificates anew, if there is one, with the present CA."""
    if (folder / "ca.crl").exists():
        _write_crl(folder, *load_ca(folder), {})


def revoke(folder: Path, common_name: str) -> tuple[Path, list[int]]:
    """Revokes all certificates of "node:NAME" or "operator:NAME" that have not expired, and forgets its present identity.

    Returns the path of the list, which must be copied to every node, and the serial numbers. Raises NotFound if there are
    none.
    """
    ca_cert, ca_key = load_ca(folder)
    role, _, name = common_name.partition(":")
    if role not in ("node", "operator") or not NAME.fullmatch(name):
        raise Usage(
            f"{common_name!r} is not the name of a certificate", remedy='name it as "node:NAME" or "operator:NAME"'
        )
    identity = identity_of(folder, role, name)
    serials = {serial: expires for serial, (issued, expires) in _issued(folder).items() if issued == common_name}
    if identity.cert.exists():  # it may be older than the file `issued`
        cert = read_certificate(identity.cert)
        serials[cert.serial_number] = cert.not_valid_after_utc
    serials = {serial: expires for serial, expires in serials.items() if expires > datetime.now(UTC)}
    if not serials:
        raise NotFound(f"{common_name} has no valid certificate of the CA in {folder}")
    path = _write_crl(folder, ca_cert, ca_key, serials)
    identity.key.unlink(missing_ok=True)
    identity.cert.unlink(missing_ok=True)
    return path, sorted(serials)


def _write_crl(
    folder: Path, ca_cert: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, added: dict[int, datetime]
) -> Path:
    """Replaces ca.crl by one with these serial numbers in addition, and without certificates that have expired."""
    path, now = folder / "ca.crl", datetime.now(UTC)
    issued = _issued(folder)
    entries: dict[int, datetime] = dict.fromkeys(added, now)
    if path.exists():
        try:
            former = x509.load_pem_x509_crl(path.read_bytes())
        except ValueError as error:
            raise BadConfig(f"{path} is damaged: {error}", remedy="restore it from a node") from error
        for entry in former:
            expires = issued.get(entry.serial_number, ("", ca_cert.not_valid_after_utc))[1]
            if expires > now:
                entries[entry.serial_number] = entry.revocation_date_utc
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca_cert.subject)
        .last_update(now - CLOCK_SKEW)
        .next_update(now + CRL_VALID)
    )
    for serial, when in entries.items():
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
        builder = builder.add_revoked_certificate(revoked)
    new = path.with_suffix(".crl.new")
    new.unlink(missing_ok=True)
    write_new(new, builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), 0o644)
    os.replace(new, path)
    return path


def _issued(folder: Path) -> dict[int, tuple[str, datetime]]:
    """Common name and expiry of every certificate that this CA has issued, by serial number."""
    try:
        lines = (folder / "issued").read_text().splitlines()
    except FileNotFoundError:
        return {}
    found = {}
    for line in lines:
        serial, name, expires = line.split()
        found[int(serial, 16)] = (name, datetime.fromisoformat(expires))
    return found


def _issue(
    folder: Path,
    role: str,
    name: str,
    addresses: list[x509.IPAddress],
    purposes: list[x509.ObjectIdentifier],
    replace: bool = False,
) -> Identity:
    common_name = f"{role}:{name}"
    # X.509 limits a common name to 64 characters.
    if not NAME.fullmatch(name) or ".." in name or len(common_name) > 64:
        raise Usage(
            f"{name!r} cannot be the name of a certificate",
            remedy="use letters, digits, '-' and '.', a letter or digit at both ends, at most 55 characters",
        )
    ca = load_ca(folder)
    identity = identity_of(folder, role, name)
    if not replace:
        _make_room(identity, common_name)
    identity.cert.parent.mkdir(mode=0o700, exist_ok=True)
    (_replace if replace else _sign)(folder, identity, ca, role, name, addresses, purposes)
    return identity


def _sign(
    folder: Path,
    identity: Identity,
    ca: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    role: str,
    name: str,
    addresses: list[x509.IPAddress],
    purposes: list[x509.ObjectIdentifier],
) -> None:
    """Makes a key and its certificate, in new files."""
    ca_cert, ca_key = ca
    common_name, serial = f"{role}:{name}", x509.random_serial_number()
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    expires = min(now + LEAF_VALID, ca_cert.not_valid_after_utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(ca_cert.subject)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(expires)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name), *addresses]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    try:
        with open(folder / "issued", "a") as issued:
            issued.write(f"{serial:x} {common_name} {expires.isoformat()}\n")
            issued.flush()
            os.fsync(issued.fileno())
    except OSError as error:
        raise _not_written(folder / "issued", error) from error
    write_new(identity.key, pem_of(key), 0o600)
    write_new(identity.cert, builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), 0o644)


def load_ca(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The CA that signs: ca.key, and the certificate in ca.crt that belongs to it."""
    try:
        cert_pem, key_pem = (folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"there is no CA in {folder}", remedy="make one with `migrator pki init`") from error
    except OSError as error:
        raise BadConfig(f"{error.filename} cannot be read: {error.strerror}", remedy="run it as the owner") from error
    if (folder / "ca.key").stat().st_mode & 0o077:
        raise BadConfig(
            f"{folder / 'ca.key'} can be read by users other than its owner",
            remedy=f"run `chmod 600 {folder / 'ca.key'}`, and make a new CA if another user may have read it",
        )
    try:
        certs = x509.load_pem_x509_certificates(cert_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise BadConfig(f"the CA in {folder} is damaged: {error}", remedy="restore ca.crt and ca.key") from error
    own = [cert for cert in certs if cert.public_key() == key.public_key()]
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not own:
        raise BadConfig(f"ca.key in {folder} is not the key of ca.crt", remedy="restore ca.crt and ca.key")
    cert = own[0]
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
    expires = read_certificate(identity.cert).not_valid_after_utc
    if expires > datetime.now(UTC):
        raise Busy(
            f"{common_name} has a certificate in {identity.cert}, valid until {expires:%Y-%m-%d}",
            remedy="use it, replace it with `migrator pki renew`, or revoke it with `migrator pki revoke`",
        )
    identity.cert.unlink()
    identity.key.unlink(missing_ok=True)


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise BadConfig(f"{path} is damaged: {error}", remedy="delete it and its key, then try again") from error


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


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Creates `path` with its final mode. Raises Busy if the file already exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError as error:
        raise Busy(f"another process has just created {path}", remedy="try again") from error
    except OSError as error:
        raise Usage(f"{path} cannot be written: {error.strerror}", remedy="name a folder you may write to") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink()
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> BadConfig:
    return BadConfig(f"{path} cannot be written: {error.strerror}", remedy="make room there, then run it again")
