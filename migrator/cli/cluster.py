"""`migrator cluster`: makes a cluster, adds and removes nodes, and replaces certificates while everything runs."""

from __future__ import annotations

import argparse
import ipaddress
import os
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from migrator.cli import arguments, leaving_node, node_files, output, pki
from migrator.cluster import Places, ssh_destination
from snapshotd.api.addresses import split_address
from snapshotd.api.errors import NotFound, Usage
from snapshotd.api.node_file import NodeFile

if TYPE_CHECKING:
    from migrator.membership import Site

PORT = 7070


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "cluster",
        None,
        "make a cluster, add and remove nodes, replace certificates",
        more="Each node gets one file, which `snapshotd join` installs there. Nothing of this stops a rank or a daemon.",
        examples="  migrator cluster init\n  migrator cluster add node-1 10.0.0.1\n"
        "  migrator cluster add node-2 10.0.0.2 --ssh root@node-2\n  migrator cluster rotate --within 45 --ssh\n"
        "  migrator cluster remove node-2",
    )
    inner = arguments.Verbs(parser)
    init = inner.add(
        "init",
        _init,
        "make the CA, an operator's certificate and cluster.toml",
        more="cluster.toml is made in /etc/migrator for root, in ~/.config/migrator for other users, or at --cluster.",
    )
    init.add_argument("--operator", default="admin", metavar="NAME", help="name of the operator (default: %(default)s)")
    adding = inner.add(
        "add",
        _add,
        "add a node, and make the file with which it joins",
        more="Copy the file to the node and run `snapshotd join FILE` there; with --ssh that is done for you, and no file is"
        " left. The file contains the node's private key.",
    )
    adding.add_argument("node", type=arguments.node, metavar="NODE", help="name of the node")
    adding.add_argument(
        "endpoint",
        type=endpoint,
        metavar="ADDRESS",
        help=f"IP address at which the node's daemon listens, with :PORT if it is not {PORT}",
    )
    adding.add_argument(
        "--address", action="append", default=[], type=address, metavar="IP", help="further address; can be repeated"
    )
    adding.add_argument(
        "--ssh", type=destination, metavar="[USER@]HOST", help="have the node join and start through ssh"
    )
    _add_output(adding)
    removing = inner.add(
        "remove",
        _remove,
        "remove a node, and revoke its certificates",
        more="Nodes learn of it with their next file, so run `migrator cluster rotate` then; with --ssh it is done for you.",
    )
    removing.add_argument("node", type=arguments.node, metavar="NODE", help="name of the node")
    removing.add_argument("--force", action="store_true", help="remove it although ranks run there")
    _add_ssh(removing)
    _add_output(removing)
    listing = inner.add("list", _list, "list the nodes and how long their certificates are valid")
    rotate = inner.add(
        "rotate",
        _rotate,
        "replace certificates of nodes, and of the operator",
        more="Daemons use new certificates as soon as their node has joined again, without a restart. --ca replaces the CA in"
        " three stages: after each of them all nodes must join with new files, and the next one begins with the same command."
        " With --ssh all three are done at once.",
    )
    rotate.add_argument(
        "nodes",
        nargs="*",
        type=arguments.node,
        metavar="NODE",
        help="node to do it for (default: all, and the operator)",
    )
    rotate.add_argument(
        "--within", type=arguments.count, metavar="DAYS", help="replace only what expires within DAYS; for timers"
    )
    rotate.add_argument("--ca", action="store_true", help="replace the CA too")
    rotate.add_argument(
        "--no-check",
        action="store_true",
        help="with --ca, do not ask the nodes whether they are ready for the next stage",
    )
    _add_ssh(rotate)
    _add_output(rotate)
    for verb in (init, adding, removing, listing, rotate):
        pki.add_folder(verb)


def _add_ssh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ssh",
        action="store_true",
        help="have the nodes join through ssh, at the destination that `add --ssh` was given, else at the node's name",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for the files of nodes (default: the current one)",
    )


