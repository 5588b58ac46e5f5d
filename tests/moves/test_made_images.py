"""Attacks of a node that keeps a copy of another node's image: it changes the copy, or what is said about it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from migrator import pki
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Unreadable
from snapshotd.moves import image_seal
from snapshotd.moves.jobs import made_image
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.rules import Mark
from snapshotd.moves.target import arrived_image
from tests.moves.kept_images import FILES, RANK, RECORD, Keeping, keeping
from tests.served import credentials

IMAGE, COPY, OTHER, RESUMED = (f"m-{number:012x}" for number in (1, 2, 3, 4))


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    pki.init(tmp_path / "ca")
    return tmp_path / "ca"


@pytest.fixture
def maker(tmp_path: Path, ca: Path, monkeypatch: pytest.MonkeyPatch) -> Keeping:
    return keeping(tmp_path, "node-1", ca, monkeypatch)


async def signed(maker: Keeping) -> pb.SealRequest:
    """What the maker sends to a buddy."""
    maker.keep(IMAGE, committed=False)
    await maker.send(IMAGE, COPY, "node-2")
    return maker.sealed[-1]


def check(request: pb.SealRequest, who: Credentials, **other: str) -> None:
    about = {"node": "node-1", "rank_uid": RANK.uid, "snapshot": RECORD, **other}
    made_image.must_be_by(request.made, files=request.files, credentials=who, **about)


def sign_again(request: pb.SealRequest, who: Credentials) -> None:
    signature, chain = image_seal.sign_as(who, made_image._statement(request.made))
    request.made.signature = signature
    del request.made.certificates[:]
    request.made.certificates.extend(chain)


async def test_image_is_signed_once_for_all_its_buddies_and_the_signature_is_kept(maker: Keeping) -> None:
    request = await signed(maker)
    await maker.send(IMAGE, OTHER, "node-3")
    assert maker.sealed[-1].made == request.made
    check(request, maker.node.credentials)
    assert {file.name: file.size for file in request.made.files} == {name: len(FILES[name]) for name in FILES}
    assert made_image.load(maker.journal.get(IMAGE)) == request.made, "the rank may be resumed elsewhere"


async def test_node_that_keeps_a_copy_passes_the_signature_of_the_maker_on(
    maker: Keeping, tmp_path: Path, ca: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await signed(maker)
    buddy = keeping(tmp_path, "node-2", ca, monkeypatch)
    copy = buddy.keep(COPY, "copy")
    arrived_image.take_made(buddy.node, copy, request)
    await buddy.send(COPY, RESUMED)
    assert buddy.sealed[-1].made == request.made


async def test_copy_of_which_the_signature_is_wrong_is_not_taken(maker: Keeping, tmp_path: Path, ca: Path) -> None:
    request = await signed(maker)
    buddy = Keeping(tmp_path, "node-2", ca)
    copy = buddy.keep(COPY, "copy")
    request.made.snapshot = "m-0000000000fe"
    with pytest.raises(Unreadable, match="has not signed this copy"):
        arrived_image.take_made(buddy.node, copy, request)
    request.ClearField("made")
    arrived_image.take_made(buddy.node, copy, request)  # of a maker with an older version
    assert made_image.load(copy) is None


CHANGES: dict[str, tuple[Callable[[pb.SealRequest], None], str]] = {
    "no signature": (lambda request: request.ClearField("made"), "without a signature"),
    "no certificate": (lambda request: request.made.ClearField("certificates"), "without a certificate"),
    "garbage": (lambda request: request.made.certificates.__setitem__(0, b"garbage"), "cannot be read"),
    "a digest": (lambda request: setattr(request.made.files[0], "digest", b"x" * 32), "does not match"),
    "a size": (lambda request: setattr(request.made.files[0], "size", 5), "does not match"),
    "the time": (lambda request: setattr(request.made, "made_unix_s", time.time() - 60), "does not match"),
    "no time": (lambda request: setattr(request.made, "made_unix_s", float("nan")), "cannot be read"),
    "another rank": (lambda request: setattr(request.made, "rank_uid", "train-1-01234567"), "signed as the image"),
    "an older snapshot": (lambda request: setattr(request.made, "snapshot", "m-0000000000fe"), "signed as the image"),
    "another maker": (lambda request: setattr(request.made, "node", "node-2"), "signed as the image"),
    "more files": (lambda request: request.files.add(name="more-1.img").Clear(), "its files are not those"),
    "fewer files": (lambda request: request.files.__delitem__(0), "its files are not those"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_what_the_maker_has_not_signed_is_refused(maker: Keeping, change: str) -> None:
    request = await signed(maker)
    changed = pb.SealRequest()
    changed.CopyFrom(request)
    attack, why = CHANGES[change]
    attack(changed)
    with pytest.raises(Unreadable, match=why):
        check(changed, maker.node.credentials)
    check(request, maker.node.credentials)


async def test_signature_of_an_earlier_image_of_the_rank_is_refused(maker: Keeping) -> None:
    """It is genuine, and one of another snapshot."""
    request = await signed(maker)
    with pytest.raises(Unreadable, match="in snapshot 'm-0000000000ff' by 'node-1'"):
        check(request, maker.node.credentials, snapshot="m-000000000100")


async def test_another_certificate_than_the_makers_is_refused(maker: Keeping, tmp_path: Path, ca: Path) -> None:
    """That of the node itself, of an operator, and of another CA with the maker's name."""
    request = await signed(maker)
    pki.init(tmp_path / "strange")
    pki.issue_operator(ca, "node-1")
    others = {
        "its certificate is that of": credentials(pki.issue_node(ca, "node-2")),
        "that of ..operator:node-1": credentials(pki.identity_of(ca, "operator", "node-1")),
        "not one of the cluster's CA": credentials(pki.issue_node(tmp_path / "strange", "node-1")),
    }
    for why, other in others.items():
        sign_again(request, other)
        with pytest.raises(Unreadable, match=why):
            check(request, maker.node.credentials)
    sign_again(request, maker.node.credentials)
    check(request, maker.node.credentials)


