"""A process that opens both sides of a channel and then waits: its children must not outlive it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.transport.device.channel import Nodes


async def main(folder: Path) -> None:
    nodes = Nodes(folder, encrypted=False)
    async with nodes.incoming(["a"]) as incoming, nodes.outgoing(incoming.port, incoming.key, ["a"]):
        print("open", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
