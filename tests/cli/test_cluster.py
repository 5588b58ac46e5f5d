"""Tests where cluster.toml is found, how it is read, and that all its problems are reported at once."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from migrator import pki
from migrator.cluster import Cluster, Netns, Places
from snapshotd.api.errors import Ambiguous, BadConfig, Internal, NotFound, Unreachable

REPOSITORY = Path(__file__).parents[2]
OWN_NETNS = Path("/proc/self/ns/net")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(
        environment={},
        user=tmp_path / "home/cluster.toml",
        system=tmp_path / "etc/cluster.toml",
        labs=tmp_path / "labs",
        local_socket=tmp_path / "admin.sock",
    )


def write_cluster(path: Path, extra: str = "", node: str = "node-1", tls: bool = True) -> Path:
    """Writes a valid file, with real certificates beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if tls and not (path.parent / "pki").exists():
        pki.init(path.parent / "pki")
        pki.issue_operator(path.parent / "pki", "alice")
    files = '[tls]\nca = "pki/ca.crt"\ncert = "pki/operators/alice.crt"\nkey = "pki/operators/alice.key"\n'
    path.write_text(f'{extra}\n{files if tls else ""}[nodes.{node}]\nendpoint = "10.0.0.1:7070"\n')
    return path


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Runs as an unprivileged user, because root can read every file."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_valid_file_is_loaded_with_paths_relative_to_it(tmp_path: Path) -> None:
    cluster = Cluster.load(write_cluster(tmp_path / "c/cluster.toml"))
    assert cluster.nodes == {"node-1": "10.0.0.1:7070"}
    assert cluster.tls is not None
    assert cluster.tls.ca == tmp_path / "c/pki/ca.crt", "relative to the file, not to where the caller stands"
    assert cluster.netns is None


# ---------------------------------------------------------------- where it is found


def test_cluster_file_is_searched_in_the_documented_order(places: Places, tmp_path: Path) -> None:
    lab = write_cluster(places.labs / "lab/cluster.toml", node="in-lab")
    assert list(Cluster.load(places=places).nodes) == ["in-lab"]
    write_cluster(places.system, node="of-system")
    assert list(Cluster.load(places=places).nodes) == ["of-system"]
    write_cluster(places.user, node="of-user")
    assert list(Cluster.load(places=places).nodes) == ["of-user"]
    named = Places(**{**vars(places), "environment": {"MIGRATOR_CLUSTER": str(lab)}})
    assert list(Cluster.load(places=named).nodes) == ["in-lab"]
    given = write_cluster(tmp_path / "given/cluster.toml", node="given")
    assert list(Cluster.load(given, places=named).nodes) == ["given"]


def test_two_running_labs_are_ambiguous(places: Places) -> None:
    for lab in ("one", "two"):
        write_cluster(places.labs / lab / "cluster.toml")
    with pytest.raises(Ambiguous, match="2 labs are up: one, two") as caught:
        Cluster.load(places=places)
    assert "--cluster" in caught.value.advice


def test_running_lab_is_preferred_to_one_that_is_down(places: Places) -> None:
    write_cluster(places.labs / "dead/cluster.toml", 'netns = "/proc/0/ns/net"', node="dead")
    write_cluster(places.labs / "living/cluster.toml", f'netns = "{OWN_NETNS}"', node="living")
    assert list(Cluster.load(places=places).nodes) == ["living"]


def test_local_daemon_is_used_if_there_is_no_cluster_file(places: Places) -> None:
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(places.local_socket))
        cluster = Cluster.load(places=places)
    assert cluster.nodes == {os.uname().nodename: f"unix:{places.local_socket}"}


def test_missing_cluster_is_not_found_and_the_remedy_suggests_a_lab(places: Places) -> None:
    places.local_socket.write_text("a file is no socket")
    with pytest.raises(NotFound, match="no cluster") as caught:
        Cluster.load(places=places)
    assert "migrator lab up" in caught.value.advice


def test_missing_named_file_is_not_replaced_by_another_one(places: Places, tmp_path: Path) -> None:
    write_cluster(places.user)
    with pytest.raises(NotFound, match=r"nowhere\.toml"):
        Cluster.load(tmp_path / "nowhere.toml", places=places)


def test_unreadable_file_is_an_error_and_not_skipped(places: Places) -> None:
    write_cluster(places.labs / "lab/cluster.toml")
    write_cluster(places.user).chmod(0)
    with as_nobody(), pytest.raises(BadConfig, match="cannot be read"):
        Cluster.load(places=places)