async def test_certificate_that_was_renewed_since_counts_and_one_that_was_revoked_does_not(
    maker: Keeping, ca: Path
) -> None:
    request = await signed(maker)
    pki.reissue(ca, "node", "node-1")
    assert request.made.certificates[0] not in image_seal.sign_as(maker.node.credentials, b"")[1]
    check(request, maker.node.credentials)
    pki.revoke(ca, "node:node-1")
    with pytest.raises(Unreadable, match="has been revoked"):
        check(request, maker.node.credentials)


@pytest.mark.parametrize(("minutes_ago", "counts"), [(5, True), (0, False), (20, False)])
async def test_certificate_that_has_expired_counts_for_what_it_signed_before(
    maker: Keeping, ca: Path, monkeypatch: pytest.MonkeyPatch, minutes_ago: int, counts: bool
) -> None:
    """It was valid from ten minutes ago up to one minute ago."""
    request = await signed(maker)
    monkeypatch.setattr(pki, "LEAF_VALID", timedelta(minutes=-1))
    pki.issue_node(ca, "node-1", replace=True)
    request.made.made_unix_s = time.time() - 60 * minutes_ago
    signature, chain = _sign_expired(ca, made_image._statement(request.made))
    request.made.signature, request.made.certificates[0] = signature, chain
    if counts:
        check(request, maker.node.credentials)
    else:
        with pytest.raises(Unreadable, match="was not valid on"):
            check(request, maker.node.credentials)


def _sign_expired(ca: Path, statement: bytes) -> tuple[bytes, bytes]:
    identity = pki.identity_of(ca, "node", "node-1")
    key = serialization.load_pem_private_key(identity.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    cert = x509.load_pem_x509_certificate(identity.cert.read_bytes())
    return key.sign(statement, ec.ECDSA(hashes.SHA256())), cert.public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize("is_ca", [True, False])
async def test_certificate_of_an_intermediate_ca_counts(maker: Keeping, ca: Path, tmp_path: Path, is_ca: bool) -> None:
    """A cluster may have a CA of its own. A node cannot play one."""
    request = await signed(maker)
    root, root_key = pki.load_ca(ca)
    middle_key, leaf_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    middle = _issued("middle", root.subject, middle_key, root_key, x509.BasicConstraints(is_ca, None))
    leaf = _issued("node:node-1", middle.subject, leaf_key, middle_key, x509.BasicConstraints(False, None))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "crt").write_bytes(leaf.public_bytes(pem) + middle.public_bytes(pem))
    (tmp_path / "key").write_bytes(leaf_key.private_bytes(pem, form, serialization.NoEncryption()))
    sign_again(request, Credentials(ca / "ca.crt", tmp_path / "crt", tmp_path / "key"))
    assert len(request.made.certificates) == 2
    if is_ca:
        check(request, maker.node.credentials)
        del request.made.certificates[1]
    with pytest.raises(Unreadable, match="not one of the cluster's CA"):
        check(request, maker.node.credentials)


def _issued(name: str, issuer: x509.Name, key: Any, signer: Any, limits: x509.BasicConstraints) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=10))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(limits, critical=True)
    )
    return builder.sign(signer, hashes.SHA256())


# ---------------------------------------------------------------- the target of a rollback


def target_of(maker: Keeping, sender: str, *, signs: bool = True) -> tuple[Any, MoveLog]:
    """node-3, to which `sender` sends the image of node-1's rank."""
    begin = maker.keep(OTHER).begin
    node: Any = SimpleNamespace(config=SimpleNamespace(node="node-3"), credentials=maker.node.credentials)
    fields = {name: getattr(begin, name) for name in begin.__struct_fields__}
    fields |= {"move": RESUMED, "role": "target", "kind": "", "source_node": sender, "target_node": "node-3"}
    move_log = maker.journal.begin(type(begin)(**fields))
    move_log.mark(Mark.PREPARED, maker="node-1" if signs else "", snapshot=RECORD if signs else "")
    return node, move_log


