"""A bundle is verified with the operator's certificate alone, and the first record that is not as signed is named."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from migrator import pki
from migrator.autopilot import bundle, chain
from snapshotd.api.errors import BadConfig, Damaged, NotFound, Usage
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_report import Log
from tests.autopilot.test_store import tampered
from tests.cli.conftest import Migrator, a_rank


@dataclass(frozen=True)
class People:
    alice: pki.Identity
    bob: pki.Identity
    node: pki.Identity


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> People:
    folder = tmp_path_factory.mktemp("pki")
    pki.init(folder)
    return People(
        pki.issue_operator(folder, "alice"), pki.issue_operator(folder, "bob"), pki.issue_node(folder, "node-1")
    )


def a_log() -> list[chain.Record]:
    log = Log()
    for number in range(3):
        log.moved(1000.0 + number, number, "hardware")
    return log.records


def lines_of(text: bytes) -> list[bytes]:
    return text.splitlines(keepends=True)


@pytest.fixture
def text(people: People) -> bytes:
    return bundle.make(a_log(), people.alice.cert, people.alice.key, time.time())


def first_problem(text: bytes, people: People) -> str:
    found = bundle.verify(text, people.alice.cert)
    assert found.problems
    return found.problems[0]


def test_an_untouched_bundle_is_valid_and_names_its_signer(text: bytes, people: People) -> None:
    found = bundle.verify(text, people.alice.cert)
    assert (found.problems, found.manifest.operator, found.head) == ([], "operator:alice", a_log()[-1].digest)
    assert bundle.verify(bundle.make([], people.alice.cert, people.alice.key, time.time()), people.alice.cert).head


def test_every_altered_byte_is_noticed_and_the_record_is_named(text: bytes, people: People) -> None:
    begins = 0
    for number, line in enumerate(lines_of(text)):
        for at in (0, len(line) // 2, len(line) - 2, len(line) - 1):
            altered = bytearray(text)
            altered[begins + at] ^= 1
            if number < 2:
                with pytest.raises(Damaged):
                    bundle.verify(bytes(altered), people.alice.cert)
            else:
                assert first_problem(bytes(altered), people).startswith(f"record {number - 1} ")
        begins += len(line)


def test_an_altered_record_with_new_digests_after_it_is_named(text: bytes, people: People) -> None:
    records = a_log()
    forged = records[:2]
    for one in records[2:]:
        words = "nothing happened" if one.id == 3 else one.text
        forged.append(chain.record(one.id, one.unix_s, one.kind, one.node, words, one.data, forged[-1].digest))
    assert not chain.problems(forged)  # as a log it is perfect
    head = b"".join(lines_of(text)[:2])
    assert first_problem(head + b"".join(one.content() + b"\n" for one in forged), people) == "record 3 was altered"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines[:3] + lines[4:], "record 4 is missing: record 5 is in its place"),
        (lambda lines: lines[1:], "record 1 is missing: record 2 is in its place"),
        (lambda lines: lines[:-1], "record 6 of 6 is missing: the bundle ends after record 5"),
        (lambda lines: [], "record 1 of 6 is missing: the bundle ends before the first record"),
        (lambda lines: [*lines[:-1], lines[-1][:9]], "record 6 of 6 is missing: the bundle ends in the middle of it"),
        (lambda lines: [*lines[:-1], lines[-1][:-1]], "record 6 of 6 is missing: the bundle ends in the middle of it"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "record 2 is not in its place: record 3 is there"),
        (
            lambda lines: [*lines[:2], b"[]\n", *lines[2:]],
            "record 3 is not in its place: a line that was not signed is there",
        ),
        (lambda lines: [*lines, lines[0]], "there is more after record 6, the last one that was signed"),
        (lambda lines: [*lines, b"x"], "there is more after record 6, the last one that was signed"),
    ],
)
def test_removed_moved_and_added_records_are_named(
    text: bytes, people: People, change: Callable[[list[bytes]], list[bytes]], expected: str
) -> None:
    lines = lines_of(text)
    assert first_problem(b"".join([*lines[:2], *change(lines[2:])]), people) == expected


def test_another_certificate_is_refused_and_both_are_named(text: bytes, people: People) -> None:
    with pytest.raises(Damaged, match=r"another certificate: operator:alice.*operator:bob"):
        bundle.verify(text, people.bob.cert)


def test_a_bundle_signed_with_another_key_is_refused(text: bytes, people: People) -> None:
    """Bob signs a manifest that names Alice's certificate."""
    first, _, *rest = lines_of(text)
    key = serialization.load_pem_private_key(people.bob.key.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    signature = base64.b64encode(key.sign(first[:-1], ec.ECDSA(hashes.SHA256())))
    with pytest.raises(Damaged, match="not made with the key of"):
        bundle.verify(b"".join([first, signature + b"\n", *rest]), people.alice.cert)


def test_nothing_is_signed_with_files_that_could_not_be_verified(people: People) -> None:
    now = time.time()
    with pytest.raises(BadConfig, match="is not the key of"):
        bundle.make(a_log(), people.alice.cert, people.bob.key, now)
    with pytest.raises(BadConfig, match="node:node-1, not of an operator"):
        bundle.make(a_log(), people.node.cert, people.node.key, now)
    with pytest.raises(BadConfig, match="and the time of the signature is"):
        bundle.make(a_log(), people.alice.cert, people.alice.key, now + pki.LEAF_VALID.total_seconds() + 86400)
    with pytest.raises(BadConfig, match="is not a key"):
        bundle.make(a_log(), people.alice.cert, people.alice.cert, now)
    with pytest.raises(Damaged, match="so it is not signed: record 2 is missing"):
        bundle.make([one for one in a_log() if one.id != 2], people.alice.cert, people.alice.key, now)


def test_a_text_that_is_no_bundle_is_refused(people: People) -> None:
    for text in (b"", b"\n\n", b"{}\n\n", b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(Damaged, match="line 1 is not the manifest"):
            bundle.verify(text, people.alice.cert)
    with pytest.raises(Damaged, match="has the format 'other'"):
        bundle.verify(json.dumps({**_MANIFEST, "format": "other"}).encode(), people.alice.cert)


_MANIFEST = {"format": "", "operator": "", "certificate_sha256": "", "exported_unix_s": 1.0, "digests": []}


def test_rsa_keys_sign_too(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "operator:carol")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    pem = serialization.Encoding.PEM
    (tmp_path / "c.crt").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.NoEncryption()
    (tmp_path / "c.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    made = bundle.make(a_log(), tmp_path / "c.crt", tmp_path / "c.key", time.time())
    assert bundle.verify(made, tmp_path / "c.crt").problems == []
    with pytest.raises(Damaged):
        bundle.verify(made.replace(b'"exported_unix_s":1', b'"exported_unix_s":2'), tmp_path / "c.crt")


# ---------------------------------------------------------------------- the verbs


def test_export_and_verify_elsewhere(
    pilots: PilotCluster, migrator: Migrator, people: People, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    migrator("drain", "node-1", "--reason", "Lüfter\n2")
    file, signer = tmp_path / "log.bundle", ("--cert", str(people.alice.cert), "--key", str(people.alice.key))
    assert migrator("report", "export", str(file)).code == BadConfig.exit_code  # these nodes are reached without TLS
    made = migrator("report", "export", str(file), *signer, "--json").json
    assert made["records"] > 3
    assert migrator("report", "export", str(file), *signer).code == Usage.exit_code  # it exists
    tls = f'[tls]\nca = "{people.alice.ca}"\ncert = "{people.alice.cert}"\nkey = "{people.alice.key}"\n'
    pilots.path.write_text(pilots.path.read_text() + tls)
    assert migrator("report", "export", str(tmp_path / "second")).code == 0

    monkeypatch.setenv("MIGRATOR_CLUSTER", str(tmp_path / "none.toml"))  # somebody else's machine
    monkeypatch.setenv("MIGRATOR_STATE", str(tmp_path / "none"))
    argv = ("report", "verify", "--bundle", str(file), "--cert", str(people.alice.cert))
    found = migrator(*argv, "--json").json
    assert (found["valid"], found["operator"], found["head"]) == (True, "operator:alice", made["head"])
    assert "is intact" in migrator("report", "verify", str(tmp_path / "second"), *argv[-2:]).out
    assert migrator(*argv, "--head", made["head"]).code == 0
    assert migrator(*argv, "--head", "0" * 63 + "1").code == Damaged.exit_code
    file.write_bytes(file.read_bytes().replace(b"spare-1", b"spare-2", 1))
    ran = migrator(*argv)
    assert (ran.code, "was altered" in ran.err) == (Damaged.exit_code, True)
    assert migrator(*argv, "--json").code == Damaged.exit_code


def test_a_tampered_log_is_not_exported(
    pilots: PilotCluster, migrator: Migrator, people: People, tmp_path: Path
) -> None:
    migrator("taint", "node-1")
    tampered(tmp_path / "state", "UPDATE events SET text = 'nothing happened' WHERE id = 1")
    signer = ("--cert", str(people.alice.cert), "--key", str(people.alice.key))
    ran = migrator("report", "export", str(tmp_path / "b"), *signer)
    assert (ran.code, "record 1 was changed" in ran.err) == (Damaged.exit_code, True)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("show", "FILE"),
        ("export",),
        ("export", "FILE", "--head", "0"),
        ("export", "FILE", "--cert", "a.crt"),
        ("verify", "FILE"),
        ("verify", "--cert", "a.crt"),
        ("verify", "FILE", "--bundle", "FILE", "--cert", "a.crt"),
        ("verify", "FILE", "--cert", "a.crt", "--key", "a.key"),
        ("show", "--cert", "a.crt"),
    ],
)
def test_options_that_do_not_belong_together(pilots: PilotCluster, migrator: Migrator, words: tuple[str, ...]) -> None:
    assert migrator("report", *words).code == Usage.exit_code


def test_missing_files_are_named(pilots: PilotCluster, migrator: Migrator, people: People, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"x")
    for file, cert in ((tmp_path / "none", people.alice.cert), (tmp_path / "b", tmp_path / "none")):
        ran = migrator("report", "verify", str(file), "--cert", str(cert))
        assert (ran.code, str(tmp_path / "none") in ran.err) == (NotFound.exit_code, True)
