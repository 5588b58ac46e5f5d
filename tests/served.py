"""Two certificate authorities, and servicers behind the work of a network process, on the same event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from migrator import pki
from snapshotd.api.calls import Channel
from snapshotd.api.client import Credentials, DaemonClient
from snapshotd.api.errors import from_wire
from snapshotd.network.child import LatestFiles
from snapshotd.network.dispatch import Services
from snapshotd.network.frames import FROM_NETWORK, Listening, NotListening, Settings
from snapshotd.network.link import Control, Link
from snapshotd.network.link_channel import LinkChannel
from snapshotd.network.server import Network


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
    connect: Callable[[str, str], Channel] | None = None  # of a daemon: its network process makes the connections

    def by(self, who: Credentials) -> DaemonClient:
        return DaemonClient(self.endpoint, credentials=who, node="node-1")

    def operator(self) -> DaemonClient:
        return self.by(self.certificates.operator)

    def root(self) -> DaemonClient:
        return DaemonClient(self.unix, channel=self.connect("node-1", self.unix) if self.connect is not None else None)


Register = Callable[[Services], None]
Serve = Callable[[Register], AbstractAsyncContextManager[Served]]


def servicer(service: str, **methods: Callable[[Any, Any], Any]) -> Register:
    """Registers a servicer with these methods of (request, context); the rest is missing."""
    instance = type(service, (), {name: staticmethod(method) for name, method in methods.items()})()
    return lambda services: services.add(service, instance)


class Linked:
    """The daemon's end of a link whose other end, a network process's work, runs on the same event loop."""

    def __init__(self, services: Services, files: Credentials) -> None:
        services.ready = True
        self.files = LatestFiles(files)
        self.files.read()
        self.link = Link(FROM_NETWORK, services.serve, self._control, first=2)
        self.network = Network()
        self._channels = 0
        self._listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def _control(self, frame: Control) -> None:
        if isinstance(frame, Listening):
            self._listening.set_result(frame.port)
        elif isinstance(frame, NotListening):
            self._listening.set_exception(from_wire(frame.error))

    @asynccontextmanager
    async def listening(self, listen: str, unix: str = "", metrics: str = "") -> AsyncIterator[int]:
        ours, theirs = socket.socketpair()
        await self.link.attach(ours)
        tasks = [asyncio.create_task(self.network.run(theirs)), asyncio.create_task(self.link.run())]
        self.link.send_soon(Settings(listen, unix, metrics))
        self.link.send_soon(self.files.frame)
        try:
            yield await asyncio.wait_for(self._listening, 20)
        finally:
            self.link.close()
            await asyncio.gather(*tasks)

    async def refresh(self) -> None:
        """What the daemon does when files of certificates may have changed."""
        if not self.files.replaced():
            return
        self.link.send_soon(self.files.frame)
        frame = self.files.frame
        wanted = (frame.ca, frame.cert, frame.key), {int(serial, 16) for serial in frame.revoked}
        while (self.network._contents, self.network.inbound.revoked) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def connect(self, node: str, endpoint: str) -> LinkChannel:
        self._channels += 1
        return LinkChannel(lambda: self.link, self._channels, node, endpoint)


@pytest.fixture
def serve(certificates: Certificates, tmp_path: Path) -> Serve:
    return serve_in(tmp_path, certificates, linked=False)


def serve_in(folder: Path, certificates: Certificates, *, linked: bool) -> Serve:
    """With `linked`, root's calls too go through the link and from there to the server."""

    @asynccontextmanager
    async def running(register: Register) -> AsyncIterator[Served]:
        services = Services()
        register(services)
        unix = f"{folder}/admin.sock"
        ends = Linked(services, certificates.node)
        async with ends.listening("127.0.0.1:0", unix) as port:
            yield Served(f"127.0.0.1:{port}", f"unix:{unix}", certificates, ends.connect if linked else None)

    return running


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
