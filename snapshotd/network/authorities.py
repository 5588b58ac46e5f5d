"""CAs that the daemon trusted and trusts no more: their certificates are refused also on connections that are open already.

TLS checks a certificate when a connection is made. A CA is dropped because it was replaced, or because its key was stolen;
either way a connection that was made before must not go on for as long as the caller likes.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature


class Authorities:
    """The CAs of ca.crt, and those that were in it earlier in the life of this process."""

    def __init__(self) -> None:
        self._trusted: list[x509.Certificate] = []
        self._dropped: list[x509.Certificate] = []

    def replace(self, pem: bytes) -> None:
        """What cannot be read changes nothing: TLS accepts no certificate by it either."""
        try:
            trusted = x509.load_pem_x509_certificates(pem)
        except ValueError:
            return
        known = [*self._dropped, *self._trusted]
        self._trusted = trusted
        self._dropped = [one for one in known if one not in trusted]

    def dropped(self, pem: bytes) -> bool:
        """True if a CA has issued this certificate that was dropped, and none that is trusted now."""
        if not self._dropped:
            return False
        cert = x509.load_pem_x509_certificate(pem)
        return any(_issued(cert, one) for one in self._dropped) and not any(_issued(cert, one) for one in self._trusted)


def _issued(cert: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
