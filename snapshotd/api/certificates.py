"""Checks a node's certificate at start.

Otherwise a certificate that has expired, or belongs to another CA or node, would only appear as "unreachable" on an
operator's terminal: TLS does not tell the caller the reason. The daemon imports `cryptography` only for this check.
"""

from __future__ import annotations

from datetime import UTC, datetime

from snapshotd.api.channel import Credentials

__all__ = ["Credentials", "problems"]


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
        return [f"tls.ca: {credentials.ca} does not contain a PEM certificate"]
    try:
        cert = x509.load_pem_x509_certificate(contents["cert"])
    except ValueError:
        return [f"tls.cert: {credentials.cert} does not contain a PEM certificate"]
    try:
        key = load_pem_private_key(contents["key"], password=None)
    except (ValueError, TypeError):
        return [f"tls.key: {credentials.key} does not contain a PEM private key without a password"]

    found = []
    if key.public_key() != cert.public_key():
        found.append(f"tls.key: {credentials.key} is not the key of {credentials.cert}")
    now = datetime.now(UTC)
    if now > cert.not_valid_after_utc:
        found.append(f"tls.cert: {credentials.cert} expired on {cert.not_valid_after_utc:%Y-%m-%d}")
    if now < cert.not_valid_before_utc:
        found.append(f"tls.cert: {credentials.cert} is not valid before {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")

    def issued_by(authority: x509.Certificate) -> bool:
        try:
            cert.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    # If `cert` is a chain, the CA need not have issued its first certificate; then TLS itself decides.
    if contents["cert"].count(b"BEGIN CERTIFICATE") == 1 and not any(map(issued_by, authorities)):
        found.append(f"tls.cert: {credentials.cert} was not issued by {credentials.ca}")
    names = [str(item.value) for item in cert.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    if names != [f"node:{node}"]:
        found.append(
            f"tls.cert: {credentials.cert} is the certificate of {', '.join(names) or 'no one'}, but this node is node:{node}"
        )
    return found
