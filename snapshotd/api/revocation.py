"""Which certificates of the cluster's CA have been revoked: the file ca.crl beside ca.crt, made by `migrator pki revoke`.

The file is optional, and is read again when it changes: a revocation takes effect as soon as the file is copied to a node. A
damaged file stops the daemon from starting. Under a running daemon the last good one stays in force, and the damage is
logged.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotd.api.errors import BadConfig

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger(__name__)

_MAX_BYTES = 4 << 20


def crl_path(ca: Path) -> Path:
    return ca.with_suffix(".crl")


def load(ca: Path) -> x509.CertificateRevocationList | None:
    """The list beside a CA's certificate; None if there is none. Raises BadConfig if it is damaged or not that CA's."""
    path = crl_path(ca)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BadConfig(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
        return parsed(path.read_bytes(), ca.read_bytes(), str(path), str(ca))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadConfig(f"{path} cannot be used: {error}", remedy="copy it again from the folder of the CA") from error


def parsed(crl: bytes, ca: bytes, crl_name: str, ca_name: str) -> x509.CertificateRevocationList:
    """The list, signed by one of the CAs. Raises BadConfig."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        found = x509.load_pem_x509_crl(crl)
        keys = [authority.public_key() for authority in x509.load_pem_x509_certificates(ca)]
        if not any(found.is_signature_valid(key) for key in keys):  # type: ignore[arg-type]
            raise BadConfig(
                f"{crl_name} was not signed by {ca_name}", remedy="copy the file that `migrator pki revoke` made"
            )
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        text = f"{crl_name} cannot be used: {error}"
        raise BadConfig(text, remedy="copy it again from the folder of the CA") from error
    return found


class Revocations:
    """The revoked serial numbers of one CA, up to date. For any thread."""

    def __init__(self, ca: Path) -> None:
        self._ca = ca
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] = ()
        self._serials: frozenset[int] = frozenset()
        self._read()

    def revoked(self, serial: int) -> bool:
        return serial in self.serials()

    def serials(self) -> frozenset[int]:
        """All of them; the same object until the list changes."""
        with self._lock:
            try:
                self._read()
            except BadConfig as error:
                log.error("the list of revoked certificates is not read again: %s", error.message)
            return self._serials

    def _read(self) -> None:
        try:
            # Of both files: a list that arrives before the CA that has signed it is read again when the CA is there.
            both = (crl_path(self._ca).stat(), self._ca.stat())
            stamp: tuple[int, ...] = tuple(n for one in both for n in (one.st_ino, one.st_mtime_ns, one.st_size))
        except OSError:
            stamp = ()
        if stamp == self._stamp:
            return
        self._stamp = stamp  # also of a damaged file: it is reported once
        found = load(self._ca)
        if found is None:
            log.warning("%s is gone; what it revoked stays revoked until this daemon ends", crl_path(self._ca))
            return
        self._serials = frozenset(entry.serial_number for entry in found)
        log.info("%d certificates are revoked", len(self._serials))
        if found.next_update_utc is not None and found.next_update_utc < datetime.now(UTC):
            log.warning("%s is older than it says it should be; run `migrator cluster rotate`", crl_path(self._ca))


@functools.cache
def revocations_of(ca: Path) -> Revocations:
    """One for each CA: the list is read once for all connections."""
    return Revocations(ca)


@dataclass(frozen=True)
class Peer:
    """What a peer's certificate says."""

    common_names: tuple[str, ...]
    serial: int


@functools.lru_cache(maxsize=256)
def peer_of(pem: bytes) -> Peer:
    """Raises ValueError. The certificate was verified by TLS, so that its content comes from the CA."""
    from cryptography import x509

    cert = x509.load_pem_x509_certificate(pem)
    names = cert.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return Peer(tuple(str(name.value) for name in names), cert.serial_number)
