"""`snapshotd join FILE`: installs what `migrator cluster add` or `rotate` made for this node.

Invariant: everything is checked before anything is written, and an interruption leaves files with which `join` can be run
again. Settings of an existing configuration are never changed. A running daemon is not restarted: it takes up the new
certificates by itself.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotd.api import certificates, node_file, revocation, toml_file
from snapshotd.api.addresses import split_address
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig, Denied
from snapshotd.api.new_files import NewFile, replace_all
from snapshotd.api.node_file import NodeFile

_RUN_DIR = "/run/snapshotd"
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Joined:
    node: str
    written: list[Path]
    runs: bool  # a daemon is running, which takes up the files
    warnings: list[str] = field(default_factory=list)


def join(path: Path, config: Path) -> Joined:
    """Installs the node file for the daemon that uses this configuration file. Raises BadConfig, Denied or NotFound."""
    if os.geteuid() != 0:
        raise Denied("`snapshotd join` writes files of root", remedy="run it as root or with sudo")
    given = node_file.read(path)
    origin = "standard input" if str(path) == "-" else str(path)
    values = _existing(config)
    tls = _places(values, config)
    crl = revocation.crl_path(tls.ca)
    _check_content(given, origin)
    _check_machine(given, origin)
    warnings = _check_configuration(given, values, config)
    _check_replaces(given, origin, tls)
    files = [NewFile(tls.ca, given.ca.encode())]
    if given.crl:  # after the CA: it may be the new one that has signed it
        files.append(NewFile(crl, given.crl.encode()))
    files += [NewFile(tls.key, given.key.encode(), 0o600), NewFile(tls.cert, given.cert.encode())]
    if not values:
        files.append(NewFile(config, _configuration(given, tls).encode()))
    _make_folders(files)
    replace_all(files)
    run_dir = Path(str(values.get("run_dir", _RUN_DIR)))
    return Joined(given.node, [file.path for file in files], _answers(run_dir / "admin.sock"), warnings)


def _existing(config: Path) -> dict[str, Any]:
    try:
        return toml_file.load(config)
    except FileNotFoundError:
        return {}


def _places(values: dict[str, Any], config: Path) -> Credentials:
    """Where the configuration has the three files; else beside it."""
    named = values.get("tls")
    found = named if isinstance(named, dict) else {}
    folder = config.absolute().parent / "tls"
    names = {"ca": "ca.crt", "cert": "node.crt", "key": "node.key"}
    return Credentials(**{key: Path(str(found.get(key, folder / name))) for key, name in names.items()})


def _check_content(given: NodeFile, origin: str) -> None:
    contents = {"ca": given.ca.encode(), "cert": given.cert.encode(), "key": given.key.encode()}
    names = {"ca": "its CA", "cert": "its certificate", "key": "its key"}
    problems = [text.partition(": ")[2] for text in certificates.content_problems(contents, names, given.node)]
    if not problems and given.crl:
        try:
            crl = revocation.parsed(given.crl.encode(), contents["ca"], "its list of revoked certificates", "its CA")
        except BadConfig as error:
            problems.append(error.message)
        else:
            if crl.get_revoked_certificate_by_serial_number(revocation.peer_of(contents["cert"]).serial) is not None:
                problems.append("its certificate has been revoked")
    if problems:
        raise BadConfig(
            "\n  - ".join([f"{origin} cannot be used; nothing was changed:", *problems]),
            remedy="have a new file made with `migrator cluster rotate NODE`, and check the clocks if a time is wrong",
        )


def _check_machine(given: NodeFile, origin: str) -> None:
    from snapshotd.net.sockets import own_addresses  # here: it loads netlink

    host, _ = split_address(given.endpoint)
    own = own_addresses()
    if not own & _resolved(host):
        shown = ", ".join(sorted(address for address in own if not address.startswith(("127.", "::1", "fe80:"))))
        raise BadConfig(
            f"{origin} is for {given.node} at {host}, which is not an address of this machine ({shown or 'it has none'});"
            " nothing was changed",
            remedy=f"run it on {given.node}; if its address has changed, run `migrator cluster remove {given.node}`, then"
            " `migrator cluster add` with the new one",
        )


def _resolved(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _check_configuration(given: NodeFile, values: dict[str, Any], config: Path) -> list[str]:
    """Warnings. Raises BadConfig if the configuration is that of another node."""
    if not values:
        return []
    if values.get("node") != given.node:
        raise BadConfig(
            f"this machine is node {values.get('node')!r} in {config}, and the file is for {given.node}; nothing was changed",
            remedy=f"join the file of this node; to rename the node, move its ranks away, stop snapshotd, delete {config}"
            " and the files in its [tls] table, then join again",
        )
    used = str(values.get("advertise") or values.get("listen") or "")
    try:
        host, port = split_address(used)
    except ValueError:
        return [f"{config}: listen: {used!r} is not an address; run `snapshotd --check-config`"]
    wanted_host, wanted_port = split_address(given.endpoint)
    if port != wanted_port or host not in (wanted_host, *_WILDCARDS):
        return [f"{config} has the daemon listen at {used}, but the cluster calls {given.endpoint}: change one of them"]
    return []


def _check_replaces(given: NodeFile, origin: str, tls: Credentials) -> None:
    """Raises BadConfig if the node has files of another cluster, or newer ones."""
    from cryptography import x509

    try:
        known = x509.load_pem_x509_certificates(tls.ca.read_bytes())
        used = x509.load_pem_x509_certificate(tls.cert.read_bytes())
    except (OSError, ValueError):
        return  # none, or damaged ones, which the new files repair
    offered = x509.load_pem_x509_certificates(given.ca.encode())
    keys = [one.public_key() for one in known]
    if not any(one.public_key() in keys for one in offered):
        raise BadConfig(
            f"{origin} is of another CA than {tls.ca}: it belongs to another cluster, or the CA was replaced while this node"
            " was down; nothing was changed",
            remedy=f"if this node is to trust the CA of the file: delete {tls.ca} and {tls.cert}, and join again; nodes of"
            " the former cluster can then not move ranks from or to this one",
        )
    new = x509.load_pem_x509_certificate(given.cert.encode())
    if used.not_valid_before_utc > new.not_valid_before_utc:
        raise BadConfig(
            f"{origin} is older than what this node has: its certificate was made before that in {tls.cert}; nothing was"
            " changed",
            remedy=f"use the newest file, or have one made with `migrator cluster rotate {given.node}`",
        )


def _configuration(given: NodeFile, tls: Credentials) -> str:
    lines = [
        "# Written by `snapshotd join`. Everything that is not here has a default: man snapshotd.toml",
        f"node = {json.dumps(given.node)}",
        f"listen = {json.dumps(given.endpoint)}",
        "",
        "[tls]",
        *(f"{name} = {json.dumps(str(getattr(tls, name)))}" for name in ("ca", "cert", "key")),
    ]
    return "\n".join(lines) + "\n"


def _make_folders(files: list[NewFile]) -> None:
    for folder in {file.path.parent for file in files}:
        private = any(file.mode == 0o600 for file in files if file.path.parent == folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700 if private else 0o755, exist_ok=True)
        except OSError as error:
            text = f"{folder} cannot be made: {error.strerror}; nothing was changed"
            raise BadConfig(text, remedy="check that the file system is not read-only or full") from error


def _answers(admin_socket: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(admin_socket))
        except OSError:
            return False
    return True