def test_number_of_copies_is_that_of_the_file(tmp_path: Path) -> None:
    assert Cluster.load(write_cluster(tmp_path / "cluster.toml", "")).snapshot_copies == 1
    assert Cluster.load(write_cluster(tmp_path / "cluster.toml", "snapshot_copies = 2")).snapshot_copies == 2


# ---------------------------------------------------------------- invalid files


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("""
        netns = "relative"
        netns_inode = true
        snapshot_copies = 0
        color = "red"
        [tls]
        ca = "nowhere.crt"
        cert = 7
        password = "x"
        [nodes]
        loose = "10.0.0.9:7070"
        [nodes.node-1]
        endpoint = "10.0.0.1"
        [nodes."a/b"]
        endpont = "10.0.0.2:7070"
        [nodes.node-3]
        endpoint = 7070
        """)
    with pytest.raises(BadConfig) as caught:
        Cluster.load(path)
    text = caught.value.message
    assert text.startswith(str(path))
    for problem in (
        "netns: 'relative' is not an absolute path",
        "netns_inode: must be a whole number, not True",
        "snapshot_copies: must be a whole number above 0, not 0",
        "color: unknown key",
        f"tls.ca: {tmp_path}/nowhere.crt cannot be read",
        "tls.cert: must be the path of a PEM file, not 7",
        "tls.key: is missing; it must be the path of a PEM file",
        "tls.password: unknown key",
        "nodes.loose: must be a table with endpoint",
        "nodes.node-1.endpoint: '10.0.0.1' is neither",
        "nodes.a/b: the name of a node must be a host name",
        "nodes.a/b.endpont: unknown key; did you mean nodes.a/b.endpoint?",
        "nodes.a/b.endpoint: is missing",
        'nodes.node-3.endpoint: must be "host:port" or "unix:/path", not 7070',
    ):
        assert problem in text
    assert text.count("\n") == 14


@pytest.mark.parametrize(
    ("endpoint", "good"),
    [
        ("10.0.0.1:7070", True),
        ("node-1.cluster.local:1", True),
        ("[fd00::1]:7070", True),
        ("unix:/run/x.sock", True),
        ("fd00::1:7070", False),
        ("10.0.0.1:0", False),
        ("10.0.0.1:65536", False),
        ("10.0.0.1:７0", False),
        ("host:", False),
        (":7070", False),
        ("unix:relative", False),
        ("a b:7070", False),
    ],
)
def test_endpoint_syntax_is_checked(tmp_path: Path, endpoint: str, good: bool) -> None:
    path = write_cluster(tmp_path / "cluster.toml")
    path.write_text(path.read_text().replace("10.0.0.1:7070", endpoint))
    if good:
        assert Cluster.load(path).nodes == {"node-1": endpoint}
    else:
        with pytest.raises(BadConfig, match="is neither"):
            Cluster.load(path)


def test_two_nodes_cannot_have_the_same_endpoint(tmp_path: Path) -> None:
    path = write_cluster(tmp_path / "cluster.toml")
    path.write_text(path.read_text() + '[nodes.node-2]\nendpoint = "10.0.0.1:7070"\n')
    with pytest.raises(BadConfig, match=r"10\.0\.0\.1:7070 is the endpoint of two nodes"):
        Cluster.load(path)


def test_tls_is_required_for_tcp_endpoints(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="tls: is missing"):
        Cluster.load(write_cluster(tmp_path / "cluster.toml", tls=False))


@pytest.mark.parametrize("text", ["", "nodes = 3", "[nodes]"])
def test_cluster_without_nodes_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(BadConfig, match=r"nodes: .*must be a table \[nodes.NAME\]"):
        Cluster.load(path)


@pytest.mark.parametrize("content", [b"nodes = [", b"\xff\xfe"])
def test_file_that_is_not_toml_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    with pytest.raises(BadConfig, match="is not valid TOML"):
        Cluster.load(path)


def test_unreadable_private_key_is_reported(open_folder: Path) -> None:
    path = write_cluster(open_folder / "cluster.toml")
    for folder in ("pki", "pki/operators"):
        (open_folder / folder).chmod(0o755)
    with as_nobody(), pytest.raises(BadConfig, match=r"tls\.key: .*alice\.key cannot be read: Permission denied"):
        Cluster.load(path)


def test_private_key_that_is_not_pem_is_rejected(tmp_path: Path) -> None:
    path = write_cluster(tmp_path / "cluster.toml")
    (tmp_path / "pki/operators/alice.key").write_bytes(b"\x30\x82")
    with pytest.raises(BadConfig, match=r"tls\.key: .* is not a PEM file"):
        Cluster.load(path)


