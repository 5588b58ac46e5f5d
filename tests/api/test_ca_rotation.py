"""The CA of running daemons is replaced: at every stage nodes accept each other, and in the end only the new CA counts."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from migrator import ca_rotation, pki
from migrator.ca_rotation import Stage
from snapshotd.api import certificates as checks
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import Credentials, DaemonClient
from snapshotd.api.errors import BadConfig, Denied, Unreachable
from snapshotd.api.revocation import Revocations
from snapshotd.network.dispatch import Services
from tests.served import Linked, credentials, servicer

EVER = timedelta(days=3650)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki")
    return tmp_path / "pki"


def given(ca: Path, role: str, name: str, folder: Path) -> Credentials:
    """Copies what a node or an operator has, as `snapshotd join` does."""
    folder.mkdir(exist_ok=True)
    files = Credentials(folder / "ca.crt", folder / "own.crt", folder / "own.key")
    own = pki.identity_of(ca, role, name)
    for source, target in ((own.ca, files.ca), (own.key, files.key), (own.cert, files.cert)):
        shutil.copy(source, folder / "new")
        os.replace(folder / "new", target)
    if (ca / "ca.crl").exists():
        shutil.copy(ca / "ca.crl", folder / "ca.crl")
    return files


class Node:
    """A daemon's servicer behind the work of a network process, with files of its own."""

    def __init__(self, ca: Path, name: str, folder: Path) -> None:
        self.ca, self.name, self.folder = ca, name, folder
        pki.issue_node(ca, name)
        self.files = given(ca, "node", name, folder)

    async def join(self) -> None:
        given(self.ca, "node", self.name, self.folder)
        await self.ends.refresh()

    async def __aenter__(self) -> Node:
        async def get_node(request: pb.GetNodeRequest, context: object) -> pb.NodeInfo:
            return pb.NodeInfo(name=self.name)

        services = Services()
        servicer("Node", GetNode=get_node)(services)
        self.ends = Linked(services, self.files)
        self._listening = self.ends.listening("127.0.0.1:0")
        self.port = await self._listening.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.__aexit__(None, None, None)

    def client(self, who: Credentials) -> DaemonClient:
        return DaemonClient(f"127.0.0.1:{self.port}", credentials=who, node=self.name)

    def client_of(self, other: Node) -> DaemonClient:
        """As this daemon calls the other one: through its network process."""
        endpoint = f"127.0.0.1:{other.port}"
        return DaemonClient(endpoint, node=other.name, channel=self.ends.connect(other.name, endpoint))


async def ask(client: DaemonClient) -> str:
    return (await client.node.GetNode(pb.GetNodeRequest(), timeout_s=20)).name


