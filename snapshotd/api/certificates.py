"""Checks a node's certificate at start, and warns before it expires.

Otherwise a certificate that has expired, or belongs to another CA or node, would only appear as "unreachable" on an
operator's terminal: TLS does not tell the caller the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from snapshotd.api import revocation
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig

__all__ = ["Credentials", "content_problems", "expiry", "problems", "warnings"]

#: A stolen key is good until its certificate expires, wherever the list of revoked certificates does not reach.
LONGEST_VALID = timedelta(days=90)
WARN_BEFORE = timedelta(days=30)


def problems(credentials: Credentials, node: str) -> list[str]:
    """Why `credentials` cannot be those of `node`; empty if they can. Never raises."""
    found = []
    contents: dict[str, bytes] = {}
    for name in ("ca", "cert", "key"):
        path = getattr(credentials, name)
        try:
            contents[name] = path.read_bytes()
        except OSError as error:
            found.append(f"tls.{name}: {path} cannot be read: {error.strerror}")
            continue
        if name == "key" and path.stat().st_mode & 0o077:
            found.append(f"tls.key: {path} can be read by users other than its owner; run `chmod 600 {path}`")
        if name == "key" and path.stat().st_uid not in (0, os.geteuid()):
            found.append(f"tls.key: {path} belongs to another user; run `chown root {path}`")
    if len(contents) < 3:
        return found
    try:
        revocation.load(credentials.ca)
    except BadConfig as error:
        found.append(f"tls.ca: {error.message}")
    names = {name: str(getattr(credentials, name)) for name in contents}
    return found + content_problems(contents, names, node)


def expiry(credentials: Credentials) -> datetime | None:
    """When the certificate expires; None if it cannot be read."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(credentials.cert.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return None


def warnings(credentials: Credentials) -> list[str]:
    """What will soon be a problem with `credentials`. Never raises."""
    from cryptography import x509

    try:
        cert = x509.load_pem_x509_certificate(credentials.cert.read_bytes())
    except (OSError, ValueError) as error:
        return [f"tls.cert: {credentials.cert} cannot be read: {error}"]
    found, now = [], datetime.now(UTC)
    left, valid = cert.not_valid_after_utc - now, cert.not_valid_after_utc - cert.not_valid_before_utc
    if left < WARN_BEFORE:
        when = (
            f"expires on {cert.not_valid_after_utc:%Y-%m-%d}, in {left.days} days" if left.days >= 0 else "has expired"
        )
        found.append(f"tls.cert: {credentials.cert} {when}; run `migrator cluster rotate` and join again")
    if valid > LONGEST_VALID + timedelta(days=1):
        found.append(
            f"tls.cert: {credentials.cert} is valid for {valid.days} days; a stolen key is good for as long where the list of"
            f" revoked certificates is not known: issue certificates for at most {LONGEST_VALID.days} days"
        )
    try:
        crl = revocation.load(credentials.ca)
    except BadConfig as error:
        return [*found, f"tls.ca: {error.message}"]
    if crl is not None and crl.next_update_utc is not None and crl.next_update_utc < now:
        path = revocation.crl_path(credentials.ca)
        found.append(
            f"tls.ca: {path} should have been replaced by {crl.next_update_utc:%Y-%m-%d}: run `migrator cluster rotate`"
        )
    return found


def content_problems(contents: Mapping[str, bytes], names: Mapping[str, str], node: str) -> list[str]:
    """The same of contents: "ca", "cert" and "key", which `names` calls by their names in messages."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        authorities = x509.load_pem_x509_certificates(contents["ca"])
    except ValueError:
        return [f"tls.ca: {names['ca']} does not contain a PEM certificate"]
    try:
        cert = x509.load_pem_x509_certificate(contents["cert"])
    except ValueError:
        return [f"tls.cert: {names['cert']} does not contain a PEM certificate"]
    try:
        key = load_pem_private_key(contents["key"], password=None)
    except (ValueError, TypeError):
        return [f"tls.key: {names['key']} does not contain a PEM private key without a password"]

    found = []
    if key.public_key() != cert.public_key():
        found.append(f"tls.key: {names['key']} is not the key of {names['cert']}")
    now = datetime.now(UTC)
    if now > cert.not_valid_after_utc:
        found.append(f"tls.cert: {names['cert']} expired on {cert.not_valid_after_utc:%Y-%m-%d}")
    if now < cert.not_valid_before_utc:
        found.append(f"tls.cert: {names['cert']} is not valid before {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")

    def issued_by(authority: x509.Certificate) -> bool:
        try:
            cert.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    # If `cert` is a chain, the CA need not have issued its first certificate; then TLS itself decides.
    if contents["cert"].count(b"BEGIN CERTIFICATE") == 1 and not any(map(issued_by, authorities)):
        found.append(f"tls.cert: {names['cert']} was not issued by {names['ca']}")
    shown = [str(item.value) for item in cert.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    if shown != [f"node:{node}"]:
        found.append(
            f"tls.cert: {names['cert']} is the certificate of {', '.join(shown) or 'no one'}, but this node is node:{node}"
        )
    return found
