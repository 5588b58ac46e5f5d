"""Replaces the CA of a running cluster in three stages, between which every node gets new files.

    introduce   nodes trust both CAs; the old one still signs
    switch      the new one signs: nodes get certificates of it, and the old key is gone
    finish      nodes trust the new CA only

Invariant: if a stage begins only when all nodes have the files of the one before it, any two nodes accept each other at every
moment, whichever of the two has its new files first. Each stage is one rename of one file, so that after an interruption the
folder is in one stage or the other: next-ca.key is the key of a CA that is trusted and signs nothing yet, ca.crt names the
trusted CAs, and ca.key signs.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from migrator import pki
from snapshotd.api.errors import BadConfig
from snapshotd.api.new_files import NewFile, replace_all


class Stage(StrEnum):
    """Where a rotation of the CA is."""

    STABLE = "stable"
    INTRODUCED = "introduced"
    SWITCHED = "switched"


def stage(folder: Path) -> Stage:
    trusted = _trusted(folder)
    if _next_ca(folder, trusted) is not None:
        return Stage.INTRODUCED
    return Stage.SWITCHED if len(trusted) > 1 else Stage.STABLE


def introduce(folder: Path) -> None:
    """STABLE -> INTRODUCED: makes a CA that ca.crt names beside the present one."""
    present, _ = pki.load_ca(folder)
    key, cert = pki.new_authority()
    next_key = folder / "next-ca.key"
    next_key.unlink(missing_ok=True)  # of a run that was interrupted: no ca.crt names it
    pki.write_new(next_key, pki.pem_of(key), 0o600)
    replace_all([NewFile(folder / "ca.crt", _pem(present) + _pem(cert))])


def switch(folder: Path) -> None:
    """INTRODUCED -> SWITCHED: from now on the new CA signs. The key of the old one is gone."""
    os.replace(folder / "next-ca.key", folder / "ca.key")
    pki.refresh_crl(folder)


def finish(folder: Path) -> None:
    """SWITCHED -> STABLE: the old CA is no longer trusted."""
    present, _ = pki.load_ca(folder)
    pki.refresh_crl(folder)  # repeated, because `switch` may have been interrupted before it
    replace_all([NewFile(folder / "ca.crt", _pem(present))])


def new_ca(folder: Path) -> x509.Certificate:
    """The CA that stays after the rotation."""
    return _next_ca(folder, _trusted(folder)) or pki.load_ca(folder)[0]


def probe(folder: Path, place: Path, operator: str) -> pki.Identity:
    """An operator's identity, below `place`, with which to try whether a node is ready for the next stage.

    After `introduce` it is of the new CA: a node that does not trust that CA yet refuses it. After `switch` it trusts nothing
    but the new CA: it refuses a node that has no certificate of that CA yet.
    """
    introduced = stage(folder) is Stage.INTRODUCED
    place.mkdir(mode=0o700)
    (place / "issued").symlink_to((folder / "issued").absolute())  # what is issued here is listed there
    pki.write_new(place / "ca.key", (folder / ("next-ca.key" if introduced else "ca.key")).read_bytes(), 0o600)
    trusted = (folder / "ca.crt").read_bytes() if introduced else _pem(new_ca(folder))
    pki.write_new(place / "ca.crt", trusted, 0o644)
    return pki.issue_operator(place, operator)


def _trusted(folder: Path) -> list[x509.Certificate]:
    pki.load_ca(folder)  # reports what is wrong with it
    return x509.load_pem_x509_certificates((folder / "ca.crt").read_bytes())


def _next_ca(folder: Path, trusted: list[x509.Certificate]) -> x509.Certificate | None:
    """The certificate of next-ca.key, if ca.crt has it."""
    path = folder / "next-ca.key"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        if len(trusted) == 1:
            return None  # its write was interrupted, and nothing depends on it
        raise BadConfig(f"{path} is damaged: {error}", remedy="restore it from a backup of the folder") from error
    return next((cert for cert in trusted if cert.public_key() == key.public_key()), None)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)
