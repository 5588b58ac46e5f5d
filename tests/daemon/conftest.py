from __future__ import annotations

from tests.daemon.gate_doubles import cluster, shims, sleepers
from tests.daemon.offload_doubles import source
from tests.served import certificates, free_port, serve

__all__ = ["certificates", "cluster", "free_port", "serve", "shims", "sleepers", "source"]
