"""The configuration: defaults, and all problems of a file in one error."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator import pki
from snapshotd.api.addresses import split_address
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig
from snapshotd.config import Config
from snapshotd.proc import host
from tests.sampling import DRAWN, examples
from tests.served import Certificates

RAM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not host.is_ram_backed(RAM), reason="/dev/shm is no tmpfs here")


def fake_criu(folder: Path, version: str = "4.2.1", *, exit_status: int = 0) -> Path:
    program = folder / "criu"
    program.write_text(f"#!/bin/sh\necho 'Version: {version}'\nexit {exit_status}\n")
    program.chmod(0o755)
    return program


def toml(certificates: Certificates, criu: Path, **changes: str) -> str:
    """A valid file. `changes` replace lines of it by key; an empty one removes the line."""
    lines = {
        "node": 'node = "node-1"',
        "listen": 'listen = "10.0.0.1:7070"',
        "image_dir": f'image_dir = "{RAM}/snapshotd-test-images"',
        "criu": f'criu = "{criu}"',
        "network_user": 'network_user = "nobody"',
        **changes,
    }
    tls = lines.pop(
        "tls",
        f'[tls]\nca = "{certificates.node.ca}"\ncert = "{certificates.node.cert}"\nkey = "{certificates.node.key}"',
    )
    return "\n".join([*lines.values(), tls])


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "snapshotd.toml"
    path.write_text(text)
    return Config.load(path)


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(BadConfig) as got:
        load(tmp_path, text)
    first, *rest = got.value.message.split("\n  - ")
    assert first == f"{tmp_path}/snapshotd.toml has {len(rest)} problem{'s' if len(rest) != 1 else ''}:"
    return rest


def test_defaults(tmp_path: Path, certificates: Certificates) -> None:
    criu = fake_criu(tmp_path)
    config = load(tmp_path, toml(certificates, criu))
    assert config == Config(
        node="node-1",
        listen="10.0.0.1:7070",
        advertise="10.0.0.1:7070",
        credentials=certificates.node,
        state_dir=Path("/var/lib/snapshotd"),
        spool_dir=Path("/var/lib/snapshotd/spool"),
        run_dir=Path("/run/snapshotd"),
        image_dir=RAM / "snapshotd-test-images",
        memory_claims_dir=Path("/run/snapshotd/memory"),
        criu=str(criu),
        criu_version="4.2.1",
        network_user="nobody",
        log_format="text",
        log_level="info",
        metrics_listen="127.0.0.1:9470",
        carry_paths=("/tmp", "/var/tmp", "/dev/shm"),
        streams=8,
        chunk_bytes=8388608,
        history_days=30,
        history_moves=1000,
        spool_rank_bytes=1 << 30,
        spool_total_bytes=8 << 30,
        spool_free_bytes=1 << 30,
        ranks_per_user=1024,
        nccl_timeout_s=60,
        nccl_member_timeout_ms=20,
        gpu_library_dir="",
        device_channel="encrypted",
        hold_device_memory=True,
        job_snapshots=True,
    )
    assert all(type(value) is str for value in (config.listen, config.advertise, config.criu, *config.carry_paths))
    assert config.admin_socket == Path("/run/snapshotd/admin.sock")
    with pytest.raises(AttributeError):
        config.node = "other"  # type: ignore[misc]


def test_every_key_can_be_set(tmp_path: Path, certificates: Certificates) -> None:
    text = toml(
        certificates,
        fake_criu(tmp_path),
        listen='listen = "[::]:7070"',
        rest="\n".join(
            [
                'advertise = "[fd00::1]:7070"',
                f'state_dir = "{tmp_path}/state"',
                f'run_dir = "{RAM}/snapshotd-test-run"',
                'log_format = "json"',
                'log_level = "debug"',
                'metrics_listen = ""',
                'carry_paths = ["/scratch/"]',
                "streams = 8",
                "chunk_bytes = 1048576",
                "history_days = 7",
                "history_moves = 50",
                f'gpu_library_dir = "{tmp_path}/"',
                f'spool_dir = "{tmp_path}/spool"',
                "spool_rank_bytes = 1",
                "spool_total_bytes = 2",
                "spool_free_bytes = 3",
                "ranks_per_user = 4",
            ]
        ),
    )
    config = load(tmp_path, text)
    assert config.advertise == "[fd00::1]:7070"
    assert config.state_dir == tmp_path / "state"
    assert (config.log_format, config.log_level, config.metrics_listen) == ("json", "debug", "")
    assert config.carry_paths == ("/scratch",)
    assert (config.streams, config.chunk_bytes) == (8, 1048576)
    assert (config.history_days, config.history_moves) == (7, 50)
    assert config.gpu_library_dir == str(tmp_path)
    assert config.spool_dir == tmp_path / "spool"
    assert (config.spool_rank_bytes, config.spool_total_bytes, config.spool_free_bytes) == (1, 2, 3)
    assert config.ranks_per_user == 4


def test_nodes_are_named_with_their_addresses(tmp_path: Path, certificates: Certificates) -> None:
    text = toml(certificates, fake_criu(tmp_path))
    assert load(tmp_path, text).nodes is None
    assert load(tmp_path, text + '\n[nodes]\nnode-2 = "10.0.0.2:7070"').nodes == {"node-2": "10.0.0.2:7070"}
    found = problems(tmp_path, text + '\n[nodes]\nnode-2 = "10.0.0.2"\n"-" = "10.0.0.3:7070"')
    assert [line.split(":")[0] for line in found] == ["nodes.-", "nodes.node-2"]
    assert problems(tmp_path, text.replace("[tls]", "nodes = 3\n[tls]"))[0].startswith("nodes: must be a table")


@pytest.mark.parametrize(("user", "reason"), [("no-such-user", "there is no user"), ("root", "is root")])
def test_network_user_must_exist_without_privileges(
    tmp_path: Path, certificates: Certificates, user: str, reason: str
) -> None:
    (problem,) = problems(tmp_path, toml(certificates, fake_criu(tmp_path), network_user=f'network_user = "{user}"'))
    assert problem.startswith("network_user: ")
    assert reason in problem


def test_image_dir_follows_run_dir(tmp_path: Path, certificates: Certificates) -> None:
    text = toml(certificates, fake_criu(tmp_path), image_dir=f'run_dir = "{RAM}/snapshotd-test-run"')
    assert load(tmp_path, text).image_dir == RAM / "snapshotd-test-run" / "images"


def test_all_problems_are_reported_at_once(tmp_path: Path, certificates: Certificates) -> None:
    text = "\n".join(
        [
            'node = "no de/../x"',
            'listn = "10.0.0.1:7070"',
            'advertise = "10.0.0.999:7070"',
            'state_dir = "var/lib"',
            f'image_dir = "{tmp_path}/images"',
            f'criu = "{fake_criu(tmp_path, "3.17.1")}"',
            'log_format = "xml"',
            "log_level = 3",
            'metrics_listen = "localhost"',
            'carry_paths = ["/tmp", "scratch", 7]',
            "streams = 0",
            "chunk_bytes = 5000000",
            'history_days = "long"',
            "history_moves = 0",
            "gpu_library_dir = 1",
            'device_channel = "open"',
            "colour = true",
            "[tls]",
            f'ca = "{tmp_path}/missing.crt"',
            'cert = "relative.crt"',
            'kee = "/x"',
        ]
    )
    disk_checked = not host.is_ram_backed(tmp_path)
    got = {line.split(":")[0]: line for line in problems(tmp_path, text)}
    expected = {"node", "listen", "listn", "advertise", "state_dir", "criu", "log_format", "log_level"}
    expected |= {"metrics_listen", "carry_paths", "streams", "chunk_bytes", "gpu_library_dir", "colour"}
    expected |= {"history_days", "history_moves"}
    expected |= {"device_channel", "network_user"}
    expected |= {"tls.cert", "tls.key", "tls.kee"} | ({"image_dir"} if disk_checked else set())
    assert set(got) == expected
    assert "is missing" in got["listen"]
    assert got["listn"] == "listn: unknown key; did you mean listen?"
    assert got["tls.kee"] == "tls.kee: unknown key; did you mean tls.key?"
    assert got["colour"] == "colour: unknown key"
    assert "3.17.1" in got["criu"]
    assert "'scratch', 7" in got["carry_paths"]
    assert "encrypted" in got["device_channel"]
    assert "plain" in got["device_channel"]
    assert "relative.crt" in got["tls.cert"]


def test_empty_file_lists_all_required_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPSHOT_CRIU", str(fake_criu(tmp_path)))
    keys = {line.split(":")[0] for line in problems(tmp_path, f'image_dir = "{RAM}"\nnetwork_user = "nobody"')}
    assert keys == {"node", "listen", "tls"}


def test_missing_or_invalid_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"none\.toml cannot be read: No such file"):
        Config.load(tmp_path / "none.toml")
    with pytest.raises(BadConfig, match=r"is not valid TOML: .*line 1"):
        load(tmp_path, "node = node-1")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("streams = true", "must be a whole number from 1 to 64, not True"),
        ("streams = 1.5", "must be a whole number from 1 to 64, not 1.5"),
        ("streams = 65", "must be a whole number from 1 to 64, not 65"),
        ("chunk_bytes = 100001", "must be a multiple of 4096"),
        ("lease_s = 30", "lease_s: unknown key"),
        ('run_dir = "/run/../etc"', "not an absolute path without '..'"),
        (f'run_dir = "/run/{"x" * 100}"', "is too long"),
        ('state_dir = "/etc/passwd"', "/etc/passwd is not a directory"),
        (f'state_dir = "/{"x" * 5000}"', "File name too long"),
        ('gpu_library_dir = "lib"', "not an absolute path without '..'"),
        ('gpu_library_dir = "/nowhere"', "/nowhere is not a directory"),
        ('snapshot_spill_dir = "nvme"', "not an absolute path without '..'"),
        (f'snapshot_spill_dir = "{RAM}/snapshotd-test-images/more"', "must be a directory of its own"),
        ('snapshot_spill_dir = "/var/lib"', "must be a directory of its own"),
        ('advertise = "0.0.0.0:7070"', "other nodes cannot reach 0.0.0.0:7070"),
    ],
)
def test_one_wrong_value_is_one_problem(tmp_path: Path, certificates: Certificates, line: str, says: str) -> None:
    found = problems(tmp_path, toml(certificates, fake_criu(tmp_path), rest=line))
    assert len(found) == 1
    assert says in found[0]


def test_example_has_only_valid_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the files that it names, and the mount, may be missing on this machine."""
    monkeypatch.setenv("SNAPSHOT_CRIU", str(fake_criu(tmp_path)))
    example = (Path(__file__).parents[2] / "systemd" / "snapshotd.toml.example").read_text(encoding="utf-8")
    # Its [tls] files do not exist here, so there are always problems, but none with a key or a value.
    for text in (example, re.sub(r"^# (\w+ = )", r"\1", example, flags=re.MULTILINE)):
        keys = {line.split(":")[0] for line in problems(tmp_path, text.replace("/etc/snapshotd", "/nowhere"))}
        assert keys <= {"tls.ca", "tls.cert", "tls.key", "image_dir", "criu", "network_user"}


