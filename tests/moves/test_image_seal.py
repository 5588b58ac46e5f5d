"""Attacks of code in a target's network process, which can state any caller and any answer: it invents an image, or changes
one. It has the key of its own node, but not that of the source."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from migrator import pki
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Denied, Internal, NotFound, Unreachable
from snapshotd.moves import image_seal
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.reserve import Reserve
from snapshotd.moves.rules import Mark
from snapshotd.moves.target.source_signature import SourceSignatures
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.transport.image.chunk_list import summary
from snapshotd.transport.image.frame import Frame, data_frame
from snapshotd.transport.image.store import ImageStore
from tests.served import Certificates, credentials, serve_in

MOVE, RANK = "m-0123456789ab", "job-0-01234567"


def files_of(*frames: Frame) -> list[pb.ImageFile]:
    return [summary(frame.name, {frame.offset: (frame.length, frame.digest)}) for frame in frames]


@dataclass
class Cluster:
    """node-9, a source that runs elsewhere and shows its certificate at `endpoint`; spare-1, the target; node-2."""

    folder: Path
    endpoint: str
    steps: TargetSteps
    source: Credentials
    target: Credentials
    other: Credentials

    async def prepared(self, frame: Frame) -> Begin:
        """A move that an invented operator has prepared, with an invented chunk."""
        facts = pb.RankFacts(source_node="node-9", rank=pb.Rank(uid=RANK, job="job", user_id=1500))
        facts.identity.CopyFrom(pb.Identity(user_id=1500, group_id=1500))
        request = pb.PrepareRequest(move=MOVE, facts=facts, source_endpoint=self.endpoint)
        await self.steps.prepare(request)
        assert self.steps.node.store.write(MOVE, frame)
        return self.moving.log.begin

    @property
    def moving(self) -> Moving:
        return self.steps.moving(MOVE)

    async def seal(self, frame: Frame, signature: bytes) -> None:
        """As the network process passes it on: it states that the caller is the source."""
        await self.steps.seal(pb.SealRequest(move=MOVE, files=files_of(frame), signature=signature), "node-9")


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    ca = tmp_path / "ca"
    pki.init(ca)
    source, target, other = (credentials(pki.issue_node(ca, name)) for name in ("node-9", "spare-1", "node-2"))

    @contextlib.asynccontextmanager
    async def client(name: str, endpoint: str) -> AsyncIterator[Any]:
        async def unknown(request: pb.MoveRequest, **_: Any) -> pb.Outcome:
            raise NotFound("no such move")

        yield SimpleNamespace(source=SimpleNamespace(GetOutcome=unknown))

    async def nothing(*_: Any) -> None:
        return None

    async def no_gpus(*_: Any) -> list[tuple[str, str]]:
        return []

    monkeypatch.setattr("snapshotd.moves.target.steps.start_spares", nothing)
    monkeypatch.setattr("snapshotd.moves.target.steps.start_keeper", nothing)
    monkeypatch.setattr("snapshotd.moves.target.steps.gpus.choose", no_gpus)
    config = SimpleNamespace(
        node="spare-1",
        advertise="127.0.0.1:1",
        listen="127.0.0.1:1",
        data_addresses=(),
        allow_root_ranks=False,
        hold_device_memory=False,
        state_dir=tmp_path,
        criu="/bin/true",
    )
    reserve = Reserve(tmp_path, 4096)
    node: Any = SimpleNamespace(
        config=config,
        credentials=target,
        reserve=reserve,
        journal=Journal(tmp_path / "state", reserve),
        store=ImageStore(tmp_path / "images"),
        client=client,
    )
    steps = TargetSteps(node, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    shown = Certificates(source, target, other, other, other)
    async with serve_in(tmp_path, shown, linked=False)(lambda services: None) as served:
        yield Cluster(tmp_path, served.endpoint, steps, source, target, other)
    for moving in steps.moves.values():
        if moving.settling is not None:
            moving.settling.cancel()


FRAME = data_frame(1, "core-1.img", 0, b"an image", strong=True)


async def test_image_that_its_source_has_signed_is_sealed(cluster: Cluster) -> None:
    begin = await cluster.prepared(FRAME)
    signature = image_seal.sign(cluster.source, image_seal.statement(begin, files_of(FRAME)))
    await cluster.seal(FRAME, signature)
    assert cluster.moving.log.last_mark is Mark.SEALED
    await cluster.seal(FRAME, signature)  # repeated, because its answer was lost


async def test_invented_image_is_not_sealed(cluster: Cluster) -> None:
    """Neither without a signature, nor with one by the keys that a network process and other nodes have."""
    begin = await cluster.prepared(FRAME)
    signed = image_seal.statement(begin, files_of(FRAME))
    for signature in (
        b"",
        b"x" * 71,
        b"x" * 100_000,
        image_seal.sign(cluster.target, signed),
        image_seal.sign(cluster.other, signed),
    ):
        with pytest.raises(Denied, match="not signed by its source, node-9") as caught:
            await cluster.seal(FRAME, signature)
        assert caught.value.of_node == "node-9", "and not this one, which was asked"
        assert cluster.moving.log.last_mark is Mark.PREPARED


async def test_source_whose_certificate_cannot_be_fetched_is_named(cluster: Cluster) -> None:
    with pytest.raises(Unreachable, match="the certificate of node-9") as caught:
        await SourceSignatures(cluster.target).meet("node-9", "127.0.0.1:1")
    assert caught.value.of_node == "node-9"


async def test_signature_of_another_move_is_refused(cluster: Cluster) -> None:
    """The source has signed this very image: for another move, rank or target, or before the target chose its nonce."""
    begin = await cluster.prepared(FRAME)
    for changed in (
        {"move": "m-0123456789ac"},
        {"rank_uid": "job-1-01234567"},
        {"target_node": "node-2"},
        {"source_node": "node-2"},
        {"nonce": "00" * 32},
    ):
        old = msgspec.structs.replace(begin, **changed)
        signature = image_seal.sign(cluster.source, image_seal.statement(old, files_of(FRAME)))
        with pytest.raises(Denied, match="not signed"):
            await cluster.seal(FRAME, signature)


async def test_image_that_was_changed_on_the_way_is_refused(cluster: Cluster) -> None:
    genuine = data_frame(1, "core-1.img", 0, b"genuine!", strong=True)
    begin = await cluster.prepared(FRAME)
    signature = image_seal.sign(cluster.source, image_seal.statement(begin, files_of(genuine)))
    with pytest.raises(Denied, match="not signed"):
        await cluster.seal(FRAME, signature)
    # With the genuine list of files the chunk that was replaced is noticed.
    request = pb.SealRequest(move=MOVE, files=files_of(genuine), signature=signature)
    assert (await cluster.steps.seal(request, "node-9")).damaged == ["core-1.img"]
    assert cluster.moving.log.last_mark is Mark.PREPARED


async def test_source_that_another_node_plays_is_refused(cluster: Cluster) -> None:
    """The network process has prepared a move from a node that it invents, or plays at another address."""
    facts = pb.RankFacts(source_node="node-2", rank=pb.Rank(uid=RANK))
    facts.identity.CopyFrom(pb.Identity(user_id=1500, group_id=1500))
    request = pb.PrepareRequest(move=MOVE, facts=facts, source_endpoint=cluster.endpoint)
    with pytest.raises(Unreachable, match="certificate of node-2"):
        await cluster.steps.prepare(request)
    assert cluster.steps.journal.all() == []


async def test_revoked_source_is_refused(cluster: Cluster) -> None:
    begin = await cluster.prepared(FRAME)
    signature = image_seal.sign(cluster.source, image_seal.statement(begin, files_of(FRAME)))
    pki.revoke(cluster.folder / "ca", "node:node-9")
    with pytest.raises(Denied):
        await cluster.seal(FRAME, signature)
    assert cluster.moving.log.last_mark is Mark.PREPARED


@pytest.mark.parametrize("kind", ["EC", "RSA", "Ed25519"])
def test_keys_of_every_kind_sign(tmp_path: Path, kind: str) -> None:
    """A cluster may have a CA of its own."""
    key: Any = (
        ec.generate_private_key(ec.SECP384R1())
        if kind == "EC"
        else rsa.generate_private_key(public_exponent=65537, key_size=2048)
        if kind == "RSA"
        else ed25519.Ed25519PrivateKey.generate()
    )
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "node:node-9")])
    start = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    pki.init(tmp_path / "ca")
    authority = x509.load_pem_x509_certificate((tmp_path / "ca/ca.crt").read_bytes())
    begin, end = authority.not_valid_before_utc, authority.not_valid_after_utc
    cert = start.serial_number(5).not_valid_before(begin).not_valid_after(end)
    signed = cert.sign(key, None if kind == "Ed25519" else hashes.SHA256())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "key").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    (tmp_path / "crt").write_bytes(signed.public_bytes(pem))
    mine = Credentials(tmp_path / "ca/ca.crt", tmp_path / "crt", tmp_path / "key")
    signature = image_seal.sign(mine, b"statement")
    der = signed.public_bytes(serialization.Encoding.DER)
    assert image_seal.is_signed_by(der, b"statement", signature)
    assert not image_seal.is_signed_by(der, b"Statement", signature)


async def test_source_of_an_older_version_is_answered_so_that_it_uses_grpc(cluster: Cluster) -> None:
    """It asks without `sealed`, and takes an Internal for a target that has no such connections."""
    await cluster.prepared(FRAME)
    with pytest.raises(Internal, match="older version"):
        await cluster.steps.open_image_channel(pb.OpenImageChannelRequest(move=MOVE), "node-9")
    with pytest.raises(Internal, match="older version"):
        await cluster.steps.open_device_channel(pb.OpenDeviceChannelRequest(move=MOVE, names=["device-1-0"]), "node-9")
    assert not cluster.steps.bulk_receivers.is_busy(MOVE)
    opened = await cluster.steps.open_image_channel(pb.OpenImageChannelRequest(move=MOVE, sealed=True), "node-9")
    assert opened.sealed
    cluster.steps.bulk_receivers.close_all()
