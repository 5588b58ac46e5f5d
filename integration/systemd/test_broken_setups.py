"""Installations that are broken on purpose. `snapshotd --check` or `migrator doctor` names each, and says what to do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from integration.systemd.cluster import SystemdCluster
from integration.systemd.nodes import Node

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

TLS, CRIU = "etc/snapshotd/tls", "opt/snapshotd/criu/criu"
Break = Callable[[SystemdCluster, Node], AbstractContextManager[None]]

#: As root on the node, with the Python packages of the installation: a certificate that `migrator cluster` does not make.
EXPIRED = """
import datetime, sys
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
cert = x509.load_pem_x509_certificate(open("/root/.config/migrator/pki/nodes/spare-1.crt", "rb").read())
key = serialization.load_pem_private_key(open("/root/.config/migrator/pki/ca.key", "rb").read(), None)
now = datetime.datetime.now(datetime.UTC)
made = x509.CertificateBuilder(
    cert.issuer, cert.subject, cert.public_key(), cert.serial_number,
    now - datetime.timedelta(days=30), now - datetime.timedelta(days=1), list(cert.extensions))
open(sys.argv[1], "wb").write(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
"""
LISTEN = "import socket, time; s = socket.create_server(('10.0.0.3', 7070)); time.sleep(3600)"


@contextlib.contextmanager
def changed(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """The file has another content meanwhile."""
    before, mode = path.read_bytes(), path.stat().st_mode
    try:
        path.unlink()  # a program that runs keeps what it has
        path.write_bytes(change(before))
        path.chmod(mode)
        yield
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)
        path.chmod(mode)


def file(name: str, change: Callable[[bytes], bytes]) -> Break:
    return lambda _, node: changed(node.root / name, change)


def library(change: Callable[[bytes], bytes]) -> Break:
    """The library for ranks, as it is installed and as the package keeps it."""

    @contextlib.contextmanager
    def breaks(_: SystemdCluster, node: Node) -> Iterator[None]:
        inside = (node.root / "opt/snapshotd").glob
        with contextlib.ExitStack() as stack:
            for path in (
                *inside("shims/*/libsnapshim.so"),
                *inside("python3.*/lib/python3.*/site-packages/shim/lib/libsnapshim.so"),
            ):
                stack.enter_context(changed(path, change))
            yield

    return breaks


@contextlib.contextmanager
def expired(cluster: SystemdCluster, node: Node) -> Iterator[None]:
    first = cluster.nodes["node-1"]
    python = f"/opt/snapshotd/{Path(first.run('readlink', '-f', '/usr/bin/python3').strip()).name}/bin/python"
    first.run(python, "-P", "-c", EXPIRED, "/root/expired.crt")
    with changed(node.root / TLS / "node.crt", lambda _: (first.root / "root/expired.crt").read_bytes()):
        yield


@contextlib.contextmanager
def other_ca(cluster: SystemdCluster, node: Node) -> Iterator[None]:
    first = cluster.nodes["node-1"]
    if not (first.root / "root/other").exists():
        first.run("migrator", "pki", "init", "--dir", "/root/other")
    with changed(node.root / TLS / "ca.crt", lambda _: (first.root / "root/other/ca.crt").read_bytes()):
        yield


@contextlib.contextmanager
def port_taken(_: SystemdCluster, node: Node) -> Iterator[None]:
    node.run("systemd-run", "--unit=squatter", "/usr/bin/python3", "-c", LISTEN)
    try:
        node.run("sh", "-c", "until ss -Hltn sport = :7070 | grep -q .; do sleep 0.1; done")
        yield
    finally:
        node.run("systemctl", "stop", "squatter")


@contextlib.contextmanager
def small_tmpfs(_: SystemdCluster, node: Node) -> Iterator[None]:
    node.run("mount", "-o", "remount,size=64k", "/run/snapshotd/images")
    try:
        yield
    finally:
        node.run("mount", "-o", "remount,size=90%", "/run/snapshotd/images")


@contextlib.contextmanager
def no_tmpfs(_: SystemdCluster, node: Node) -> Iterator[None]:
    node.run("systemctl", "stop", "run-snapshotd-images.mount")
    node.run("mount", "--bind", "/root", "/run/snapshotd/images")
    try:
        yield
    finally:
        node.run("umount", "/run/snapshotd/images")


def removed(name: str) -> Break:
    @contextlib.contextmanager
    def breaks(_: SystemdCluster, node: Node) -> Iterator[None]:
        path = node.root / name
        path.rename(path.with_name(".moved"))
        try:
            yield
        finally:
            path.with_name(".moved").rename(path)

    return breaks


def newer_abi(content: bytes) -> bytes:
    at = content.index(b"SNAPSHIM\x04\0\0\0")
    return content[: at + 8] + b"\x09" + content[at + 9 :]


def other_machine(content: bytes) -> bytes:
    return content[:18] + (b"\xb7" if content[18] == 62 else b"\x3e") + content[19:]


OLD_CRIU = b"#!/bin/sh\necho 'Version: 3.17.1'\n"

#: What is broken, and words of the sentence that names it.
BROKEN: dict[str, tuple[Break, tuple[str, ...]]] = {
    "expired certificate": (expired, ("tls.cert: /etc/snapshotd/tls/node.crt expired on",)),
    "another CA": (other_ca, ("/etc/snapshotd/tls/node.crt", "/etc/snapshotd/tls/ca.crt")),
    "key of another certificate": (
        lambda cluster, node: changed(
            node.root / TLS / "node.key",
            lambda _: (cluster.nodes["node-1"].root / "root/.config/migrator/pki/nodes/node-2.key").read_bytes(),
        ),
        ("/etc/snapshotd/tls/node.key",),
    ),
    "port taken": (port_taken, ("10.0.0.3:7070",)),
    "tmpfs too small": (small_tmpfs, ("/run/snapshotd/images", "No space left on device")),
    "no tmpfs": (no_tmpfs, ("/run/snapshotd/images", "tmpfs")),
    "criu missing": (removed(CRIU), ("no CRIU 4.2 or newer was found", "none at all")),
    "criu too old": (file(CRIU, lambda _: OLD_CRIU), ("is CRIU 3.17.1", "4.2 or newer")),
    "library of another interface": (library(newer_abi), ("version 9 of the interface",)),
    "library of another architecture": (library(other_machine), ("is for ", "and this node is ")),
    "library damaged": (library(lambda content: content[: len(content) // 2]), ("libsnapshim.so",)),
    "library for a newer glibc": (library(lambda content: content.replace(b"GLIBC_2.", b"GLIBC_9.")), ("GLIBC_9.",)),
    "pycriu missing": (removed("opt/snapshotd/criu/python"), ("pycriu",)),
    "configuration missing": (removed("etc/snapshotd/snapshotd.toml"), ("/etc/snapshotd/snapshotd.toml",)),
}


@pytest.fixture(scope="module")
def spare(installed: SystemdCluster) -> Iterator[Node]:
    """A node whose daemon does not run, as before its first start."""
    node = installed.nodes["spare-1"]
    node.run("systemctl", "stop", "snapshotd", timeout_s=300)
    yield node
    node.run("systemctl", "start", "snapshotd", timeout_s=300)


def check(node: Node) -> tuple[int, str]:
    """`snapshotd --check` as a service: its exit code, and what it says."""
    done = node.ask("systemd-run", "--quiet", "--pipe", "--wait", "snapshotd", "--check", timeout_s=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_set_up_is_named(installed: SystemdCluster, spare: Node, name: str) -> None:
    breaks, words = BROKEN[name]
    with breaks(installed, spare):
        code, said = check(spare)
    assert code != 0, said
    assert "remedy" in said
    assert "Traceback" not in said
    for word in words:
        assert word in said, said


def test_the_repaired_set_up_passes(spare: Node) -> None:
    code, said = check(spare)
    assert code == 0, said


def test_a_node_works_with_a_read_only_etc(installed: SystemdCluster, spare: Node) -> None:
    spare.run("mount", "--bind", "-o", "ro", "/etc", "/etc")
    try:
        assert spare.ask("touch", "/etc/snapshotd/x").returncode != 0
        code, said = check(spare)
        spare.run("systemctl", "start", "snapshotd", timeout_s=300)
        spare.run("systemctl", "stop", "snapshotd", timeout_s=300)
    finally:
        spare.run("umount", "/etc")
    assert code == 0, said


def test_a_firewall_between_two_nodes_is_named(installed: SystemdCluster) -> None:
    """Both nodes answer the operator, but one drops connections from the other."""
    installed.nodes["spare-1"].run("systemctl", "start", "snapshotd", timeout_s=300)
    node = installed.nodes["node-2"]
    begins = "ip saddr 10.0.0.3 tcp flags & (syn | ack) == syn drop"
    rules = f"table ip wall {{ chain in {{ type filter hook input priority 0; {begins}; }}; }}"
    node.run("nft", rules)
    try:
        done = installed.migrator("doctor", "--json", "--timeout", "100")
    finally:
        node.run("nft", "delete", "table", "ip", "wall")
    found = [each for each in json.loads(done.stdout)["between"] if each["check"] in ("control-port", "data-port")]
    assert done.returncode != 0
    assert found
    assert all("spare-1 → node-2" in each["text"] and each["remedy"] for each in found), found


def test_another_mtu_is_named(installed: SystemdCluster) -> None:
    node = installed.nodes["node-2"]
    node.run("ip", "link", "set", "eth0", "mtu", "1400")
    try:
        done = installed.migrator("doctor", "--json", "--timeout", "100")
    finally:
        node.run("ip", "link", "set", "eth0", "mtu", "1500")
    (found,) = [each for each in json.loads(done.stdout)["between"] if each["check"] == "mtu"]
    assert "1400 on node-2" in found["text"]
