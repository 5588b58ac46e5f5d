"""Where the autopilot's state is, and what verbs that read or change it share."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from migrator import formatting
from migrator.cli import output
from snapshotd.api.errors import SnapshotError, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from migrator.autopilot.policy import Policy
    from migrator.autopilot.store import Store
    from migrator.cluster import Cluster

DEFAULT = Path("/var/lib/migrator-autopilot")


def add_state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help=f"folder of the autopilot's state (default: $MIGRATOR_STATE, of a lab its own, else {DEFAULT})",
    )


def add_policy(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        required=required,
        help="policy file"
        if required
        else "policy file, for spares and jobs (default: no rules, dedicated spares only)",
    )


def folder(options: argparse.Namespace, cluster: Cluster | None) -> Path:
    """The state's folder. All users of a machine get the same one, so that a taint is never written where it is not read."""
    if options.state is not None:
        return Path(options.state).expanduser().absolute()
    if named := os.environ.get("MIGRATOR_STATE"):
        return Path(named).expanduser().absolute()
    if cluster is not None and cluster.netns is not None:
        return Path(cluster.origin).parent / "autopilot"
    return DEFAULT


@contextlib.asynccontextmanager
async def opened(folder: Path, *, changing: bool) -> AsyncIterator[Store]:
    """The autopilot's state. If several autopilots share it, with all their changes."""
    from migrator.autopilot.store import Store

    async with Store.open(folder) as store:
        await bring_up_to_date(store, changing=changing)
        yield store


async def bring_up_to_date(store: Store, *, changing: bool) -> None:
    """Makes the changes of other autopilots here. If etcd is out of reach, raises Unreachable if something is to be changed,
    else warns: what this folder knows can still be shown."""
    try:
        await store.follow()
    except SnapshotError as error:
        if not changing:
            text = f"this may be out of date, because the state that autopilots share cannot be read: {error.message}"
            print(f"{output.styled('warning:', 'yellow', sys.stderr)} {formatting.plain(text)}", file=sys.stderr)
        elif isinstance(error, Unreachable):
            raise Unreachable(
                f"nothing was changed, because the state that autopilots share cannot be read: {error.message}",
                remedy="check `etcdctl endpoint health` and the network to etcd, then repeat the command",
            ) from error
        else:
            raise


def the_policy(options: argparse.Namespace) -> Policy:
    from migrator.autopilot import policy

    return policy.Policy() if options.policy is None else policy.read(options.policy)


def operator() -> str:
    """Who gives an order, for the record."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
