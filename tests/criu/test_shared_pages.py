"""A real criu dumps and restores forked processes whose images leave out the pages that they share."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import Internal
from snapshotd.criu import below, layers, page_ranges, pagemap_image, session
from snapshotd.criu.pagemap_image import Pagemaps
from snapshotd.moves import tree_facts
from snapshotd.moves.source.fork_sharing import ForkSharing
from snapshotd.proc import tree
from snapshotd.runtime import programs
from tests.criu.test_restore_as_user import PREFIX, USER, wait
from tests.installation import readable_python
from tests.kernel import needs_page_scans

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not (PREFIX / "criu").exists(), reason="no CRIU of our own: run `make setup`"),
    needs_page_scans,
]

MIB = 1 << 20
SHARED_MIB = 24
#: A child that has written to every third page of 2 MiB and dropped 1 MiB, its child, and what the parent did after the fork.
PROGRAM = f"""
import ctypes, mmap, os, random, time
os.setsid()
null = os.open("/dev/null", os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(null, number)
memory = mmap.mmap(-1, {SHARED_MIB} << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = random.Random(1).randbytes({SHARED_MIB} << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None)

def write(first, count, value):
    for page in range(first, first + count, 3):
        memory[page * 4096] = value

def drop(first, count):
    assert libc.madvise(ctypes.c_void_p(address + first * 4096), ctypes.c_size_t(count * 4096), 4) == 0

def say(what):
    with open("new-" + what, "w") as file:
        file.write(hex(address))
    os.rename("new-" + what, what)

if os.fork() == 0:
    write(0, 512, 1)
    drop(1000, 256)
    assert libc.mprotect(ctypes.c_void_p(address + 2600 * 4096), ctypes.c_size_t(200 * 4096), mmap.PROT_READ) == 0
    more = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    more[:] = bytes([5]) * (1 << 20)
    if os.fork() == 0:
        write(256, 600, 2)
        say("grandchild")
    else:
        say("child")
else:
    while not (os.path.exists("grandchild") and os.path.exists("child")):
        time.sleep(0.01)
    write(2000, 300, 3)
    drop(3000, 100)
    say("parent")
while True:
    time.sleep(1000)
"""


class Family:
    """Three processes of a user, of which each but the first was forked by the one before."""

    def __init__(self, folder: Path) -> None:
        self.own, self.images = folder / "own", folder / "images"
        self.own.mkdir()
        os.chown(self.own, USER, USER)
        self.images.mkdir(mode=0o700)
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", f"--groups={USER}"]
        subprocess.run(
            ["sh", "-c", '"$@" & echo $! > "$0"', str(folder / "pid"), *user, readable_python(), "-I", "-c", PROGRAM],
            cwd=self.own,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        self.root = int((folder / "pid").read_text())
        wait((self.own / "parent").exists)
        self.address = int((self.own / "parent").read_text(), 16)
        (child,) = tree.children(self.root)
        self.pids = [self.root, child, *tree.children(child)]
        self.program = programs.opened(str(PREFIX / "criu"))
        self.who = tree_facts.gather([self.root]).processes[0].credentials
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        wait(lambda: all(tree.stopped(pid) for pid in self.pids))

    def _criu(self, verb: str, *arguments: str, env: dict[str, str]) -> None:
        options = ["-D", str(self.images), "-v2", "-o", f"{verb}.log"]
        done = subprocess.run(
            [*self.program.argv, verb, *options, *arguments],
            pass_fds=self.program.fds,
            env=env,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, (self.images / f"{verb}.log").read_text()

    def dump(self, found: list[below.Layer]) -> None:
        hidden = below.hide(self.images, found)
        self._criu("dump", "-t", str(self.root), env=session.dump_environment(self.program, hidden))
        wait(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in self.pids))

    def restore(self) -> None:
        env = session.restore_environment(self.program, self.images, self.who)
        self._criu("restore", "-d", "--leave-stopped", "--auto-dedup", env=env)
        assert tree.children(self.root) == self.pids[1:2]

    def digests(self) -> list[str]:
        found = []
        for pid in self.pids:
            with open(f"/proc/{pid}/mem", "rb", 0) as memory:
                memory.seek(self.address)
                found.append(hashlib.blake2b(memory.read(SHARED_MIB * MIB)).hexdigest())
        return found

    def shared_bytes(self) -> int:
        """The anonymous memory of all; what they share counts once."""
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self.pids]
        return sum(int(size) << 10 for text in texts for size in re.findall(r"Pss_Anon: +(\d+) kB", text))

    def image_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.images.glob("pages-*.img"))

    def end(self) -> None:
        for pid in reversed(self.pids):
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def family(open_folder: Path) -> Iterator[Family]:
    made = Family(open_folder)
    yield made
    made.end()


def test_page_that_forked_processes_share_is_dumped_once_and_shared_again(family: Family) -> None:
    before, needed_bytes = family.digests(), family.shared_bytes()
    assert len(set(before)) == 3
    found = list(ForkSharing(family.pids).layers())
    assert [(layer.pid, layer.parent) for layer in found] == list(zip(family.pids[1:], family.pids, strict=False))
    family.dump(found)
    assert family.image_bytes() < 1.1 * needed_bytes
    below.complete(family.images, found)
    assert layers.build(Pagemaps(family.images), below.described(found)) == 2
    family.restore()
    assert family.digests() == before
    assert family.shared_bytes() < 1.1 * needed_bytes
    shared_bytes = max(page_ranges.size_bytes(layer.pages) for layer in found)
    assert family.image_bytes() < 1.1 * shared_bytes, "what only one process has read is removed from the image"


def test_without_the_layers_every_process_has_its_own_pages(family: Family) -> None:
    before, needed_bytes = family.digests(), family.shared_bytes()
    family.dump([])
    assert family.image_bytes() > 2 * needed_bytes
    family.restore()
    assert family.digests() == before


def test_pages_that_were_sent_before_the_freeze_are_found_in_their_rounds(family: Family) -> None:
    """Three rounds of pages of the first process: everything, every second MiB once more, and one MiB of those again. Its
    child shares pages with it."""
    before = family.digests()
    start, end = family.address, family.address + SHARED_MIB * MIB
    changed = [(at, at + MIB) for at in range(start, end, 2 * MIB)]
    rounds = [[(start, end)], changed, changed[3:4]]
    with open(f"/proc/{family.root}/mem", "rb", 0) as memory:
        for number, ranges in enumerate(rounds, 1):
            with (family.images / below.ahead_pages_name(family.root, number)).open("wb") as file:
                for at in [at for first, last in ranges for at in range(first, last, MIB)]:
                    memory.seek(at)
                    stale = any(first <= at < last for later in rounds[number:] for first, last in later)
                    file.write(b"\7" * MIB if stale else memory.read(MIB))
    # What it wrote and dropped after the fork lies in between: criu dumps it.
    kept = [(start, start + 7 * MIB), (start + 13 * MIB, end)]
    own = below.Layer(family.root, kept, rounds=rounds)
    found = [own, *ForkSharing(family.pids, without=[family.root]).layers()]
    family.dump(found)
    below.complete(family.images, found)
    assert layers.build(Pagemaps(family.images), below.described(found)) == 5
    family.restore()
    assert family.digests() == before


def test_pages_of_a_process_alone_that_were_sent_before_the_freeze_are_removed_once_restored(family: Family) -> None:
    before = family.digests()
    whole = [(family.address, family.address + MIB)]
    file = family.images / below.ahead_pages_name(family.root, 1)
    with open(f"/proc/{family.root}/mem", "rb", 0) as memory:
        memory.seek(family.address)
        file.write_bytes(memory.read(MIB))
    found = [below.Layer(family.root, whole, rounds=[whole])]
    family.dump(found)
    below.complete(family.images, found)
    assert layers.build(Pagemaps(family.images), below.described(found)) == 1
    family.restore()
    assert family.digests() == before
    assert file.stat().st_blocks == 0


def test_image_that_lacks_a_page_is_not_complete(family: Family) -> None:
    found = list(ForkSharing(family.pids).layers())
    family.dump(found)
    path = family.images / pagemap_image.name_of(family.root)
    own = pagemap_image.decode(path.read_bytes())
    present = [(start, end) for start, end in own.present if not start <= family.address + 16 * MIB < end]
    path.write_bytes(pagemap_image.encode(pagemap_image.Pagemap(own.pages_id, present, [])))
    with pytest.raises(Internal, match=r"the page of process \d+ at [0-9a-f]+ should lie below its image"):
        below.complete(family.images, found)
