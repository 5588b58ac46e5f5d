"""A child of root opens no device for writing unless it must, and makes no program that gives root's rights away."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from snapshotd.proc import foreign_memory
from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox import syscalls
from snapshotd.sandbox.privileges import CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
from snapshotd.sandbox.profiles import Profile
from tests.sandbox.children import attempts, denied, needs_seccomp, root, simulated

AS_ROOT = [CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER]
ROOT = [0, 0, []]
BLKROSET, FIONBIO = 0x125D, 0x5421


@root
@needs_seccomp
def test_reader_of_root_opens_no_device_for_writing(place: Path) -> None:
    device = place / "device"
    os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
    steps: list[list[Any]] = [["overwrite", str(device)], ["read", str(device)], ["memory", os.getpid(), os.O_RDONLY]]
    plan: dict[str, Any] = {"ids": ROOT, "keep": [CAP_DAC_READ_SEARCH]}
    assert attempts(steps, "MEMORY", **plan).results == [0, 0, 0], "one that writes memory can"
    assert attempts(steps, "MEMORY_READING", **plan).results == [errno.EPERM, 0, 0]
    denied([["memory", os.getpid(), os.O_RDWR]], "MEMORY_READING", **plan)


@root
def test_process_of_root_is_read_by_a_child_that_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    children = foreign_memory._Children()
    monkeypatch.setattr(foreign_memory, "_children", children)
    text = ctypes.create_string_buffer(b"before", 64)
    pid, address = os.getpid(), ctypes.addressof(text)
    assert foreign_memory.read(pid, 0, address, 6, user_id=0) == b"before"
    assert [child.writes for child in children._idle] == [False]
    foreign_memory.write(pid, 0, address, b"after!", user_id=0)
    assert foreign_memory.read(pid, 0, address, 6, user_id=0) == b"after!"
    assert sorted(child.writes for child in children._idle) == [False, True]
    children.close()


@root
@needs_seccomp
def test_files_child_of_root_makes_no_set_user_id_program(place: Path) -> None:
    (place / "own").touch(mode=0o755)
    for bits in (0o4755, 0o2755, 0o1755):
        steps: list[list[Any]] = [
            ["fchmod", str(place / "own"), bits],
            ["create", str(place / "new"), bits],
            ["mknod", str(place / "new"), stat.S_IFREG | bits],
            ["mkdir", str(place / "new"), bits],
        ]
        denied(steps, "FILES", ids=ROOT, write=[str(place)], keep=AS_ROOT)
    assert [path.name for path in place.iterdir()] == ["own"]
    assert stat.S_IMODE((place / "own").stat().st_mode) == 0o755


@root
def test_program_that_is_made_through_openat2_loses_its_bits_with_the_first_byte(place: Path) -> None:
    """Its mode is in memory, where the filter cannot see it."""
    steps = [["openat2", str(place / how), how] for how in ("write", "truncate", "allocate")]
    assert attempts(steps, "FILES", ids=ROOT, write=[str(place)], keep=AS_ROOT).results == [0, 0, 0]
    for how in ("write", "truncate", "allocate"):
        found = (place / how).stat()
        assert (found.st_size > 0, stat.S_IMODE(found.st_mode)) == (True, 0o755), how


@root
@needs_seccomp
@pytest.mark.parametrize("profile", ["FILES", "LOOK", "MEMORY", "MEMORY_READING"])
def test_child_controls_no_device_on_any_kernel(profile: str) -> None:
    """Landlock restricts that since Linux 6.10."""
    steps: list[list[Any]] = [["call", "ioctl", -1, BLKROSET, 0], ["call", "ioctl", -1, FIONBIO, 0]]
    assert attempts(steps, None).results == [errno.EBADF] * 2
    assert attempts(steps, "filter only", rules=profile).results == [errno.EPERM, errno.EBADF]


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_these_rules_are_right_on_both_architectures(machine: str) -> None:
    def program(profile: Profile) -> bytes:
        return seccomp.compiled(profile.value.denied, profile.value.allowed, machine)

    for profile in (Profile.LOOK, Profile.MEMORY_READING):
        assert simulated(program(profile), machine, "openat", 0, 0, os.O_RDWR) == errno.EPERM
        assert simulated(program(profile), machine, "openat", 0, 0, os.O_RDONLY | os.O_CLOEXEC) == 0
    files = program(Profile.FILES)
    for mode, answer in ((0o4755, errno.EPERM), (0o2000, errno.EPERM), (0o1777, errno.EPERM), (0o777, 0)):
        assert simulated(files, machine, "fchmod", 0, mode) == answer
        assert simulated(files, machine, "openat", 0, 0, os.O_CREAT, mode) == answer
        assert simulated(files, machine, "mkdirat", 0, 0, mode) == answer
        assert simulated(files, machine, "mknodat", 0, 0, stat.S_IFIFO | mode) == answer
    for profile in (Profile.FILES, Profile.LOOK, Profile.MEMORY):
        assert simulated(program(profile), machine, "ioctl", 0, BLKROSET) == errno.EPERM
        assert simulated(program(profile), machine, "ioctl", 0, FIONBIO) == 0
