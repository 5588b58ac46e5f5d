"""An operator's machine, which is no node: the package `migrator`, moves by an ordinary user, the autopilot's service."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from integration.harness import until
from integration.systemd.cluster import APT, USER, SystemdCluster, files, start_autopilot
from integration.systemd.conftest import package_under_test
from integration.systemd.nodes import Node
from integration.systemd.root_image import root_image

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

NAME, ADDRESS = "desk-1", "10.0.0.6"
PAGE = "http://127.0.0.1:7080"


@pytest.fixture
def desk(installed: SystemdCluster) -> Iterator[Node]:
    with installed.further_node(NAME, ADDRESS, root_image()) as node:
        shutil.copy(package_under_test("migrator"), node.root / "root/migrator.deb")
        yield node


def fetched(node: Node, path: str) -> str:
    program = f"import urllib.request as r; print(r.urlopen('{PAGE}{path}', timeout=20).read().decode())"
    return node.run("python3", "-c", program)


def test_an_operators_machine_moves_ranks_watches_the_nodes_and_is_clean_afterwards(
    installed: SystemdCluster, desk: Node
) -> None:
    before = files(desk)
    desk.run(*APT, "install", "/root/migrator.deb", timeout_s=600)
    assert desk.ask("which", "snapshotd").returncode != 0
    assert desk.show("migrator-autopilot", "ActiveState") == "inactive", "it is started by an administrator only"

    # Docs: an operator gets a certificate, ca.crt and a copy of cluster.toml. Here those of the one who made the cluster.
    given = desk.root / "etc/migrator"
    shutil.copytree(installed.nodes["node-1"].root / "etc/migrator", given)
    desk.run("chown", "-R", f"{USER}:", "/etc/migrator")
    out = installed.start_job("from-desk")
    moved = desk.session("migrator move --job from-desk --rank 0 --to node-2", USER)
    assert "→ node-2" in moved
    installed.await_steps(out)

    desk.run("chown", "-R", "root:", "/etc/migrator")
    start_autopilot(desk, "--page", PAGE.removeprefix("http://"), "--page-plain-http")
    until("the page", lambda: PAGE in desk.journal("migrator-autopilot"))
    assert "<html" in fetched(desk, "/")
    for file in ("page.js", "map.js", "page.css"):
        assert fetched(desk, f"/{file}").strip()
    until("all nodes on the page", lambda: all(name in fetched(desk, "/api/state") for name in installed.nodes))
    assert json.loads(fetched(desk, "/api/state"))
    installed.end_job("from-desk")

    monitoring = desk.root / "usr/share/doc/migrator/monitoring"
    assert "alert:" in (monitoring / "migrator.rules.yml").read_text()
    assert json.loads((monitoring / "migrator-dashboard.json").read_text())["panels"]

    said = desk.run(*APT, "remove", "migrator", timeout_s=300)
    assert "the autopilot ran on this machine and is stopped" in said
    assert desk.show("migrator-autopilot", "LoadState") == "not-found"
    assert (desk.root / "var/lib/migrator-autopilot").is_dir(), "the event log goes with purge only"
    desk.run(*APT, "purge", "migrator", timeout_s=300)
    assert files(desk) - before == set()