def endpoint(text: str) -> str:
    """An IP address with or without a port, as "host:port"."""
    try:
        try:
            ip, port = ipaddress.ip_address(text), PORT
        except ValueError:
            host, port = split_address(text)
            ip = ipaddress.ip_address(host)
        if ip.is_unspecified or ip.is_multicast:
            raise ValueError
        return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not an address of a node: write 10.0.0.1, 10.0.0.1:7070, fd00::1 or [fd00::1]:7070"
        ) from None


def address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not an IP address, like 10.0.0.1 or fd00::1") from None


def destination(text: str) -> str:
    try:
        return ssh_destination(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _site(options: argparse.Namespace, *, new: bool = False) -> Site:
    from migrator.membership import Site  # here: loading cryptography takes longer than most verbs

    places = Places()
    named = getattr(options, "cluster", None) or places.environment.get("MIGRATOR_CLUSTER")
    if lab := getattr(options, "lab", None):
        from migrator.lab import Lab

        named = Lab(lab).cluster_path
    if named:
        file = Path(named).expanduser()
    elif new:
        file = places.system if os.geteuid() == 0 else places.user
    else:
        file = next((file for file in (places.user, places.system) if file.exists()), places.system)
    return Site(file, pki.folder_of(options))


def _init(options: argparse.Namespace) -> int:
    from migrator import membership

    site = _site(options, new=True)
    with site.locked():
        new = membership.init(site, options.operator)
    if arguments.wants_json(options):
        output.json_object(
            {"cluster": str(site.file), "ca": str(site.ca), "ca_is_new": new, "operator": options.operator}
        )
        return 0
    print(f"{'made a CA' if new else 'using the CA'} in {site.ca}; keep its ca.key secret, and a copy of the folder")
    print(f"wrote {site.file} for operator {options.operator}; next: migrator cluster add NODE ADDRESS")
    return 0


def _add(options: argparse.Namespace) -> int:
    from migrator import membership

    site = _site(options)
    node_files.check([options.node], options.output)

    sent: list[dict[str, Any]] = []

    def store(made: NodeFile) -> None:
        if not options.ssh:
            sent.append(node_files.write(made, options.output))

    with site.locked():
        made = membership.add(site, options.node, options.endpoint, options.address, options.ssh or "", store)
    if options.ssh:
        sent = node_files.give([made], {options.node: options.ssh}, options.output, start=True)
    if arguments.wants_json(options):
        output.json_object({"node": options.node, "endpoint": options.endpoint, **sent[0]})
        return 0
    print(f"{options.node} at {options.endpoint} is in {site.file}")
    node_files.show(sent, start=True)
    return 0


def _remove(options: argparse.Namespace) -> int:
    from migrator import membership

    site = _site(options)
    cluster = site.cluster()
    needed = leaving_node.Needed()
    if options.node in cluster.nodes:
        needed = leaving_node.check(cluster, options.node, force=options.force)
    others = [name for name in cluster.nodes if name != options.node]
    if options.ssh:
        node_files.check(others, options.output)
    sent: list[dict[str, Any]] = []
    with site.locked():
        serials = membership.remove(site, options.node)
        if options.ssh:
            files = [membership.renew_node(site, name) for name in others]
            sent = node_files.give(files, _destinations(cluster, others), options.output, start=False)
    if arguments.wants_json(options):
        revoked = [f"{serial:x}" for serial in serials]
        output.json_object({"node": options.node, "serials": revoked, "nodes": sent, **asdict(needed)})
        return 0
    print(f"{options.node} is removed from {site.file}, and {len(serials)} of its certificates are revoked")
    for text in needed.texts:
        print(text)
    if options.ssh:
        node_files.show(sent, start=False)
    elif others:
        print("the other nodes accept them until they join again; next: migrator cluster rotate")
    print(f"on {options.node}: systemctl disable --now snapshotd")
    return 0


def _list(options: argparse.Namespace) -> int:
    from migrator import ca_rotation, membership
    from migrator import pki as authority

    site = _site(options)
    cluster = site.cluster()
    stage, operator = ca_rotation.stage(site.ca), membership.operator_of(cluster)
    expiries = {name: membership.expiry(site, "node", name) for name in cluster.nodes}
    ca_expiry = authority.load_ca(site.ca)[0].not_valid_after_utc
    assert cluster.tls is not None, "checked by cluster()"
    own_expiry = authority.read_certificate(cluster.tls.cert).not_valid_after_utc
    if arguments.wants_json(options):
        nodes = [
            {"name": name, "endpoint": cluster.nodes[name], "expires": _iso(when), "ssh": cluster.ssh.get(name, "")}
            for name, when in expiries.items()
        ]
        output.json_object(
            {
                "cluster": str(site.file),
                "ca": {"folder": str(site.ca), "expires": _iso(ca_expiry), "stage": stage.value},
                "operator": {"name": operator, "expires": _iso(own_expiry)},
                "nodes": nodes,
            }
        )
        return 0
    rows = [(name, cluster.nodes[name], _day(when), cluster.ssh.get(name, "-")) for name, when in expiries.items()]
    output.table(("NAME", "ENDPOINT", "CERTIFICATE UNTIL", "SSH"), rows)
    print(f"operator {operator} until {_day(own_expiry)}, CA in {site.ca} until {_day(ca_expiry)}")
    if stage is not ca_rotation.Stage.STABLE:
        print(f"the CA is being replaced ({stage}); next, when all nodes have joined: migrator cluster rotate --ca")
    return 0


def _rotate(options: argparse.Namespace) -> int:
    from migrator import membership
    from migrator.cli import cluster_ca

    site = _site(options)
    cluster = site.cluster()
    for name in options.nodes:
        if name not in cluster.nodes:
            raise NotFound(f"{name} is not a node of {site.file}", remedy="`migrator cluster list` lists them")
    if options.ca and (options.nodes or options.within):
        raise Usage("--ca concerns all nodes", remedy="leave out NODE and --within")
    if options.no_check and not options.ca:
        raise Usage("--no-check belongs to --ca", remedy="leave it out")
    nodes = list(dict.fromkeys(options.nodes)) or list(cluster.nodes)
    destinations = _destinations(cluster, nodes) if options.ssh else {}
    node_files.check(nodes, options.output)
    if options.ca:
        cluster.enter()  # before gRPC starts threads

        def give(files: list[NodeFile]) -> list[dict[str, Any]]:
            return node_files.give(files, destinations, options.output, start=False)

        with site.locked():
            done = cluster_ca.rotate(site, cluster, nodes, give, check=not options.no_check, all_stages=options.ssh)
        return cluster_ca.report(done, as_json=arguments.wants_json(options), show=node_files.show)
    operator = ""
    with site.locked():
        due = [name for name in nodes if _is_due(membership.expiry(site, "node", name), options.within)]
        own = membership.expiry(site, "operator", membership.operator_of(cluster))
        if not options.nodes and _is_due(own, options.within):
            operator = membership.renew_operator(site)
        sent = node_files.give(
            [membership.renew_node(site, name) for name in due], destinations, options.output, start=False
        )
    if arguments.wants_json(options):
        output.json_object({"operator": operator, "nodes": sent})
        return 0
    if operator:
        print(f"operator {operator} has a new certificate")
    node_files.show(sent, start=False)
    if not sent and not operator:
        print(f"no certificate expires within {options.within} days" if options.within else "there are no nodes yet")
    return 0


def _is_due(expires: datetime | None, within_days: int | None) -> bool:
    return within_days is None or expires is None or expires - datetime.now(UTC) <= timedelta(days=within_days)


def _destinations(cluster: Any, nodes: list[str]) -> dict[str, str]:
    return {name: cluster.ssh.get(name, name) for name in nodes}


def _iso(when: datetime | None) -> str:
    return when.isoformat() if when is not None else ""


def _day(when: datetime | None) -> str:
    return f"{when:%Y-%m-%d}" if when is not None else "-"
