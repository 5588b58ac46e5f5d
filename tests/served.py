"""Two certificate authorities, and a real grpc.aio server with the daemon's own interceptor and options."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from migrator import pki
from snapshotd.api import snapshotd_pb2_grpc as rpc
from snapshotd.api.access import Access
from snapshotd.api.client import Credentials, DaemonClient
from snapshotd.main import SERVER_OPTIONS


def credentials(identity: pki.Identity) -> Credentials:
    return Credentials(identity.ca, identity.cert, identity.key)


@dataclass(frozen=True)
class Certificates:
    """Certificates of the cluster's CA, except `stranger`, which another CA of the same name has issued."""

    node: Credentials  # node-1, the server
    other_node: Credentials  # node-2
    operator: Credentials
    stranger: Credentials
    wrong_role: Credentials  # our CA's, but neither an operator's nor a node's


def without_a_role(folder: Path) -> Credentials:
    """A certificate of the CA in `folder` whose common name is neither operator:NAME nor node:NAME."""
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "user:bob")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(authority.not_valid_after_utc)
        .sign(signer, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "bob.crt").write_bytes(cert.public_bytes(encoding))
    (folder / "bob.key").write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return Credentials(folder / "ca.crt", folder / "bob.crt", folder / "bob.key")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    ours, theirs = tmp_path_factory.mktemp("ca"), tmp_path_factory.mktemp("other-ca")
    pki.init(ours)
    pki.init(theirs)
    return Certificates(
        node=credentials(pki.issue_node(ours, "node-1")),
        other_node=credentials(pki.issue_node(ours, "node-2")),
        operator=credentials(pki.issue_operator(ours, "alice")),
        stranger=credentials(pki.issue_operator(theirs, "alice")),
        wrong_role=without_a_role(ours),
    )


@dataclass(frozen=True)
class Served:
    """A running server: its TCP endpoint, and its unix socket."""

    endpoint: str
    unix: str
    certificates: Certificates

    def by(self, who: Credentials) -> DaemonClient:
        return DaemonClient(self.endpoint, credentials=who, node="node-1")

    def operator(self) -> DaemonClient:
        return self.by(self.certificates.operator)

    def root(self) -> DaemonClient:
        return DaemonClient(self.unix)


Register = Callable[[grpc.aio.Server], None]
Serve = Callable[[Register], AbstractAsyncContextManager[Served]]


def servicer(service: str, **methods: Callable[[Any, Any], Any]) -> Register:
    """Registers a subclass of the generated servicer with these methods of (request, context); the rest is missing."""
    own = {name: staticmethod(method) for name, method in methods.items()}
    instance = type(service, (getattr(rpc, f"{service}Servicer"),), own)()
    register: Callable[[Any, grpc.aio.Server], None] = getattr(rpc, f"add_{service}Servicer_to_server")
    return lambda server: register(instance, server)


@pytest.fixture
def serve(certificates: Certificates, tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def running(register: Register) -> AsyncIterator[Served]:
        server = grpc.aio.server(interceptors=[Access()], options=SERVER_OPTIONS)
        register(server)
        port = server.add_secure_port("127.0.0.1:0", certificates.node.for_server())
        unix = f"unix:{tmp_path}/admin.sock"
        server.add_insecure_port(unix)
        await server.start()
        try:
            yield Served(f"127.0.0.1:{port}", unix, certificates)
        finally:
            await server.stop(0)

    return running


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
