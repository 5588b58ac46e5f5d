"""The nodes of a cluster: their identities in the folder of the CA, and their entries in cluster.toml.

Invariant: one command at a time changes a cluster. What a node could need is made first and cluster.toml is replaced last, so
that a command that was interrupted can be run again: a node is in the cluster once cluster.toml names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509

from migrator import ca_rotation, cluster_file, pki
from migrator.cluster import Cluster, Tls
from snapshotd.api.addresses import split_address
from snapshotd.api.errors import BadConfig, Busy, NotFound, Usage
from snapshotd.api.new_files import NewFile, replace_all
from snapshotd.api.node_file import NodeFile


@dataclass(frozen=True)
class Site:
    """A cluster file, and the folder of the CA."""

    file: Path
    ca: Path

    def cluster(self) -> Cluster:
        """Raises NotFound, and BadConfig also if the CA is not that of the cluster."""
        if not self.file.exists():
            raise NotFound(
                f"there is no cluster file {self.file}",
                remedy="make a cluster with `migrator cluster init`, or check --cluster",
            )
        found = Cluster.read(self.file, may_be_empty=True)
        if found.tls is None:
            raise BadConfig(
                f"{self.file} has no [tls] table, so it has no CA", remedy="`migrator cluster init` makes one"
            )
        own = pki.load_ca(self.ca)[0].public_key()
        if own not in [cert.public_key() for cert in x509.load_pem_x509_certificates(found.tls.ca.read_bytes())]:
            raise BadConfig(
                f"the CA in {self.ca} is not the CA of {self.file}, which is in {found.tls.ca}",
                remedy="name the folder of the cluster's CA with --dir or $MIGRATOR_PKI",
            )
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Raises Busy if another command changes the cluster."""
        try:
            self.ca.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.ca / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            text = f"{self.ca} cannot be used: {error.strerror}"
            raise Usage(text, remedy="name a folder you may write to with --dir, or run it as its owner") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            text = f"another `migrator cluster` changes the cluster of {self.ca}"
            raise Busy(text, remedy="wait until it has ended, then try again") from error
        finally:
            os.close(descriptor)


def init(site: Site, operator: str) -> bool:
    """Makes what is missing of: the CA, the operator's identity, cluster.toml. Returns whether the CA is new.

    Raises Busy if there is a cluster file.
    """
    if site.file.exists():
        raise Busy(
            f"{site.file} exists: the cluster has been made already",
            remedy="add nodes with `migrator cluster add`, or name another file with --cluster and another folder with --dir",
        )
    new = not (site.ca / "ca.crt").exists()
    if new:
        pki.init(site.ca)
    folder = site.file.absolute().parent / "tls"
    tls = Tls(folder / "ca.crt", folder / f"{operator}.crt", folder / f"{operator}.key")
    _check_unused(site, tls)
    try:
        site.file.absolute().parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        text = f"{error.filename} cannot be made: {error.strerror}"
        raise Usage(text, remedy="name a file in a folder you may write to with --cluster") from error
    about = folder.stat()
    # A folder that its group may enter and no one else, as the package makes it: the group are the operators.
    shared = about.st_gid if about.st_mode & 0o057 == 0o050 else None
    key_mode = 0o600 if shared is None else 0o640
    files = _operator_files(site, operator, tls, key_mode, shared)
    replace_all([*files, NewFile(site.file, cluster_file.new_text(operator).encode())])
    return new


def _check_unused(site: Site, tls: Tls) -> None:
    """The folder may have files of an `init` that was interrupted, but none of another CA."""
    if tls.ca.exists() and tls.ca.read_bytes() != (site.ca / "ca.crt").read_bytes():
        raise Busy(
            f"{tls.ca} exists and is of another CA",
            remedy="move it away if it is not needed, or name another file with --cluster",
        )


def add(
    site: Site, name: str, endpoint: str, addresses: list[str], ssh: str, store: Callable[[NodeFile], object]
) -> NodeFile:
    """Makes an identity for the node, stores what the node must get, and adds it to cluster.toml.

    Raises Busy if there is a node of that name or at that endpoint.
    """
    cluster = site.cluster()
    if name in cluster.nodes:
        raise Busy(
            f"{name} is a node of {site.file} already, at {cluster.nodes[name]}",
            remedy=f"`migrator cluster rotate {name}` makes a new file for it; to change its address, remove it first",
        )
    for other, used in cluster.nodes.items():
        if used == endpoint:
            raise Busy(
                f"{endpoint} is the endpoint of {other}", remedy="check the address, or add the port: ADDRESS:PORT"
            )
    text = cluster_file.with_node(site.file.read_text(), name, endpoint, ssh, str(site.file))
    # Also where an interrupted `add`, or `pki node`, has left an identity.
    pki.issue_node(site.ca, name, [*_addresses(endpoint), *addresses], replace=True)
    made = node_file_of(site, name, endpoint)
    store(made)
    _write_cluster(site, text)
    return made


