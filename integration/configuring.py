"""Changes the configuration of daemons for a part of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from integration.harness import Cluster


@contextlib.contextmanager
def configured(cluster: Cluster, nodes: Sequence[str], keys: Mapping[str, Any]) -> Iterator[None]:
    """Adds keys to the configuration of these nodes' daemons. Afterwards it is as it was. The daemons are restarted."""
    files = {node: cluster.lab.layout.node(node) / "snapshotd.toml" for node in nodes}
    before = {node: path.read_text() for node, path in files.items()}
    try:
        for node in nodes:
            cluster.configure(node, keys)
        yield
    finally:
        for node, path in files.items():
            path.write_text(before[node])
            cluster.configure(node, {})
