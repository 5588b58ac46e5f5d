"""Runs snapshotd's real main with a stub instead of snapshotd/service.py; test_main.py starts it as a separate process.

$STUB selects its behaviour: "" (normal), "hang" (stop never ends), "refuse" (start fails), "fail" (stop fails).
"""

from __future__ import annotations

import asyncio
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.calls import Channel
from snapshotd.api.errors import Full
from snapshotd.config import Config
from snapshotd.network.dispatch import Services
from tests.served import servicer

BEHAVIOUR = os.environ.get("STUB", "")


class Daemon:
    def __init__(self, config: Config, connect: Callable[[str, str], Channel]) -> None:
        self.config = config

    async def start(self, services: Services) -> None:
        if BEHAVIOUR == "refuse":
            raise Full("no room for the journal")

        async def get_node(request: pb.GetNodeRequest, context: Any) -> pb.NodeInfo:
            return pb.NodeInfo(name=self.config.node)

        servicer("Node", GetNode=get_node)(services)

    async def stop(self, grace_s: float) -> None:
        if BEHAVIOUR == "hang":
            print("hanging", flush=True)
            await asyncio.Event().wait()
        if BEHAVIOUR == "fail":
            raise RuntimeError("stop failed")
        print(f"handed over within {grace_s:g} s", flush=True)


if __name__ == "__main__":
    service = types.ModuleType("snapshotd.service")
    service.Daemon = Daemon  # type: ignore[attr-defined]
    sys.modules["snapshotd.service"] = service
    from snapshotd.main import main

    main()
