from __future__ import annotations

from tests.daemon.offload_doubles import source
from tests.served import certificates, free_port, serve

__all__ = ["certificates", "free_port", "serve", "source"]
