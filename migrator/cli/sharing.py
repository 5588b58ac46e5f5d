"""The options of `migrator autopilot` for several autopilots that share their state through etcd."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from migrator import formatting
from migrator.cli import output
from snapshotd.api.errors import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from migrator.autopilot.chain import Record
    from migrator.autopilot.metrics import Metrics
    from migrator.autopilot.page.view import Phases
    from migrator.autopilot.policy import Policy
    from migrator.autopilot.store import Store
    from migrator.autopilot.terms import Terms
    from migrator.cluster import Cluster


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several autopilots")
    group.add_argument(
        "--etcd",
        metavar="URL,URL,…",
        help="share the state with other autopilots through this etcd, as https://etcd-1:2379; one of them acts. The state"
        " folder remembers it. `none`: use the state of the folder alone",
    )
    group.add_argument("--etcd-cert", type=Path, metavar="FILE", help="certificate for etcd (PEM)")
    group.add_argument("--etcd-key", type=Path, metavar="FILE", help="private key of that certificate (PEM)")
    group.add_argument("--etcd-ca", type=Path, metavar="FILE", help="CA of etcd (PEM; default: those of the system)")
    group.add_argument(
        "--etcd-prefix",
        metavar="KEY",
        help="where the keys are in etcd; one prefix for each cluster (default: /migrator-autopilot)",
    )
    group.add_argument(
        "--etcd-begin-anew",
        action="store_true",
        help="begin with the state of this folder if etcd has none, also if the folder had joined an etcd before",
    )


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Makes the folder a copy of the state in etcd, if there is to be one. The caller has the actor's lock."""
    from migrator.autopilot import etcd, joining, membership

    names = ("cert", "key", "ca", "prefix", "begin_anew")
    named = [name for name in names if getattr(options, f"etcd_{name}")]
    settings = membership.of_folder(folder) if options.etcd is None else None
    if named and options.etcd in (None, "none"):
        raise Usage(f"--etcd-{named[0].replace('_', '-')} needs --etcd URL")
    if options.etcd == "none":
        joining.leave(folder)
        return
    if options.etcd is not None:
        files: dict[str, Path | None] = {name: getattr(options, f"etcd_{name}") for name in ("cert", "key", "ca")}
        absolute = {name: None if path is None else path.absolute() for name, path in files.items()}
        urls = tuple(url.strip() for url in options.etcd.split(","))
        settings = etcd.Settings(urls, **absolute, prefix=options.etcd_prefix or etcd.PREFIX)
    if settings is not None:
        joining.join(folder, settings, begin_anew=options.etcd_begin_anew)


def terms(
    cluster: Cluster,
    policy: Policy,
    store: Store,
    last: int,
    phases: Phases,
    metrics: Metrics,
    on_record: Callable[[Record], None],
    *,
    as_json: bool,
) -> Terms:
    """The autopilot as one of several. Whether it leads is printed, and is a metric."""
    from migrator.autopilot.terms import Terms

    def on_role(text: str, leads: bool, reachable: bool) -> None:
        metrics.role(leads=leads, reachable=reachable)
        if as_json:
            output.json_object({"kind": "role", "text": text, "leads": leads, "reachable": reachable})
        else:
            print(formatting.plain(f"role: this autopilot {text}"), flush=True)

    metrics.role(leads=False, reachable=True)
    return Terms(
        cluster, policy, store, last, on_phase=phases.note, on_round=metrics.round, on_record=on_record, on_role=on_role
    )
