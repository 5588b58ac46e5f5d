"""A process that opens both sides of a channel and then waits: its children must not outlive it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from snapshotd.transport.device.incoming import Incoming
from snapshotd.transport.device.outgoing import Outgoing


async def main(here: Path, there: Path) -> None:
    incoming = await Incoming.open(there, ["a"], ["127.0.0.1"], "node-1", encrypted=False)
    await Outgoing.open("127.0.0.1", incoming.port, incoming.key, "node-2", here, ["a"], encrypted=False)
    print("open", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
