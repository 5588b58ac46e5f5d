"""Asks a daemon to wait for a time that is not a number, with the certificate of a node: `clock_breaker.py SETTINGS`.

A timer at such a time is neither before nor after any other one, so the timers of an event loop lose their order. Prints what
the daemon answered, and how many of an operator's ordinary waits ended in time meanwhile. JSON in and out.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from integration.security.forger import credentials
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import SnapshotError

ATTACKS, WAITS = 200, 40
LONGEST_S = 3.0
#: How much later than it should a wait may end on a busy machine.
LATE_S = 30.0


async def break_clock(settings: dict[str, Any]) -> dict[str, Any]:
    endpoint, name = settings["endpoint"], settings["name"]
    node, operator = (credentials(Path(settings[one])) for one in ("node", "operator"))
    async with (
        DaemonClient(endpoint, credentials=node, node=name) as hostile,
        DaemonClient(endpoint, credentials=operator, node=name) as honest,
    ):
        known = await honest.node.GetHealth(pb.GetHealthRequest(), timeout_s=LATE_S)

        def asked(wait_s: float) -> pb.GetHealthRequest:
            return pb.GetHealthRequest(epoch=known.epoch, after=known.sequence, wait_s=wait_s)

        answers: Counter[str] = Counter()

        async def attack() -> None:
            try:
                await hostile.node.GetHealth(asked(math.nan), timeout_s=LATE_S + LONGEST_S)
                answers["answered"] += 1
            except SnapshotError as error:
                answers[error.code] += 1

        async def wait() -> bool:
            try:
                await honest.node.GetHealth(asked(random.uniform(0.1, LONGEST_S)), timeout_s=LATE_S)
            except SnapshotError:
                return False
            return True

        waits = [asyncio.create_task(wait()) for _ in range(WAITS)]
        attacks = []
        for number in range(ATTACKS):
            attacks.append(asyncio.create_task(attack()))
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        ended = sum(await asyncio.gather(*waits))
        await asyncio.gather(*attacks)
    return {"answers": answers, "ended": ended, "waits": WAITS}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(break_clock(json.loads(Path(sys.argv[1]).read_text())))))
