"""Certificates that must not be accepted although the cluster's CA has signed them, and certificates that are replaced."""

from __future__ import annotations

import dataclasses
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from migrator import pki
from snapshotd.api import certificates as checks
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import Credentials, DaemonClient
from snapshotd.api.errors import BadConfig, Denied, NotFound, Unreachable, Usage
from snapshotd.api.revocation import Revocations, load
from snapshotd.network.dispatch import Services
from tests.served import Linked, credentials, servicer


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki")
    return tmp_path / "pki"


async def get_node(request: pb.GetNodeRequest, context: object) -> pb.NodeInfo:
    return pb.NodeInfo(name="node-1")


class Server:
    """A daemon's servicer behind a network process, its certificate and its list of revoked ones in files of its own."""

    def __init__(self, ca: Path, folder: Path) -> None:
        self.ca, self.folder = ca, folder
        self.files = Credentials(folder / "ca.crt", folder / "node.crt", folder / "node.key")
        folder.mkdir()
        pki.issue_node(ca, "node-1")
        self.copy()

    def copy(self) -> None:
        """What an operator does after `migrator pki renew` or `revoke`."""
        for source, target in (
            (self.ca / "ca.crt", "ca.crt"),
            (self.ca / "ca.crl", "ca.crl"),
            (self.ca / "nodes" / "node-1.crt", "node.crt"),
            (self.ca / "nodes" / "node-1.key", "node.key"),
        ):
            if source.exists():
                shutil.copy(source, self.folder / f"{target}.new")
                os.replace(self.folder / f"{target}.new", self.folder / target)

    async def __aenter__(self) -> Server:
        services = Services()
        servicer("Node", GetNode=get_node)(services)
        self.ends = Linked(services, self.files)
        self._listening = self.ends.listening("127.0.0.1:0")
        self.port = await self._listening.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.__aexit__(None, None, None)

    async def call(self, who: Credentials) -> str:
        await self.ends.refresh()
        async with DaemonClient(f"127.0.0.1:{self.port}", credentials=who, node="node-1") as client:
            return (await client.node.GetNode(pb.GetNodeRequest(), timeout_s=20)).name