def remove(site: Site, name: str) -> list[int]:
    """Revokes the node's certificates and removes it from cluster.toml. Returns the revoked serial numbers."""
    cluster = site.cluster()
    if name not in cluster.nodes:
        known = ", ".join(sorted(cluster.nodes)) or "none"
        raise NotFound(f"{name} is not a node of {site.file}", remedy=f"the nodes are: {known}")
    text = cluster_file.without_node(site.file.read_text(), name, str(site.file))
    try:
        _, serials = pki.revoke(site.ca, f"node:{name}")
    except NotFound:  # all have expired, or another CA has made them
        serials = []
    _write_cluster(site, text)
    return serials


def renew_node(site: Site, name: str) -> NodeFile:
    """A new identity for a node of the cluster, with the names and addresses of the old one."""
    endpoint = site.cluster().nodes[name]
    if pki.identity_of(site.ca, "node", name).cert.exists():
        pki.reissue(site.ca, "node", name)
    else:
        pki.issue_node(site.ca, name, _addresses(endpoint))
    return node_file_of(site, name, endpoint)


def renew_operator(site: Site) -> str:
    """Replaces the operator's identity, in the files that cluster.toml names, and returns the operator's name."""
    cluster = site.cluster()
    assert cluster.tls is not None, "checked by cluster()"
    operator = operator_of(cluster)
    about = cluster.tls.key.stat()
    replace_all(_operator_files(site, operator, cluster.tls, about.st_mode & 0o777, about.st_gid))
    return operator


def operator_of(cluster: Cluster) -> str:
    assert cluster.tls is not None, "a cluster with a CA"
    cert = pki.read_certificate(cluster.tls.cert)
    names = [str(name.value) for name in cert.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    role, _, name = names[0].partition(":") if len(names) == 1 else ("", "", "")
    if role != "operator":
        raise BadConfig(
            f"{cluster.tls.cert} is not the certificate of an operator",
            remedy="name one in the [tls] table of the cluster file",
        )
    return name


def node_file_of(site: Site, name: str, endpoint: str) -> NodeFile:
    own = pki.identity_of(site.ca, "node", name)
    pki.refresh_crl(site.ca)  # it counts as fresh for a limited time only
    crl = site.ca / "ca.crl"
    return NodeFile(
        name,
        endpoint,
        own.ca.read_text(),
        own.cert.read_text(),
        own.key.read_text(),
        crl.read_text() if crl.exists() else "",
    )


def expiry(site: Site, role: str, name: str) -> datetime | None:
    """When the newest certificate expires that the CA has issued; None if it has none."""
    path = pki.identity_of(site.ca, role, name).cert
    return pki.read_certificate(path).not_valid_after_utc if path.exists() else None


def advance_ca(site: Site) -> ca_rotation.Stage:
    """The next stage of a rotation of the CA, with new certificates for all operators. Returns the stage that is reached."""
    step = {
        ca_rotation.Stage.STABLE: ca_rotation.introduce,
        ca_rotation.Stage.INTRODUCED: ca_rotation.switch,
        ca_rotation.Stage.SWITCHED: ca_rotation.finish,
    }[ca_rotation.stage(site.ca)]
    step(site.ca)
    renew_operator(site)
    return ca_rotation.stage(site.ca)


def other_operators(site: Site) -> list[str]:
    """Those whose files this command cannot replace, because they are on other machines."""
    own = operator_of(site.cluster())
    return sorted({path.stem for path in (site.ca / "operators").glob("*.crt")} - {own})


def _operator_files(site: Site, operator: str, tls: Tls, key_mode: int, group: int | None) -> list[NewFile]:
    try:
        identity = pki.issue_operator(site.ca, operator)
    except Busy:
        identity = pki.reissue(site.ca, "operator", operator)
    return [
        NewFile(tls.ca, identity.ca.read_bytes()),
        NewFile(tls.key, identity.key.read_bytes(), key_mode, group),
        NewFile(tls.cert, identity.cert.read_bytes()),
    ]


def _addresses(endpoint: str) -> list[str]:
    """The IP address of an endpoint; none if it has a host name."""
    try:
        return [str(ipaddress.ip_address(split_address(endpoint)[0]))]
    except ValueError:
        return []


def _write_cluster(site: Site, text: str) -> None:
    about = site.file.stat()
    replace_all([NewFile(site.file, text.encode(), about.st_mode & 0o777, about.st_gid)])
