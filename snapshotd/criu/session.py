"""One `criu swrk` process, controlled over a SEQPACKET socket pair with pycriu's messages.

pycriu's own `criu.py` forks in-process and ignores notifications, so only its message types are used. A session takes one
request; then criu exits. Criu runs outside the daemon's cgroup, in the namespaces of the rank: in another mount namespace
it would see other mounts than the rank ("unreachable sharing"), in another pid namespace other pids.

Criu runs as root, so it never enters a namespace that a user made. A rank at home is in the daemon's own namespaces, and
nothing is entered. A restored one is in the namespaces that its guest keeper made as root. Both are verified, by
descriptor, once the rank is frozen. Criu and what starts it are executed by descriptors (snapshotd/runtime/programs.py).

If criu or the daemon is killed, the rank stays stopped (SIGSTOP) and frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from pycriu import rpc_pb2 as rpc

import shim
from snapshotd.api.errors import CriuFailed, Internal, Refused, Timeout, Where
from snapshotd.criu import layers
from snapshotd.criu.log import excerpt
from snapshotd.proc import namespaces
from snapshotd.proc.privileges import Credentials
from snapshotd.runtime import programs
from snapshotd.runtime.programs import Program

#: Requests and responses are far smaller than this.
_MESSAGE_BYTES = 1 << 20

_LIBRARIES = Path(shim.__file__).with_name("lib")
#: Preloaded at a dump: reads other users' limits where root lacks CAP_SYS_RESOURCE, and hides pages that the image leaves
#: out; see the comments in its sources.
_LIMITS = _LIBRARIES / "libcriulimits.so"
#: Preloaded at a restore: uses the paths of a user's rank with that user's rights, and keeps pages that several processes
#: read.
_FILES = _LIBRARIES / "libcriufiles.so"

log = logging.getLogger(__name__)

#: Of criu's log. It writes several lines for each mapping and each run of pages, with a system call for each line.
_WARNINGS, _EVERYTHING = 2, 4

OnNotify = Callable[[str, int], Awaitable[None]]


def swrk_pair() -> tuple[socket.socket, socket.socket]:
    """(ours, criu's): the socket pair of a session; ours is non-blocking."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def open_programs(criu: str) -> None:
    """Opens what `spawn_in` executes. Called when the daemon starts. Raises BadConfig."""
    for program in (programs.opened(criu), programs.system("sh"), programs.system("nsenter")):
        assert program.fds


@contextlib.contextmanager
def verified_namespaces(pid: int, keeper_pid: int) -> Iterator[dict[str, int]]:
    """The mount and pid namespaces of a frozen rank, as descriptors by their kind, if they are not the daemon's own.

    `keeper_pid` is its guest keeper's; 0 if it was not restored here. Raises Refused for a namespace that neither the daemon
    is in nor its guest keeper made."""
    with contextlib.ExitStack() as stack:

        def opened(of: int | str, kind: str) -> int:
            fd = namespaces.opened(of, kind)
            stack.callback(os.close, fd)
            return fd

        entered = {}
        for kind in ("mnt", "pid", "net"):
            theirs = opened(pid, kind)
            if namespaces.same(theirs, opened("self", kind)):
                continue
            by_keeper = bool(keeper_pid) and kind != "net" and namespaces.same(theirs, opened(keeper_pid, kind))
            if not by_keeper or not namespaces.made_by_root(theirs):
                raise Refused(
                    f"namespaces: the rank has entered another {kind} namespace since preflight",
                    remedy="start the job outside containers and `unshare`, with `migrator run` as the outermost command",
                    where=Where.SOURCE_FROZEN,
                )
            entered[kind] = theirs
        yield entered


async def spawn_in(
    criu: str, entered: dict[str, int], cgroup: Path, theirs: socket.socket, hidden: Path | None = None
) -> asyncio.subprocess.Process:
    """Starts `criu swrk` in these namespaces (see `verified_namespaces`), in `cgroup`. `hidden` lists pages that it must not
    dump (snapshotd/criu/below.py)."""
    shell, nsenter, program = programs.system("sh"), programs.system("nsenter"), programs.opened(criu)
    join = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
    options = {"mnt": "--mount", "pid": "--pid"}
    enter = [f"{options[kind]}=/proc/self/fd/{fd}" for kind, fd in entered.items()]
    return await asyncio.create_subprocess_exec(
        *(*shell.argv, "-c", join, "sh", str(cgroup)),
        *((*nsenter.argv, *enter, "--") if enter else ()),
        *(*program.argv, "swrk", str(theirs.fileno())),
        pass_fds=(theirs.fileno(), *shell.fds, *nsenter.fds, *program.fds, *entered.values()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=dump_environment(program, hidden),
    )


def dump_environment(program: Program, hidden: Path | None = None) -> dict[str, str]:
    """The environment of criu while it dumps."""
    more = {"SNAPSHOT_HIDDEN_PAGES": str(hidden)} if hidden is not None else {}
    return _environment(program, _LIMITS if _LIMITS.exists() else None, **more)


def restore_environment(program: Program, images: Path, who: Credentials) -> dict[str, str]:
    """The environment of criu while it restores a rank of this user. Raises Internal if the library is missing."""
    user_id, group_id = who.user_ids[3], who.group_ids[3]
    more = {"SNAPSHOT_KEPT_PAGES": str(images / layers.KEPT)}
    if user_id == 0:
        return _environment(program, _FILES if _FILES.exists() else None, **more)
    if not _FILES.exists():
        raise Internal(f"{_FILES} is missing: build it with `make -C shim`", where=Where.SOURCE_FROZEN)
    groups = ",".join(map(str, who.groups))
    more |= {"SNAPSHOT_RANK_USER": f"{user_id}:{group_id}:{groups}", "SNAPSHOT_IMAGES": str(images)}
    return _environment(program, _FILES, **more)


def _environment(program: Program, preloaded: Path | None, **more: str) -> dict[str, str]:
    if preloaded is not None:  # a script that starts criu may need LD_PRELOAD to be empty for itself
        more |= {"LD_PRELOAD": str(preloaded), "SNAPSHOT_CRIU_PRELOAD": str(preloaded)}
    if program.plugins:
        more |= {"CRIU_LIBS_DIR": program.plugins}
    return programs.environment(**more)


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
        async with asyncio.timeout(timeout_s):
            answer = await talk()
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
        log_level=_EVERYTHING if log.isEnabledFor(logging.DEBUG) else _WARNINGS,
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


def restore_request(images: Path, inherit: Sequence[tuple[str, int]], *, keeps_pages: bool = False) -> rpc.criu_req:
    """Restores the tree, stopped as it was dumped, as a child of criu's parent, the keeper.

    auto_dedup removes each page from the image as it is restored: the target never holds the rank twice. `keeps_pages`: the
    files of pages are also those of another image, and stay as they are."""
    options = _options(images, "restore.log")
    options.rst_sibling = True
    options.auto_dedup = not keeps_pages
    options.leave_stopped = True  # even if a SIGCONT arrived between the freeze and the dump
    for key, fd in inherit:
        options.inherit_fd.append(rpc.inherit_fd(key=key, fd=fd))
    return rpc.criu_req(type=rpc.RESTORE, opts=options)
