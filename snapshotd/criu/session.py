"""One `criu swrk` process, controlled over a SEQPACKET socket pair with pycriu's messages.

pycriu's own `criu.py` forks in-process and ignores notifications, so only its message types are used. A session takes one
request; then criu exits. Criu runs outside the daemon's cgroup, in the namespaces of the rank: in the daemon's mount
namespace it would see other mounts than the rank ("unreachable sharing"), in another pid namespace other pids.

If criu or the daemon is killed, the rank stays stopped (SIGSTOP) and frozen.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pycriu import rpc_pb2 as rpc

import shim
from snapshotd.api.errors import CriuFailed, Timeout, Where
from snapshotd.criu.log import excerpt

#: Requests and responses are far smaller than this.
_MESSAGE_BYTES = 1 << 20

#: Reads other users' limits where root lacks CAP_SYS_RESOURCE; see the comment in its source.
_LIMITS = Path(shim.__file__).with_name("lib") / "libcriulimits.so"

OnNotify = Callable[[str, int], Awaitable[None]]


def swrk_pair() -> tuple[socket.socket, socket.socket]:
    """(ours, criu's): the socket pair of a session; ours is non-blocking."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


async def spawn_in(criu: str, member_pid: int, cgroup: Path, theirs: socket.socket) -> asyncio.subprocess.Process:
    """Starts `criu swrk` in the mount, pid and network namespaces of `member_pid`, in `cgroup`."""
    preload = str(_LIMITS) if _LIMITS.exists() else ""
    join = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
    enter = ["nsenter", f"--target={member_pid}", "--mount", "--net", "--pid", "--"]
    return await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", join, "sh", str(cgroup), *enter, criu, "swrk", str(theirs.fileno())),
        pass_fds=(theirs.fileno(),),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={**os.environ, "LD_PRELOAD": preload, "SNAPSHOT_CRIU_PRELOAD": preload},
    )


async def ask(
    ours: socket.socket, request: rpc.criu_req, *, log_path: Path, timeout_s: float, where: Where, on_notify: OnNotify
) -> rpc.criu_resp:
    """Sends the request and answers notifications until the response arrives.

    `where` is the state of the rank if this fails. Raises CriuFailed with the relevant lines of criu's log.
    """
    loop = asyncio.get_running_loop()

    async def talk() -> rpc.criu_resp:
        await loop.sock_sendall(ours, request.SerializeToString())
        while True:
            data = await loop.sock_recv(ours, _MESSAGE_BYTES)
            if not data:
                raise CriuFailed(f"criu exited without a response\n{excerpt(log_path)}".rstrip(), where=where)
            answer = rpc.criu_resp.FromString(data)
            if answer.type != rpc.NOTIFY:
                return answer
            try:
                await on_notify(answer.notify.script, answer.notify.pid)
            except BaseException:
                await loop.sock_sendall(ours, _notified(ok=False))
                raise
            await loop.sock_sendall(ours, _notified(ok=True))

    try:
        answer = await asyncio.wait_for(talk(), timeout_s)
    except TimeoutError as error:
        raise Timeout(f"criu did not finish within {timeout_s:.0f} s\n{excerpt(log_path)}", where=where) from error
    except (BrokenPipeError, ConnectionResetError) as error:
        raise CriuFailed(f"criu was killed\n{excerpt(log_path)}".rstrip(), where=where) from error
    if not answer.success:
        code = f" ({os.strerror(answer.cr_errno)})" if answer.cr_errno else ""
        # cr_errmsg is not quoted: it is the first error line of the log, which is the harmless one
        raise CriuFailed(f"criu failed{code}\n{excerpt(log_path)}".rstrip(), where=where)
    return answer


def _notified(*, ok: bool) -> bytes:
    return bytes(rpc.criu_req(type=rpc.NOTIFY, notify_success=ok).SerializeToString())


def _options(images: Path, log_file: str) -> rpc.criu_opts:
    """The options that dump and restore share. A path instead of a descriptor: criu would look that up by our pid, which is
    not visible from another pid namespace."""
    return rpc.criu_opts(
        images_dir_fd=-1,
        images_dir=str(images),
        log_level=4,
        log_file=log_file,
        notify_scripts=True,
        file_locks=True,
        ext_unix_sk=False,
        tcp_established=True,
        timeout=600,
        network_lock=rpc.SKIP,
        manage_cgroups=True,  # this and IGNORE: stay in the cgroup criu runs in, not in the source's frozen one
        manage_cgroups_mode=rpc.IGNORE,
    )


def dump_request(images: Path, inner_pid: int, cgroup: Path, external: Sequence[str]) -> rpc.criu_req:
    """Dumps the tree of `inner_pid` (a pid of its own pid namespace); it stays stopped, its cgroup frozen.

    leave_running on a cgroup that was frozen before leaves it frozen (measured). leave_stopped would leave sockets in repair
    mode."""
    options = _options(images, "dump.log")
    options.pid = inner_pid
    options.leave_running = True
    options.freeze_cgroup = str(cgroup)
    options.ghost_limit = 2**32 - 1
    options.link_remap = True
    options.external.extend(external)
    return rpc.criu_req(type=rpc.DUMP, opts=options)


def restore_request(images: Path, inherit: Sequence[tuple[str, int]]) -> rpc.criu_req:
    """Restores the tree, stopped as it was dumped, as a child of criu's parent, the keeper.

    auto_dedup removes each page from the image as it is restored: the target never holds the rank twice."""
    options = _options(images, "restore.log")
    options.rst_sibling = True
    options.auto_dedup = True
    options.leave_stopped = True  # even if a SIGCONT arrived between the freeze and the dump
    for key, fd in inherit:
        options.inherit_fd.append(rpc.inherit_fd(key=key, fd=fd))
    return rpc.criu_req(type=rpc.RESTORE, opts=options)
