"""Where the autopilot's state is, and what verbs that read or change it share."""

from __future__ import annotations

import argparse
import getpass
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from migrator.autopilot.policy import Policy
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
    """The state's folder. All users of a machine get the same one, so that a taint is never written where nobody reads it."""
    if options.state is not None:
        return Path(options.state).expanduser().absolute()
    if named := os.environ.get("MIGRATOR_STATE"):
        return Path(named).expanduser().absolute()
    if cluster is not None and cluster.netns is not None:
        return Path(cluster.origin).parent / "autopilot"
    return DEFAULT


def the_policy(options: argparse.Namespace) -> Policy:
    from migrator.autopilot import policy

    return policy.Policy() if options.policy is None else policy.read(options.policy)


def operator() -> str:
    """Who gives an order, for the record."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
