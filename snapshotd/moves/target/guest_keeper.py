"""Starts the guest keeper of a copy, which becomes pid 1 of the copy's namespace and starts criu.

Invariant: the rank's entry, with its move, is registered before. A keeper that this daemon loses, because it is killed here,
is told that it is not wanted when it connects to the next one, and ends. No other move adopts it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

from snapshotd.api.errors import Timeout, Where
from snapshotd.criu import session
from snapshotd.keepers.link import KeeperLink
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.privileges import Credentials
from snapshotd.runtime import programs
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

KEEPER_S = 15.0
#: Where this program is installed.
_PACKAGES = Path(__file__).resolve().parents[3]


async def start(
    node: Node,
    begin: Begin,
    image: ImageDescription,
    group: Cgroup,
    user: Credentials,
    connected: asyncio.Future[KeeperLink],
) -> tuple[KeeperLink, socket.socket, asyncio.subprocess.Process]:
    """Starts the guest keeper. It is connected when this returns, and criu waits for its request on the socket."""
    config = node.config
    program = programs.opened(config.criu)
    environment = session.restore_environment(program, node.store.path(begin.move), user)
    stdio = await in_thread(image.stdio.to_json)
    ours, theirs = session.swrk_pair()
    process: asyncio.subprocess.Process | None = None
    spec = {
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
        "criu_fd": theirs.fileno(),
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
        "moves": image.moves + 1,
        "started_unix_s": image.started_unix_s,
    }
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "shim.keeper.guest"),
                pass_fds=(theirs.fileno(), *program.fds),
                env=programs.environment(PYTHONPATH=str(_PACKAGES)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                # stderr is this daemon's: a pipe would stay open in the keeper, and asyncio's wait() waits for its end too.
                start_new_session=True,
                cwd="/",
            )
        assert process.stdin is not None
        process.stdin.write(await in_thread(lambda: json.dumps(spec).encode()))
        process.stdin.close()
        await reach(Point.KEEPER_STARTED)
        link = await asyncio.wait_for(connected, KEEPER_S)
    except BaseException as error:
        ours.close()  # criu ends with it
        if not isinstance(error, TimeoutError):
            raise
        ended = f" (it ended with {process.returncode})" if process and process.returncode else ""
        raise Timeout(
            f"the guest keeper did not come up in {KEEPER_S:.0f} s{ended}",
            remedy="see the daemon's log on the target for its output",
            where=Where.SOURCE_FROZEN,
        ) from error
    return link, ours, process
