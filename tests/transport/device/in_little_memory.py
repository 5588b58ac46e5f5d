"""Receives a stripe in a cgroup with too little memory for it, and prints how that ended. argv: a folder in memory, MiB.

With 0 MiB it makes eight rings of the usual size instead.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from snapshotd.api.errors import SnapshotError
from snapshotd.transport.device.ring import RING_BYTES
from tests.transport.device.channel import MIB, Nodes, children, noise


async def main(folder: Path, size_mib: int) -> None:
    nodes = Nodes(folder, encrypted=False)
    piece = noise(4 * MIB)
    with open(nodes.here / "device-1-0", "wb") as file:
        # No two pieces are equal: equal ones are not sent again.
        file.writelines(number.to_bytes(8) + piece[8:] for number in range(size_mib // 4))
    sizes = {"device-1-0": (nodes.here / "device-1-0").stat().st_size}
    async with (
        nodes.incoming(["device-1-0"], expected_bytes=sizes["device-1-0"]) as incoming,
        nodes.outgoing(incoming.port, incoming.key, ["device-1-0"]) as outgoing,
    ):
        scores = {int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in children()}
        outgoing.advance("device-1-0", sizes["device-1-0"])
        outgoing.finish(sizes)
        try:
            print("arrived", await incoming.wait(120))
        except SnapshotError as error:
            print(f"{scores} {error.code}: {error.message}")


async def make_rings(folder: Path) -> None:
    nodes = Nodes(folder, encrypted=False)
    try:
        async with nodes.incoming([f"device-1-{number}" for number in range(8)], ring_bytes=RING_BYTES):
            print("made")
    except SnapshotError as error:
        print(f"{error.code}: {error.message}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])) if int(sys.argv[2]) else make_rings(Path(sys.argv[1])))