def arrive(folder: Path) -> Path:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / ".sealed").write_text("[]")
    return folder


@pytest.mark.parametrize("attack", ["changed", "missing", "more", "hole"])
async def test_copy_that_was_changed_is_not_restored(
    maker: Keeping, tmp_path: Path, attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    request, (node, move_log) = await signed(maker), target_of(maker, "node-2")
    arrived_image.take_made(node, move_log, request)
    folder = arrive(tmp_path / "arrived")
    await arrived_image.must_be_as_made(folder, move_log)
    pages = folder / "pages-1.img"
    match attack:
        case "changed":
            pages.write_bytes(FILES[pages.name][:-1] + b"!")
        case "missing":
            pages.unlink()
        case "more":
            pages = folder / "pages-2.img"
            pages.touch()
        case _:
            pages.write_bytes(b"")
            with pages.open("r+b") as file:
                file.truncate(len(FILES[pages.name]))
    with pytest.raises(Unreadable, match=f"not what node-1 has made: {pages.name}"):
        await arrived_image.must_be_as_made(folder, move_log)
    assert "node-2 has sent an image that is refused" in caplog.text


async def test_copy_without_a_signature_is_refused_if_the_maker_signs(maker: Keeping, tmp_path: Path) -> None:
    request, (node, move_log) = await signed(maker), target_of(maker, "node-2")
    request.ClearField("made")
    with pytest.raises(Unreadable, match="without a signature"):
        arrived_image.take_made(node, move_log, request)
    with pytest.raises(Unreadable, match="is lost"):
        await arrived_image.must_be_as_made(arrive(tmp_path / "arrived"), move_log)


@pytest.mark.parametrize(("sender", "signs"), [("node-2", False), ("node-3", True)])
async def test_image_of_an_older_version_and_one_that_was_here_need_no_signature(
    maker: Keeping, sender: str, signs: bool
) -> None:
    node, move_log = target_of(maker, sender, signs=signs)
    assert not arrived_image.must_be_signed(move_log)
    arrived_image.take_made(node, move_log, pb.SealRequest())
    arrived_image.must_have_connections(move_log, SimpleNamespace(rewires=[pb.Rewire()]))  # type: ignore[arg-type]


async def test_connections_that_are_not_those_of_the_image_are_refused(maker: Keeping) -> None:
    """The node that keeps the image describes it before it is sent."""
    _, move_log = target_of(maker, "node-2")
    there = pb.Rewire(old_local=pb.Endpoint(ip="10.0.0.1", port=7), old_remote=pb.Endpoint(ip="10.0.0.2", port=8))
    planned = pb.Rewire()
    planned.CopyFrom(there)
    planned.new_local.ip = "10.0.0.3"
    image: Any = SimpleNamespace(rewires=[there])
    move_log.mark(Mark.PREPARED, rewires=[planned])
    arrived_image.must_have_connections(move_log, image)
    planned.old_remote.ip = "10.0.0.9"
    for said in ([planned], [], [there, there]):
        move_log.mark(Mark.PREPARED, rewires=said)
        with pytest.raises(Unreadable, match="node-2 has described other connections"):
            arrived_image.must_have_connections(move_log, image)


# ---------------------------------------------------------------- digests


async def test_digest_is_that_of_the_content_wherever_holes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_image, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(made_image, "_ZERO_PIECE", hashlib.sha256(bytes(4096)).digest())
    monkeypatch.setattr(made_image, "_SPAN_BYTES", 3 * 4096)
    content = b"a" * 5000 + bytes(40_000) + b"b" * 5000 + bytes(9000)
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    dense.write_bytes(content)
    with sparse.open("wb") as file:
        file.write(content[:5000])
        file.seek(45_000)
        file.write(content[45_000:50_000])
        file.truncate(len(content))
    assert sparse.stat().st_blocks < dense.stat().st_blocks
    seen: list[int] = []
    one, other = await made_image.contents([dense, sparse], 4, seen=seen.append)
    assert (one.size, one.digest) == (other.size, other.digest)
    assert len(content) < sum(seen) < 2 * len(content), "of the second one, the holes are not read"
    for at in (0, 20_000, 49_999, len(content) - 1):
        dense.write_bytes(content[:at] + b"c" + content[at + 1 :])
        (changed,) = await made_image.contents([dense], 2)
        assert changed.digest != one.digest, at
    (tmp_path / "empty").touch()
    (empty,) = await made_image.contents([tmp_path / "empty"], 1)
    assert (empty.size, len(empty.digest)) == (0, 32)
    sparse.unlink()
    sparse.symlink_to(dense)
    with pytest.raises(OSError, match="symbolic links"):
        await made_image.contents([dense, sparse], 2)