@pytest.fixture
async def nodes(ca: Path, tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    async with Node(ca, "node-1", tmp_path / "one") as one, Node(ca, "node-2", tmp_path / "two") as two:
        yield one, two


async def test_nodes_accept_each_other_at_every_stage(ca: Path, nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    lasting = [one.client_of(two), two.client_of(one)]  # of a daemon that opened them before the rotation
    before = pki.load_ca(ca)[0]
    for step in (ca_rotation.introduce, ca_rotation.switch, ca_rotation.finish):
        step(ca)
        pki.renew(ca, EVER)
        for node in nodes:
            assert [await ask(client) for client in lasting] == ["node-2", "node-1"]
            async with one.client_of(two) as new, two.client_of(one) as other:
                assert [await ask(new), await ask(other)] == ["node-2", "node-1"]
            await node.join()
    assert [await ask(client) for client in lasting] == ["node-2", "node-1"]
    after = pki.load_ca(ca)[0]
    assert after.subject != before.subject
    for node in nodes:
        assert checks.problems(node.files, node.name) == []
    for client in lasting:
        await client.close()


async def test_certificate_of_the_old_ca_is_refused_once_it_is_dropped_also_on_an_open_connection(
    ca: Path, nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    one, _ = nodes
    pki.issue_operator(ca, "alice")
    old = given(ca, "operator", "alice", tmp_path / "old")
    async with one.client(old) as connected:
        ca_rotation.introduce(ca)
        await one.join()
        assert await ask(connected) == "node-1"
        ca_rotation.switch(ca)
        pki.renew(ca, EVER)
        await one.join()
        assert await ask(connected) == "node-1", "both CAs are trusted"
        ca_rotation.finish(ca)
        await one.join()
        with pytest.raises(Denied, match="of a CA that this node no longer trusts"):
            await ask(connected)
    trusting = dataclasses.replace(old, ca=ca / "ca.crt")  # it would accept the node
    async with one.client(trusting) as again:
        with pytest.raises(Unreachable):
            await ask(again)
    async with one.client(credentials(pki.identity_of(ca, "operator", "alice"))) as new:
        assert await ask(new) == "node-1"


async def test_old_certificate_that_the_next_ca_has_not_replaced_is_not_trusted_by_the_finished_folder(
    ca: Path,
) -> None:
    pki.issue_node(ca, "node-1")
    for step in (ca_rotation.introduce, ca_rotation.switch, ca_rotation.finish):
        step(ca)
    (problem,) = checks.problems(credentials(pki.identity_of(ca, "node", "node-1")), "node-1")
    assert "was not issued by" in problem


def test_stages_follow_each_other_and_the_old_key_goes(ca: Path) -> None:
    old = (ca / "ca.key").read_bytes()
    assert ca_rotation.stage(ca) is Stage.STABLE
    ca_rotation.introduce(ca)
    assert (ca_rotation.stage(ca), (ca / "ca.key").read_bytes()) == (Stage.INTRODUCED, old)
    assert (ca / "next-ca.key").stat().st_mode & 0o777 == 0o600
    stays = ca_rotation.new_ca(ca)
    ca_rotation.switch(ca)
    assert (ca_rotation.stage(ca), ca_rotation.new_ca(ca)) == (Stage.SWITCHED, stays)
    assert not (ca / "next-ca.key").exists()
    ca_rotation.finish(ca)
    assert (ca_rotation.stage(ca), ca_rotation.new_ca(ca)) == (Stage.STABLE, stays)
    assert (ca / "ca.crt").read_bytes().count(b"BEGIN CERTIFICATE") == 1
    assert old not in {path.read_bytes() for path in ca.iterdir() if path.is_file()}


@pytest.mark.parametrize("left", ["", "half a k"])
def test_interrupted_introduction_begins_anew(ca: Path, left: str) -> None:
    content = left or pki.pem_of(pki.new_authority()[0]).decode()
    (ca / "next-ca.key").write_text(content)
    assert ca_rotation.stage(ca) is Stage.STABLE
    ca_rotation.introduce(ca)
    assert ca_rotation.stage(ca) is Stage.INTRODUCED


def test_revocations_outlive_the_ca_that_made_them(ca: Path) -> None:
    pki.issue_operator(ca, "thief")
    _, (serial,) = pki.revoke(ca, "operator:thief")
    running = Revocations(ca / "ca.crt")
    for step in (ca_rotation.introduce, ca_rotation.switch, ca_rotation.finish):
        step(ca)
        assert running.revoked(serial)
        assert Revocations(ca / "ca.crt").revoked(serial), "a daemon that starts now reads the list too"


def test_list_that_arrives_before_its_ca_is_read_again_when_the_ca_is_there(ca: Path, tmp_path: Path) -> None:
    pki.issue_operator(ca, "early")
    pki.revoke(ca, "operator:early")
    node = tmp_path / "node"
    node.mkdir()
    for name in ("ca.crt", "ca.crl"):
        shutil.copy(ca / name, node / name)
    running = Revocations(node / "ca.crt")
    ca_rotation.introduce(ca)
    ca_rotation.switch(ca)
    pki.issue_operator(ca, "late")
    _, (serial,) = pki.revoke(ca, "operator:late")
    shutil.copy(ca / "ca.crl", node / "ca.crl")
    assert not running.revoked(serial)
    shutil.copy(ca / "ca.crt", node / "new")
    os.replace(node / "new", node / "ca.crt")
    assert running.revoked(serial)


def test_damaged_next_key_is_reported(ca: Path) -> None:
    ca_rotation.introduce(ca)
    (ca / "next-ca.key").write_text("nonsense")
    with pytest.raises(BadConfig, match=r"next-ca\.key is damaged"):
        ca_rotation.stage(ca)


async def test_connection_with_replaced_certificates_is_closed_with_its_last_call(ca: Path, tmp_path: Path) -> None:
    """A call that is open goes on over the old connection, and a new one uses the new certificate."""
    entered, go = asyncio.Event(), asyncio.Event()
    numbers = itertools.count()

    async with Node(ca, "node-1", tmp_path / "one") as one:

        async def slow(request: pb.GetNodeRequest, context: object) -> pb.NodeInfo:
            if next(numbers) == 0:
                entered.set()
                await go.wait()
            return pb.NodeInfo(name="node-2")

        pki.issue_node(ca, "node-2")
        services = Services()
        servicer("Node", GetNode=slow)(services)
        ends = Linked(services, given(ca, "node", "node-2", tmp_path / "two"))
        async with ends.listening("127.0.0.1:0") as port:
            endpoint = f"127.0.0.1:{port}"
            channel = one.ends.connect("node-2", endpoint)
            client = DaemonClient(endpoint, node="node-2", channel=channel)
            first = asyncio.create_task(ask(client))
            await asyncio.wait_for(entered.wait(), 60)
            pki.renew(ca, EVER)
            await one.join()
            assert await ask(client) == "node-2"
            outbound = one.ends.network._outbound
            assert len(outbound._channels) == 1
            go.set()
            assert await first == "node-2"
            await client.close()
            while outbound._channels or outbound._closing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