def test_example_shows_the_defaults() -> None:
    example = (Path(__file__).parents[2] / "systemd" / "snapshotd.toml.example").read_text(encoding="utf-8")
    top = example.split("# `snapshotd join` writes", 1)[0]
    shown = tomllib.loads("".join(re.findall(r"^# (\w+ = .*\n)", top, flags=re.MULTILINE)))
    defaults = {field.name: field.default for field in msgspec.structs.fields(Config) if not field.required}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    depends = {"advertise", "data_addresses"}  # on the node: an example of a value
    depends |= {"criu", "image_dir", "spool_dir", "memory_claims_dir"}  # on the machine, or on another key
    differ = {name: (value, plain[name]) for name, value in shown.items() if name not in depends}
    assert {name: pair for name, pair in differ.items() if str(pair[0]) != str(pair[1])} == {}
    assert len(differ) > 20


def test_listening_on_all_addresses_requires_advertise(tmp_path: Path, certificates: Certificates) -> None:
    text = toml(certificates, fake_criu(tmp_path), listen='listen = "0.0.0.0:7070"')
    assert [line.split(":")[0] for line in problems(tmp_path, text)] == ["advertise"]


def test_image_dir_on_a_disk_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    disk = next((path for path in (tmp_path, Path("/var"), Path("/usr")) if not host.is_ram_backed(path)), None)
    if disk is None:
        pytest.skip("this machine runs from memory")
    text = toml(certificates, fake_criu(tmp_path), image_dir=f'image_dir = "{disk}/a/b/images"')
    (found,) = problems(tmp_path, text)
    assert found.startswith(f"image_dir: {disk}/a/b/images is not on tmpfs or ramfs")