def test_inode_without_a_namespace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="netns: is missing"):
        Cluster.load(write_cluster(tmp_path / "cluster.toml", "netns_inode = 7"))


# ---------------------------------------------------------------- clients


async def test_client_has_the_endpoint_and_name_of_its_node(tmp_path: Path) -> None:
    cluster = Cluster.load(write_cluster(tmp_path / "cluster.toml"))
    async with cluster.client("node-1") as client:
        assert (client.endpoint, client.name) == ("10.0.0.1:7070", "node-1")


async def test_client_of_the_local_daemon_has_no_node_name(tmp_path: Path) -> None:
    cluster = Cluster("test", {"here": f"unix:{tmp_path}/admin.sock"})
    async with cluster.client("here") as client:
        assert (client.endpoint, client.name) == (f"unix:{tmp_path}/admin.sock", None)


def test_client_of_an_unknown_node_is_not_found(tmp_path: Path) -> None:
    cluster = Cluster.load(write_cluster(tmp_path / "cluster.toml"))
    with pytest.raises(NotFound, match="'node-9'") as caught:
        cluster.client("node-9")
    assert "node-1" in caught.value.advice


# ---------------------------------------------------------------- the lab's network


def test_enter_without_a_lab_changes_nothing() -> None:
    before = OWN_NETNS.stat().st_ino
    Cluster("test", {}).enter()
    assert OWN_NETNS.stat().st_ino == before


def test_enter_is_allowed_if_already_inside() -> None:
    Cluster("test", {}, netns=Netns(OWN_NETNS, OWN_NETNS.stat().st_ino)).enter()


@pytest.mark.parametrize("netns", [Netns(Path("/proc/0/ns/net"), 1), Netns(OWN_NETNS, 1)])
def test_entering_a_lab_that_is_down_is_unreachable(netns: Netns) -> None:
    """Its process has ended, or its pid has been reused."""
    with pytest.raises(Unreachable, match="no longer up") as caught:
        Cluster("lab/cluster.toml", {}, netns=netns).enter()
    assert "lab down" in caught.value.advice


def test_enter_is_refused_once_threads_exist() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(Internal, match="before any thread"):
            Cluster("test", {}, netns=Netns(Path("/proc/self/ns/uts"))).enter()
    finally:
        done.set()
        thread.join()


def test_entering_a_namespace_of_another_kind_is_reported() -> None:
    """Runs in a child, because pytest's own process may have threads."""
    program = (
        "from pathlib import Path\n"
        "from migrator.cluster import Cluster, Netns\n"
        "from snapshotd.api.errors import BadConfig, Denied\n"
        "try: Cluster('here', {}, netns=Netns(Path('/proc/self/ns/uts'))).enter()\n"
        "except (BadConfig, Denied) as error: print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "netns /proc/self/ns/uts cannot be entered" in done.stdout or "only root" in done.stdout


# ---------------------------------------------------------------- networks of nodes


def test_networks_of_nodes_are_read(tmp_path: Path) -> None:
    path = write_cluster(tmp_path / "cluster.toml")
    path.write_text(path.read_text() + '[nodes.node-1.networks]\ndata = "10.1.0.1"\nipv6 = "FD00:0::1"\n')
    assert Cluster.read(path).networks == {"node-1": {"data": "10.1.0.1", "ipv6": "fd00::1"}}


def test_problems_with_networks_are_reported_by_key(tmp_path: Path) -> None:
    path = write_cluster(tmp_path / "cluster.toml")
    path.write_text(
        path.read_text()
        + """
        [nodes.node-1.networks]
        data = "10.1.0.1"
        storage = "10.1.0.1/24"
        lo = "127.0.0.1"
        mixed = "10.2.0.1"
        [nodes.node-2]
        endpoint = "10.0.0.2:7070"
        networks = {data = "10.1.0.1", mixed = "fd00::2"}
        [nodes.node-3]
        endpoint = "10.0.0.3:7070"
        networks = ["10.1.0.3"]
        """
    )
    with pytest.raises(BadConfig) as caught:
        Cluster.read(path)
    said = str(caught.value)
    assert "nodes.node-1.networks.storage: must be an IP address, not '10.1.0.1/24'" in said
    assert "nodes.node-1.networks.lo: 127.0.0.1 is not an address that other nodes reach" in said
    assert "nodes.node-1.networks.data and nodes.node-2.networks.data: 10.1.0.1 can be one of them only" in said
    assert "nodes.node-1.networks.mixed is IPv4 and nodes.node-2.networks.mixed IPv6" in said
    assert "nodes.node-3.networks: must be a table with an address of the node for each network" in said
    assert "5 problems" in said
