"""A rank that changes, all the time, what the daemon has just checked. Standard library only; runs as an ordinary user.

    hostile.py rank|accomplice FOLDER SECRET SEED

`rank` prints a line per step, and checks its own files and memory. Beside it, children of the same tree swap files and
folders for links to SECRET (a file that only root can read), enter namespaces of their own, map and unmap, open and close.
`accomplice` does the same to FOLDER from outside the rank: it is meant to run on the target, where the rank is restored.

FOLDER/state/log and FOLDER/state/map belong to the rank, which has them open and mapped. Most of the time they are in place:
otherwise no move would succeed, and most of the protocol would never run.
"""

import contextlib
import ctypes
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

role, folder, secret, seed = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
chance = random.Random(f"{seed} {role} {os.getpid()}")
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER, MS_BIND = 0x20000, 0x10000000, 0x1000
SCRIPT = "#!/bin/sh\nid -u >>{folder}/ran-as\n"


def swap(name: str, target: str) -> None:
    """Puts a link in the place of a file or folder for a moment, then the original back."""
    place, aside, link = folder / name, folder / f"{name}.aside", folder / f"{name}.link"
    place.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    try:
        with contextlib.suppress(FileNotFoundError):
            place.rename(aside)
        link.rename(place)
        time.sleep(chance.choice([0, 0.0005, 0.005, 0.02]))
    finally:
        with contextlib.suppress(OSError):
            place.unlink()
        with contextlib.suppress(OSError):
            aside.rename(place)


def lay_links() -> None:
    """Links under names that a program might use for its temporary files."""
    for name in ("log", "map"):
        for ending in (f".{chance.randrange(1, 40000)}.carried", ".carried", ".new", ".tmp", "~", ".cr.1.ghost"):
            link = folder / "state" / f"{name}{ending}"
            with contextlib.suppress(OSError):
                link.symlink_to(secret)
                time.sleep(0.0005)
                link.unlink()


def new_namespace() -> None:
    """A child that covers the daemon's programs in a mount namespace of its own."""
    child = os.fork()
    if child == 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0:
            for program in ("/usr/sbin/criu", "/usr/bin/nsenter", "/usr/sbin/nft", "/bin/sh", "/usr/bin/python3"):
                libc.mount(bytes(folder / "script"), program.encode(), None, MS_BIND, None)
        time.sleep(chance.uniform(0, 0.3))
        os._exit(0)
    os.waitpid(child, 0)


def open_and_close() -> None:
    kept = [os.open(folder / "state" / "log", os.O_RDWR) for _ in range(chance.randrange(8))]
    kept += [os.open("/dev/null", os.O_RDONLY)]
    time.sleep(chance.uniform(0, 0.02))
    for descriptor in kept:
        os.close(descriptor)


def map_and_unmap() -> None:
    with (folder / "state" / "map").open("r+b") as file, mmap.mmap(file.fileno(), 4096) as view:
        view[100] = 1
        time.sleep(chance.uniform(0, 0.02))


def set_user_id() -> None:
    (folder / "state" / "log").chmod(chance.choice([0o4777, 0o2777, 0o644]))


def replace() -> None:
    """Another inode under the name of a file that the rank has open."""
    new = folder / "state" / "log.replaced"
    new.write_bytes((folder / "state" / "log").read_bytes())
    aside = folder / "state" / "log.old"
    (folder / "state" / "log").rename(aside)
    new.rename(folder / "state" / "log")
    time.sleep(chance.uniform(0, 0.01))
    aside.rename(folder / "state" / "log")


TRICKS: list[Callable[[], None]] = [
    lambda: swap("state/log", secret),
    lambda: swap("state/map", secret),
    lambda: swap("state", os.path.dirname(secret)),
    lay_links,
    set_user_id,
    open_and_close,
    map_and_unmap,
    replace,
]


def put_back(files: dict[str, int]) -> None:
    """Puts the rank's files back in their places, where two programs' tricks have got in each other's way."""
    for name, descriptor in files.items():
        found, wanted = Path(os.readlink(f"/proc/self/fd/{descriptor}")), folder / "state" / name
        if found.parent != wanted.parent:
            with contextlib.suppress(OSError):
                (folder / "state").rename(folder / f"state.{chance.random()}")
            with contextlib.suppress(OSError):
                found.parent.rename(folder / "state")
        elif found != wanted:
            with contextlib.suppress(OSError):
                found.rename(wanted)


def play_tricks(files: dict[str, int]) -> None:
    """For ever: a calm time, then some tricks in a row. The calm is long enough for some moves to find all in order."""
    tricks = TRICKS if role == "accomplice" else [*TRICKS, new_namespace]
    while True:
        put_back(files)
        time.sleep(chance.choice([0.01, 0.1, 0.5, 2.0]))
        for trick in chance.choices(tricks, k=chance.randint(1, 6)):
            with contextlib.suppress(OSError, ValueError):
                trick()


def main() -> None:
    state = folder / "state"
    state.mkdir(parents=True, exist_ok=True)
    if role == "accomplice":
        play_tricks({})
    log = (state / "log").open("w+b", buffering=0)
    (state / "map").write_bytes(bytes(4096))
    with (state / "map").open("r+b") as file:
        view = mmap.mmap(file.fileno(), 4096)
    (folder / "script").write_text(SCRIPT.format(folder=folder))
    (folder / "script").chmod(0o4755)
    if os.fork() == 0:
        play_tricks({"log": log.fileno(), "map": os.open(state / "map", os.O_RDWR)})
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    step = 0
    while True:
        view[:8] = step.to_bytes(8, "little")
        os.pwrite(log.fileno(), step.to_bytes(8, "little"), 0)
        time.sleep(0.02)
        if view[:8] != step.to_bytes(8, "little") or os.pread(log.fileno(), 8, 0) != view[:8]:
            print("WRONG", step, view[:8], os.pread(log.fileno(), 64, 0), flush=True)
            os._exit(1)
        print("step", step, flush=True)
        step += 1


main()
