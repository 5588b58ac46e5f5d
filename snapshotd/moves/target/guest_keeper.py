"""Starts the guest keeper of a copy, which becomes pid 1 of the copy's namespace and starts criu.

Invariant: the rank's entry, with its move, is registered before. A keeper that this daemon loses, because it is killed here,
is told that it is not wanted when it connects to the next one, and ends. No other move adopts it.
"""

from __future__ import annotations

import asyncio
import json

from snapshotd.api.errors import Timeout, Where
from snapshotd.criu import session
from snapshotd.keepers.link import KeeperLink
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.moves.target import waiting_keepers
from snapshotd.moves.target.waiting_keepers import WaitingKeeper
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.privileges import Credentials
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

KEEPER_S = 15.0


async def start(
    node: Node,
    begin: Begin,
    image: ImageDescription,
    group: Cgroup,
    user: Credentials,
    connected: asyncio.Future[KeeperLink],
    run: str = "",
    replayed: str = "",
) -> tuple[KeeperLink, WaitingKeeper]:
    """Starts the guest keeper. `run`: the record by which the copy before was ended, if the rank comes back from an older
    image. `replayed`: what is done with output that is printed again. It is connected when this returns, and criu waits for
    its request on the socket."""
    config = node.config
    keeper = await in_thread(waiting_keepers.take, config.criu)
    how = "did not read its orders"
    try:
        orders = await _orders(node, begin, image, group, user, keeper, run, replayed)
        await in_thread(keeper.order, orders, KEEPER_S)
        how = "did not connect"
        await reach(Point.KEEPER_STARTED)
        async with asyncio.timeout(KEEPER_S):
            link = await connected
    except BaseException as error:
        await in_thread(keeper.end)  # and criu with it
        if not isinstance(error, TimeoutError | BrokenPipeError):
            raise
        if isinstance(error, TimeoutError):
            what = f"{how} within {KEEPER_S:.0f} s"
        else:
            what = f"ended before it had read its orders (exit status {keeper.process.returncode})"
        raise Timeout(
            f"the guest keeper {what}",
            remedy="see the daemon's log on the target for its output",
            where=Where.SOURCE_FROZEN,
        ) from error
    return link, keeper


async def _orders(
    node: Node,
    begin: Begin,
    image: ImageDescription,
    group: Cgroup,
    user: Credentials,
    keeper: WaitingKeeper,
    run: str,
    replayed: str,
) -> bytes:
    config, program = node.config, keeper.program
    environment = session.restore_environment(program, node.store.path(begin.move), user)
    stdio = await in_thread(image.stdio.to_json)
    orders = {
        "uid": begin.rank_uid,
        "job": begin.job,
        "rank": begin.rank,
        "relay_key": image.relay_key,
        "move": begin.move,
        "home_node": image.home_node,
        "home_endpoint": image.home_endpoint,
        "node": config.node,
        "keeper_sock": str(config.keeper_socket),
        "criu": {"argv": program.argv, "fds": program.fds, "environment": environment},
        "criu_fd": keeper.criu_fd,
        "cgroup_procs": str(group.path / "cgroup.procs"),
        "identity": image.identity.to_orders(),
        "stdio": stdio,
        "spool": {
            "folder": str(config.spool_dir),
            "rank_bytes": config.spool_rank_bytes,
            "total_bytes": config.spool_total_bytes,
            "free_bytes": config.spool_free_bytes,
        },
        "command": image.command,
        "run": run,
        "replayed": replayed,
        "moves": image.moves + 1,
        "started_unix_s": image.started_unix_s,
    }
    return await in_thread(lambda: json.dumps(orders).encode())