def signed(ca: Path, name: str, subject: list[str]) -> Credentials:
    """A certificate of the CA with these common names."""
    authority = x509.load_pem_x509_certificate((ca / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((ca / "ca.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one) for one in subject]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("node-1")]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    files = Credentials(ca / "ca.crt", ca / f"{name}.crt", ca / f"{name}.key")
    files.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    files.key.chmod(0o600)
    return files


@pytest.mark.parametrize(
    "names", [["operator:alice", "node:node-2"], ["node:node-2", "operator:alice"], ["operator:a", "operator:b"], []]
)
async def test_certificate_with_two_names_is_refused(ca: Path, tmp_path: Path, names: list[str]) -> None:
    async with Server(ca, tmp_path / "tls") as server:
        with pytest.raises(Denied, match="belongs neither to an operator nor to a node"):
            await server.call(signed(ca, "two", names))
        assert await server.call(signed(ca, "one", ["operator:alice"])) == "node-1"


async def test_revoked_certificate_is_refused_without_a_restart(ca: Path, tmp_path: Path) -> None:
    thief, honest = (credentials(pki.issue_operator(ca, name)) for name in ("thief", "honest"))
    stolen = dataclasses.replace(thief, cert=tmp_path / "stolen.crt", key=tmp_path / "stolen.key")
    shutil.copy(thief.cert, stolen.cert)
    shutil.copy(thief.key, stolen.key)
    async with Server(ca, tmp_path / "tls") as server:
        assert await server.call(stolen) == "node-1"
        path, serials = pki.revoke(ca, "operator:thief")
        assert path == ca / "ca.crl"
        assert len(serials) == 1
        server.copy()
        with pytest.raises(Denied, match=rf"operator thief with serial number {serials[0]:x} has been revoked"):
            await server.call(stolen)
        assert await server.call(honest) == "node-1"
        # An attacker who can only damage or remove the file does not get the certificate accepted again.
        (tmp_path / "tls" / "ca.crl").write_text("nonsense")
        with pytest.raises(Denied, match="has been revoked"):
            await server.call(stolen)
        (tmp_path / "tls" / "ca.crl").unlink()
        with pytest.raises(Denied, match="has been revoked"):
            await server.call(stolen)
        assert await server.call(credentials(pki.issue_operator(ca, "thief"))) == "node-1", (
            "a new one of that name is good"
        )


async def test_renewed_certificate_is_served_without_a_restart(ca: Path, tmp_path: Path) -> None:
    operator = credentials(pki.issue_operator(ca, "alice"))
    async with Server(ca, tmp_path / "tls") as server:
        assert await server.call(operator) == "node-1"
        before = server.files.cert.read_bytes()
        assert {one.cert.name for one in pki.renew(ca, timedelta(days=365))} == {"node-1.crt", "alice.crt"}
        # The certificate alone, without its key: the old pair stays in use.
        shutil.copy(ca / "nodes" / "node-1.crt", server.files.cert)
        assert await server.call(operator) == "node-1"
        server.copy()
        assert server.files.cert.read_bytes() != before
        assert await server.call(operator) == "node-1"
        assert await served(server) == server.files.cert.read_bytes()


async def served(server: Server) -> bytes:
    """The certificate that a new connection is shown."""
    import asyncio
    import ssl

    context = ssl.create_default_context(cafile=str(server.files.ca))
    operator = signed(server.ca, "looker", ["operator:looker"])
    context.load_cert_chain(operator.cert, operator.key)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="node-1")
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def test_all_certificates_of_a_name_are_revoked(ca: Path) -> None:
    first = pki.issue_node(ca, "node-1", ["10.0.0.1"])
    old = x509.load_pem_x509_certificate(first.cert.read_bytes())
    (second,) = pki.renew(ca, timedelta(days=365))
    new = x509.load_pem_x509_certificate(second.cert.read_bytes())
    assert new.subject == old.subject
    for kind in (x509.SubjectAlternativeName, x509.ExtendedKeyUsage):
        values = [cert.extensions.get_extension_for_class(kind).value for cert in (old, new)]
        assert values[0] == values[1]
    _, serials = pki.revoke(ca, "node:node-1")
    assert set(serials) == {old.serial_number, new.serial_number}
    assert not second.key.exists()
    pki.issue_node(ca, "node-2")
    _, others = pki.revoke(ca, "node:node-2")
    revoked = Revocations(ca / "ca.crt")
    assert all(revoked.revoked(serial) for serial in (*serials, *others))
    assert not revoked.revoked(1)
    assert pki.revoke(ca, "node:node-1")[1] == serials
    with pytest.raises(NotFound):
        pki.revoke(ca, "node:node-3")
    with pytest.raises(Usage):
        pki.revoke(ca, "node-1")


def test_renew_leaves_what_is_still_good(ca: Path) -> None:
    pki.issue_node(ca, "node-1")
    assert pki.renew(ca, timedelta(days=30)) == []
    pki.revoke(ca, "node:node-1")
    before = load(ca / "ca.crt")
    assert pki.renew(ca) == []
    after = load(ca / "ca.crt")
    assert before is not None
    assert after is not None
    assert [entry.serial_number for entry in after] == [entry.serial_number for entry in before]


def test_list_of_another_ca_is_refused(ca: Path, tmp_path: Path) -> None:
    pki.init(tmp_path / "other")
    pki.issue_node(tmp_path / "other", "node-1")
    shutil.copy(pki.revoke(tmp_path / "other", "node:node-1")[0], ca / "ca.crl")
    with pytest.raises(BadConfig, match="was not signed by"):
        Revocations(ca / "ca.crt")
    node = credentials(pki.issue_node(ca, "node-1"))
    (problem,) = checks.problems(node, "node-1")
    assert "was not signed by" in problem


def test_certificate_that_expires_soon_is_warned_about(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.warnings(credentials(pki.issue_node(ca, "node-1"))) == []
    monkeypatch.setattr(pki, "LEAF_VALID", timedelta(days=12))
    (warning,) = checks.warnings(credentials(pki.issue_node(ca, "node-2")))
    assert "expires on" in warning
    assert "migrator cluster rotate" in warning
    monkeypatch.setattr(pki, "LEAF_VALID", timedelta(days=731))
    (warning,) = checks.warnings(credentials(pki.issue_node(ca, "node-3")))
    assert "is valid for 731 days" in warning


def test_keys_that_others_can_read_are_refused(ca: Path) -> None:
    node = credentials(pki.issue_node(ca, "node-1"))
    for mode in (0o640, 0o604, 0o660):
        node.key.chmod(mode)
        assert "can be read by users other than its owner" in checks.problems(node, "node-1")[0]
    node.key.chmod(0o600)
    os.chown(node.key, 1500, 1500)
    assert "belongs to another user" in checks.problems(node, "node-1")[0]
    (ca / "ca.key").chmod(0o640)
    with pytest.raises(BadConfig, match="can be read by users other than its owner"):
        pki.issue_node(ca, "node-2")


async def test_server_with_another_name_is_not_believed(ca: Path, tmp_path: Path) -> None:
    async with Server(ca, tmp_path / "tls") as server:
        operator = credentials(pki.issue_operator(ca, "alice"))
        async with DaemonClient(f"127.0.0.1:{server.port}", credentials=operator, node="node-2") as client:
            with pytest.raises(Unreachable):
                await client.node.GetNode(pb.GetNodeRequest(), timeout_s=20)
