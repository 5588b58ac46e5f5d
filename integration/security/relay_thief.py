"""Tries to relay for a rank with a certificate and keys of a node: `relay_thief.py SETTINGS`, JSON in and out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from integration.security.forger import credentials
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import SnapshotError


async def steal(settings: dict[str, Any]) -> str:
    """The error with which the home node refuses, empty if it accepts."""

    async def frames() -> AsyncGenerator[pb.RelayFrame, None]:
        yield pb.RelayFrame()
        await asyncio.Event().wait()

    node = credentials(Path(settings["node"]))
    async with DaemonClient(settings["endpoint"], credentials=node, node=settings["home"]) as client:
        try:
            async with aclosing(client.home.Relay(frames(), metadata=settings["metadata"], timeout_s=30)) as replies:
                await anext(replies)
        except SnapshotError as error:
            return error.code
    return ""


if __name__ == "__main__":
    print(json.dumps({"refused": asyncio.run(steal(json.loads(Path(sys.argv[1]).read_text())))}))
