"""What is wrong with a node's certificate, found at start and said in words.

A certificate that is expired, of another CA, or of another node otherwise shows only as "unreachable" on somebody's
terminal elsewhere: TLS tells the caller nothing. The daemon's own process imports `cryptography` here alone, while checking.
"""

from __future__ import annotations

from datetime import UTC, datetime

from snapshotd.api.channel import Credentials

__all__ = ["Credentials", "problems"]


def problems(credentials: Credentials, node: str) -> list[str]:
    """All that keeps `credentials` from being those of `node`; empty when they are good. Never raises."""
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
            found.append(f"tls.key: {path} can be read by others than its owner: chmod 600 it")
    if len(contents) < 3:
        return found
    return found + _content_problems(credentials, contents, node)


def _content_problems(credentials: Credentials, contents: dict[str, bytes], node: str) -> list[str]:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        authorities = x509.load_pem_x509_certificates(contents["ca"])
    except ValueError:
        return [f"tls.ca: {credentials.ca} holds no PEM certificate"]
    try:
        cert = x509.load_pem_x509_certificate(contents["cert"])
    except ValueError:
        return [f"tls.cert: {credentials.cert} holds no PEM certificate"]
    try:
        key = load_pem_private_key(contents["key"], password=None)
    except (ValueError, TypeError):
        return [f"tls.key: {credentials.key} holds no PEM private key without a password"]

    found = []
    if key.public_key() != cert.public_key():
        found.append(f"tls.key: {credentials.key} is not the key of {credentials.cert}")
    now = datetime.now(UTC)
    if now > cert.not_valid_after_utc:
        found.append(f"tls.cert: {credentials.cert} expired on {cert.not_valid_after_utc:%Y-%m-%d}")
    if now < cert.not_valid_before_utc:
        found.append(f"tls.cert: {credentials.cert} is valid from {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC only")

    def issued_by(authority: x509.Certificate) -> bool:
        try:
            cert.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    # A chain in `cert` may lead to the CA over others: then the first link is not the CA's, and TLS itself decides.
    if contents["cert"].count(b"BEGIN CERTIFICATE") == 1 and not any(map(issued_by, authorities)):
        found.append(f"tls.cert: {credentials.cert} was not issued by {credentials.ca}")
    names = [str(item.value) for item in cert.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    if names != [f"node:{node}"]:
        found.append(f"tls.cert: {credentials.cert} is the certificate of {names}, this is node:{node}")
    return found
