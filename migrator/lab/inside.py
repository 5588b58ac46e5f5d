"""Creates a node's namespaces, keeps them alive, and starts commands inside them.

This is one file that uses only the standard library. It is started by path as `python -I -S inside.py hold|enter SPEC
[ARGV…]`, which takes a few milliseconds and ignores the caller's Python environment. The caller itself does not fork,
because it may have threads.

Invariant: a process joins the lab's cgroup before it creates or enters any namespace. So `down` finds every process by the
cgroup's name alone, even after an interruption.
"""

# pathlib is not used: loading it would take a third of the start-up time.

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any, NoReturn

# ---------------------------------------------------------------- system calls (in Python's library from 3.12 on)

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
NAMESPACES = {"net": CLONE_NEWNET, "mnt": CLONE_NEWNS, "uts": CLONE_NEWUTS}

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    # int unshare(int flags);
    _checked(_libc.unshare(flags), "unshare")


def setns(descriptor: int, flags: int) -> None:
    """Moves the calling thread into the namespaces of `descriptor` (a namespace's file, or a pidfd)."""
    # int setns(int fd, int nstype);
    _checked(_libc.setns(descriptor, flags), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    # int mount(const char *source, const char *target, const char *type, unsigned long flags, const void *data);
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(_libc.mount(*arguments), f"mount {target}")


def sethostname(name: str) -> None:
    # int sethostname(const char *name, size_t len);
    _checked(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name.encode()))), "sethostname")


def start_ticks(pid: int) -> int | None:
    """When the process started (field 22 of /proc/PID/stat); None if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


# ---------------------------------------------------------------- hold: create namespaces and keep them alive


def hold(spec: dict[str, Any]) -> None:
    """Creates the namespaces in a detached child and prints its pid once they are complete. The child then only sleeps.

    spec: cgroup_procs, namespaces (of NAMESPACES), title; with "mnt": tmpfs [[path, options]], folders [path], binds
    [[from, to]], needed [path]; with "uts": hostname.
    """
    report, reports = os.pipe()
    if os.fork() == 0:
        os.close(report)
        os.setsid()
        try:
            _build(spec)
        except OSError as error:
            os.write(reports, json.dumps({"error": error.strerror or str(error)}).encode())
            os._exit(1)
        _become_nobody_special(spec["title"])
        os.write(reports, json.dumps({"pid": os.getpid()}).encode())
        os.close(reports)
        while True:
            signal.pause()
    os.close(reports)
    with os.fdopen(report, "rb") as pipe:
        answer = pipe.read() or b'{"error": "the process that holds the namespaces was killed"}'
    sys.stdout.write(answer.decode())


def _build(spec: dict[str, Any]) -> None:
    _join(spec["cgroup_procs"])
    flags = 0
    for name in spec["namespaces"]:
        flags |= NAMESPACES[name]
    unshare(flags)
    if "uts" in spec["namespaces"]:
        sethostname(spec["hostname"])
    if "mnt" in spec["namespaces"]:
        # A slave: the host's mounts appear in the node, as on a shared file system, but not the node's on the host.
        mount("none", "/", "", MS_REC | MS_SLAVE)
        # Opened before anything is mounted over them, and in this mount namespace, as mount requires.
        sources = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source, _ in spec["binds"]]
        for path, options in spec["tmpfs"]:
            mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options)
        for folder in spec["folders"]:
            os.makedirs(folder, mode=0o755, exist_ok=True)
        for source, (_, target) in zip(sources, spec["binds"], strict=True):
            if not os.path.exists(target):
                os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o644))
            mount(f"/proc/self/fd/{source}", target, "", MS_BIND)
            os.close(source)
        for path in spec["needed"]:
            if not os.path.exists(path):
                hidden = ", ".join(path for path, _ in spec["tmpfs"])
                raise OSError(0, f"{path} is not visible in a node, which has its own {hidden}")


def _become_nobody_special(title: str) -> None:
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    # int prctl(PR_SET_NAME, const char *name): the name that ps shows, at most 15 characters.
    _libc.prctl(15, title.encode()[:15], 0, 0, 0)


# ---------------------------------------------------------------- enter: become a process of a node


def enter(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    """Executes `argv` inside the namespaces of a process; with "log", as a detached daemon whose pid is printed.

    spec: pid, start_ticks, namespaces (may be empty: then it only joins the cgroup), cgroup_procs, cwd, log (path or null).
    """
    pidfd = os.pidfd_open(spec["pid"])
    # Checked after the pidfd was opened, because from then on the pid cannot be reused unnoticed.
    if start_ticks(spec["pid"]) != spec["start_ticks"]:
        raise ProcessLookupError(0, "the process that held the node's namespaces is gone")
    if spec["log"] is not None:
        _detach(spec["log"])
    _join(spec["cgroup_procs"])
    flags = 0
    for name in spec["namespaces"]:
        flags |= NAMESPACES[name]
    if flags:
        setns(pidfd, flags)
    os.close(pidfd)
    try:
        os.chdir(spec["cwd"])
    except OSError:
        os.chdir("/")
    # A shell ignores these signals in background jobs, and they would stay ignored after exec.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], argv)


def _detach(log: str) -> None:
    """Continues as a child in its own session, with its output in `log`. The parent prints the child's pid and exits."""
    child = os.fork()
    if child:
        sys.stdout.write(json.dumps({"pid": child, "start_ticks": start_ticks(child)}))
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _join(cgroup_procs: str) -> None:
    with open(cgroup_procs, "w") as file:
        file.write("0")  # 0: the writing process


def main() -> None:
    verb, spec, argv = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
    if verb == "hold":
        hold(spec)
        return
    try:
        enter(spec, argv)
    except FileNotFoundError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.exit(127)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror or error}\n")
        sys.exit(126)


if __name__ == "__main__":
    main()
