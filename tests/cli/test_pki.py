"""Tests that TLS accepts the CA's certificates for their purpose only, and that nothing valid is overwritten."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from migrator import pki
from migrator.pki import Identity
from snapshotd.api.errors import BadConfig, Busy, NotFound, Usage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki")
    return tmp_path / "pki"


def _context(purpose: ssl.Purpose, identity: Identity, ca: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose, cafile=str(ca))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(identity.cert, identity.key)
    return context


def _handshake(server: Identity, client: Identity, name: str) -> tuple[str, str]:
    """Does mutual TLS in memory. Returns the common names that the server and the client see of each other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    listening = _context(ssl.Purpose.CLIENT_AUTH, server, server.ca).wrap_bio(to_server, to_client, server_side=True)
    calling = _context(ssl.Purpose.SERVER_AUTH, client, client.ca).wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(6):
        for end in (calling, listening):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return _common_name(listening), _common_name(calling)


def _common_name(end: ssl.SSLObject) -> str:
    peer = end.getpeercert(binary_form=True)
    assert peer
    subject = x509.load_der_x509_certificate(peer).subject
    return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_node_and_operator_accept_each_other(folder: Path) -> None:
    node = pki.issue_node(folder, "node-1", ["10.0.0.1"])
    operator = pki.issue_operator(folder, "alice")
    assert _handshake(node, operator, "node-1") == ("operator:alice", "node:node-1")
    assert _handshake(node, operator, "10.0.0.1") == ("operator:alice", "node:node-1")


def test_nodes_accept_each_other(folder: Path) -> None:
    one, two = pki.issue_node(folder, "node-1", []), pki.issue_node(folder, "node-2", [])
    assert _handshake(one, two, "node-1") == ("node:node-2", "node:node-1")


def test_node_cannot_impersonate_another_node(folder: Path) -> None:
    one, two = pki.issue_node(folder, "node-1", []), pki.issue_node(folder, "node-2", [])
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        _handshake(one, two, "node-2")


def test_operator_certificate_is_rejected_as_a_server(folder: Path) -> None:
    operator = pki.issue_operator(folder, "node-1")
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        _handshake(operator, pki.issue_operator(folder, "alice"), "node-1")


def test_another_ca_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    pki.init(tmp_path / "other")
    stranger = pki.issue_operator(tmp_path / "other", "alice")
    with pytest.raises(ssl.SSLError):
        _handshake(pki.issue_node(folder, "node-1", []), stranger, "node-1")


def test_identity_cannot_sign_certificates(folder: Path) -> None:
    leaf = _certificate(pki.issue_node(folder, "node-1", []).cert)
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not leaf.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_certificates_have_their_validity_and_allow_for_clock_skew(folder: Path) -> None:
    now = datetime.now(UTC)
    authority = _certificate(folder / "ca.crt")
    leaf = _certificate(pki.issue_operator(folder, "alice").cert)
    assert timedelta(days=3650) < authority.not_valid_after_utc - now < timedelta(days=3660)
    assert timedelta(days=89) < leaf.not_valid_after_utc - now <= timedelta(days=90)
    assert leaf.not_valid_before_utc < now - timedelta(minutes=5), "a node's clock may be a little behind"


def test_keys_are_p256_and_private(folder: Path) -> None:
    identity = pki.issue_node(folder, "node-1", [])
    public = _certificate(identity.cert).public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert isinstance(public.curve, ec.SECP256R1)
    for key in (folder / "ca.key", identity.key):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_ca_is_never_overwritten(folder: Path) -> None:
    pki.issue_operator(folder, "alice")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(Busy, match="never overwritten"):
        pki.init(folder)
    (folder / "ca.crt").unlink()
    with pytest.raises(Busy, match=r"ca\.key"):
        pki.init(folder)
    assert (folder / "ca.key").read_bytes() == before["ca.key"]


def test_key_of_an_interrupted_init_does_not_prevent_another_one(tmp_path: Path) -> None:
    (tmp_path / "ca.key").write_text("half a k")
    pki.init(tmp_path)
    pki.issue_node(tmp_path, "node-1")


def test_valid_identity_is_not_replaced(folder: Path) -> None:
    identity = pki.issue_node(folder, "node-1", [])
    before = identity.cert.read_bytes()
    with pytest.raises(Busy, match="valid until"):
        pki.issue_node(folder, "node-1", [])
    assert identity.cert.read_bytes() == before


def test_expired_identity_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pki, "LEAF_VALID", timedelta(seconds=-1))
    old = _certificate(pki.issue_node(folder, "node-1", []).cert)
    monkeypatch.undo()
    assert _certificate(pki.issue_node(folder, "node-1", []).cert).serial_number != old.serial_number


def test_identity_without_certificate_is_replaced(folder: Path) -> None:
    pki.issue_node(folder, "node-1", []).cert.unlink()
    identity = pki.issue_node(folder, "node-1", [])
    assert _handshake(identity, pki.issue_operator(folder, "alice"), "node-1")


BAD_NAMES = ["", "../x", "a/b", "a b", "-a", "a-", "a..b", "node:1", "a\n", "ä", "\u212a", "a\0", "x" * 62]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_invalid_name_creates_no_file(folder: Path, name: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(Usage, match="cannot be the name"):
        pki.issue_node(folder, name, [])
    with pytest.raises(Usage, match="cannot be the name"):
        pki.issue_operator(folder, name)
    assert sorted(folder.rglob("*")) == before


def test_operator_name_has_at_most_55_characters(folder: Path) -> None:
    name = "x" * 55
    subject = _certificate(pki.issue_operator(folder, name).cert).subject
    assert subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == f"operator:{name}"
    with pytest.raises(Usage):
        pki.issue_operator(folder, name + "x")


def test_invalid_address_is_a_usage_error(folder: Path) -> None:
    with pytest.raises(Usage, match="is not an IP address"):
        pki.issue_node(folder, "node-1", ["node-1.example"])


def _broken_cas(folder: Path) -> Iterator[tuple[str, bytes]]:
    other = folder.parent / "other"
    pki.init(other)
    yield "ca.key", (other / "ca.key").read_bytes()
    yield "ca.key", b"nonsense"
    yield "ca.crt", b"nonsense"


def test_damaged_ca_is_rejected(folder: Path) -> None:
    for name, content in _broken_cas(folder):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(BadConfig, match=r"CA|not the key"):
            pki.issue_operator(folder, "alice")
        (folder / name).write_bytes(good)
    assert pki.issue_operator(folder, "alice").cert.exists()


def test_expired_ca_issues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pki, "CA_VALID", timedelta(seconds=-1))
    pki.init(tmp_path)
    with pytest.raises(BadConfig, match="expired"):
        pki.issue_operator(tmp_path, "alice")


def test_missing_ca_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no CA"):
        pki.issue_operator(tmp_path / "nowhere", "alice")


def test_folder_that_cannot_be_created_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Usage, match="cannot be made"):
        pki.init(tmp_path / "file" / "pki")