class TestCertificates:
    def found(self, tmp_path: Path, who: Credentials, node: str = "node-1") -> list[str]:
        from snapshotd.api import certificates

        return certificates.problems(who, node)

    def test_valid_certificate_has_no_problems(self, tmp_path: Path, certificates: Certificates) -> None:
        assert self.found(tmp_path, certificates.node) == []

    def test_certificate_of_another_node_or_role_is_refused(self, tmp_path: Path, certificates: Certificates) -> None:
        assert (
            "is the certificate of node:node-2, but this node is node:node-1"
            in self.found(tmp_path, certificates.other_node)[0]
        )
        assert "operator:alice" in self.found(tmp_path, certificates.operator)[0]

    def test_certificate_of_another_authority_is_refused(self, tmp_path: Path, certificates: Certificates) -> None:
        mixed = dataclasses.replace(certificates.node, ca=certificates.stranger.ca)
        assert "was not issued by" in self.found(tmp_path, mixed)[0]

    def test_key_of_another_certificate_is_refused(self, tmp_path: Path, certificates: Certificates) -> None:
        mixed = dataclasses.replace(certificates.node, key=certificates.operator.key)
        assert "is not the key of" in self.found(tmp_path, mixed)[0]

    def test_key_that_other_users_can_read_is_refused(self, tmp_path: Path, certificates: Certificates) -> None:
        key = tmp_path / "open.key"
        key.write_bytes(certificates.node.key.read_bytes())
        key.chmod(0o644)
        (found,) = self.found(tmp_path, dataclasses.replace(certificates.node, key=key))
        assert "chmod 600" in found

    def test_file_without_pem_is_refused(self, tmp_path: Path, certificates: Certificates) -> None:
        junk = tmp_path / "junk"
        junk.write_bytes(b"\xff\x00junk")
        junk.chmod(0o600)
        for name in ("ca", "cert", "key"):
            (found,) = self.found(tmp_path, dataclasses.replace(certificates.node, **{name: junk}))
            assert found.startswith(f"tls.{name}: {junk} does not contain a PEM")

    def test_missing_files_are_all_named(self, tmp_path: Path) -> None:
        found = self.found(tmp_path, Credentials(tmp_path / "a", tmp_path / "b", tmp_path / "c"))
        assert [line.split(":")[0] for line in found] == ["tls.ca", "tls.cert", "tls.key"]

    def test_expired_certificate_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pki, "LEAF_VALID", timedelta(seconds=-1))
        folder = tmp_path / "ca"
        pki.init(folder)
        identity = pki.issue_node(folder, "node-1")
        today = datetime.now(UTC)
        (found,) = self.found(tmp_path, Credentials(identity.ca, identity.cert, identity.key))
        assert found.endswith((f"expired on {today:%Y-%m-%d}", f"expired on {today - timedelta(days=1):%Y-%m-%d}"))


@pytest.mark.parametrize(
    ("address", "parts"),
    [("10.0.0.1:7070", ("10.0.0.1", 7070)), ("[::1]:1", ("::1", 1)), ("node-1.lab:65535", ("node-1.lab", 65535))],
)
def test_valid_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":",
        "10.0.0.1",
        "10.0.0.1:",
        ":7070",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "1.2.3:1",
        "::1:7070",
        "[x]:1",
        "a b:1",
        "a/b:1",
        "h:١",
    ],
)
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        split_address(address)


toml_values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["/", "/x", "h:1", "node-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from([*Config.__struct_fields__, "tls", "device_lane"]) | st.text(max_size=8)


@given(values=st.dictionaries(keys, toml_values, max_size=6))
@settings(DRAWN, max_examples=examples(150))
def test_any_values_raise_bad_config(values: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.config.find_criu", lambda explicit: ("/criu", "4.2.1"))
    with pytest.raises(BadConfig):
        Config.from_values(values, "a file")


def test_former_name_of_a_key_is_accepted(tmp_path: Path, certificates: Certificates) -> None:
    text = toml(certificates, fake_criu(tmp_path), rest='device_lane = "plain"')
    assert load(tmp_path, text).device_channel == "plain"
