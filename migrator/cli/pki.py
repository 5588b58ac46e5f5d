"""`migrator pki`: a small certificate authority for clusters without one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from migrator.cli import arguments, output

if TYPE_CHECKING:
    from migrator.pki import Identity

DEFAULT_FOLDER = "~/.config/migrator/pki"


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "pki",
        None,
        "create certificates for nodes and operators",
        more="The key of the CA stays in its folder. A node or an operator needs ca.crt and its own two files.",
        examples=(
            "  migrator pki init\n  migrator pki node node-1 --address 10.0.0.1\n  migrator pki operator alice\n"
            "  migrator pki renew\n  migrator pki revoke node:node-1"
        ),
    )
    inner = arguments.Verbs(parser)
    add_folder(inner.add("init", _init, "create a certificate authority"))
    node = inner.add("node", _node, "create the identity of a node's daemon")
    node.add_argument("name", metavar="NAME")
    node.add_argument(
        "--address", action="append", default=[], metavar="IP", help="address of the node; can be repeated"
    )
    add_folder(node)
    operator = inner.add("operator", _operator, "create the identity of a person or program that may move ranks")
    operator.add_argument("name", metavar="NAME")
    add_folder(operator)
    renew = inner.add(
        "renew",
        _renew,
        "replace certificates that expire soon",
        more="Run it from a timer, and copy the files that it names. Daemons use the new ones without a restart.",
    )
    renew.add_argument(
        "--within", type=int, default=45, metavar="DAYS", help="replace those that expire within DAYS (default: 45)"
    )
    add_folder(renew)
    revoke = inner.add(
        "revoke",
        _revoke,
        "revoke all certificates of a node or an operator",
        more="Copy the list that it names to every node, beside ca.crt. It takes effect as soon as it is there.",
    )
    revoke.add_argument("name", metavar="ROLE:NAME", help='for example "node:node-1" or "operator:alice"')
    add_folder(revoke)


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help=f"folder of the CA (default: $MIGRATOR_PKI, then {DEFAULT_FOLDER})"
    )


def folder_of(options: argparse.Namespace) -> Path:
    return Path(options.dir or os.environ.get("MIGRATOR_PKI") or DEFAULT_FOLDER).expanduser()


def _init(options: argparse.Namespace) -> int:
    from migrator import pki  # here: loading cryptography takes longer than most verbs

    ca = pki.init(folder_of(options))
    if arguments.wants_json(options):
        output.json_object({"ca": str(ca)})
    else:
        print(f"created a CA: {ca}; keep the ca.key beside it secret")
    return 0


def _node(options: argparse.Namespace) -> int:
    from migrator import pki

    return _show(options, pki.issue_node(folder_of(options), options.name, options.address), "snapshotd.toml")


def _operator(options: argparse.Namespace) -> int:
    from migrator import pki

    return _show(options, pki.issue_operator(folder_of(options), options.name), "cluster.toml")


def _renew(options: argparse.Namespace) -> int:
    from datetime import timedelta

    from migrator import pki

    renewed = pki.renew(folder_of(options), timedelta(days=options.within))
    if arguments.wants_json(options):
        output.json_object({"renewed": [{"cert": str(one.cert), "key": str(one.key)} for one in renewed]})
        return 0
    for one in renewed:
        print(f"renewed {one.cert} and {one.key}: copy both")
    if not renewed:
        print(f"no certificate expires within {options.within} days")
    return 0


def _revoke(options: argparse.Namespace) -> int:
    from migrator import pki

    path, serials = pki.revoke(folder_of(options), options.name)
    if arguments.wants_json(options):
        output.json_object({"crl": str(path), "serials": [f"{serial:x}" for serial in serials]})
    else:
        print(f"revoked {len(serials)} certificates of {options.name}: copy {path} to every node, beside its ca.crt")
    return 0


def _show(options: argparse.Namespace, identity: Identity, file: str) -> int:
    paths = {"ca": str(identity.ca), "cert": str(identity.cert), "key": str(identity.key)}
    if arguments.wants_json(options):
        output.json_object(paths)
    else:
        print(f"# for {file}\n[tls]")
        for name, path in paths.items():
            print(f'{name} = "{path}"')
    return 0
