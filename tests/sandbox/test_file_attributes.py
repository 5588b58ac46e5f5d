"""Landlock restricts neither modes, owners, times nor extended attributes: filters keep children from changing those."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox import syscalls
from snapshotd.sandbox.privileges import CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER
from snapshotd.sandbox.profiles import Profile
from tests.sandbox.children import attempts, denied, needs_landlock, needs_seccomp, root, simulated

AS_ROOT = [CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER]
ABOVE_4_GIB = 1 << 32  # as a pointer; its lower half is that of NULL
#: By a path, and of extended attributes also by a descriptor. Where nothing denies it, each fails with another error.
BY_PATH: list[list[Any]] = [
    ["call", "chmod", 0, 0],
    ["call", "fchmodat", -1, 0, 0],
    ["call", "fchmodat2", -1, 0, 0, 0],
    ["call", "chown", 0, 0, 0],
    ["call", "lchown", 0, 0, 0],
    ["call", "fchownat", -1, 0, 0, 0, 0],
    *(["call", name, 0, 0, 0, 0, 0] for name in ("setxattr", "lsetxattr")),
    ["call", "fsetxattr", -1, 0, 0, 0, 0],
    ["call", "setxattrat", -1, 0, 0, 0, 0, 0],
    *(["call", name, 0, 0] for name in ("removexattr", "lremovexattr")),
    ["call", "fremovexattr", -1, 0],
    ["call", "removexattrat", -1, 0, 0, 0],
    *(["call", name, 1, 0] for name in ("utime", "utimes")),
    ["call", "futimesat", -1, 1, 0],
    ["call", "utimensat", -1, 1, 0, 0],
    ["call", "utimensat", -1, ABOVE_4_GIB, 0, 0],
    ["call", "file_setattr", -1, 0, 0, 0, 0],
    *(["call", "ioctl", -1, request, 0] for request in (0x40086602, 0x40046602, 0x401C5820)),
]
BY_DESCRIPTOR: list[list[Any]] = [
    ["call", "fchmod", -1, 0],
    ["call", "fchown", -1, 0, 0],
    ["call", "utimensat", -1, 0, 0, 0],
]


def here(steps: list[list[Any]], machine: str = os.uname().machine) -> list[list[Any]]:
    """Those that the architecture has: arm64 has no chmod, for example."""
    return [step for step in steps if syscalls.number(step[1], machine) is not None]


@needs_seccomp
@root
def test_every_change_fails_otherwise_without_a_sandbox() -> None:
    steps = here(BY_PATH + BY_DESCRIPTOR)
    results = attempts(steps, None).results
    assert [step for step, result in zip(steps, results, strict=True) if result in (0, errno.EPERM)] == []


@needs_seccomp
@root
@pytest.mark.parametrize("profile", ["NETWORK", "LOOK", "MEMORY", "PARSER", "TRACKER", "COPIER", "STRIPE"])
def test_filter_denies_every_change_even_to_root(profile: str) -> None:
    denied(here(BY_PATH + BY_DESCRIPTOR), "filter only", rules=profile)


@needs_seccomp
@root
def test_files_child_changes_through_descriptors_alone() -> None:
    denied(here(BY_PATH), "filter only", rules="FILES")
    assert attempts(BY_DESCRIPTOR, "filter only", rules="FILES").results == [errno.EBADF] * len(BY_DESCRIPTOR)


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
@pytest.mark.parametrize("profile", ["NETWORK", "FILES", "LOOK", "MEMORY", "STRIPE"])
def test_filter_of_changes_is_right_on_both_architectures(machine: str, profile: str) -> None:
    rules = Profile[profile].value
    program = seccomp.compiled(rules.denied, rules.allowed, machine)

    def results(steps: list[list[Any]]) -> set[int]:
        return {simulated(program, machine, name, *arguments) for _, name, *arguments in here(steps, machine)}

    assert results(BY_PATH) == {errno.EPERM}
    assert results(BY_DESCRIPTOR) == ({0} if profile == "FILES" else {errno.EPERM})


def changes(path: Path) -> list[list[Any]]:
    some: list[list[Any]] = [["chmod", str(path), 0o4777], ["fchmod", str(path), 0o4777], ["chown", str(path), 1500]]
    return [*some, ["setxattr", str(path)], ["utime", str(path)]]


@root
@needs_seccomp
@needs_landlock
@pytest.mark.parametrize("profile", ["FILES", "LOOK", "STRIPE"])
def test_child_of_root_changes_no_attribute_elsewhere(place: Path, profile: str) -> None:
    given, victim = place / "given", place / "victim"
    given.mkdir()
    victim.touch(mode=0o600)
    before = victim.stat()
    keep = [] if profile == "STRIPE" else AS_ROOT
    write = [] if profile == "LOOK" else [str(given)]
    denied(changes(victim), profile, read=[str(place)] if profile == "STRIPE" else [], write=write, keep=keep)
    after = victim.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (before.st_mode, before.st_uid, before.st_mtime_ns)
    assert os.listxattr(victim) == []


@root
@needs_landlock
def test_files_child_of_root_opens_nothing_elsewhere_and_settles_its_own_files(place: Path) -> None:
    given, elsewhere = place / "given", place / "elsewhere"
    given.mkdir()
    elsewhere.touch()
    new = given / "new"
    steps: list[list[Any]] = [
        ["settle", str(new)],
        ["read", str(new)],
        ["read", str(elsewhere)],
        ["read", "/etc/hosts"],
    ]
    results = attempts(steps, "FILES", read=[], write=[str(given)], keep=AS_ROOT).results
    assert results == [0, 0, errno.EACCES, errno.EACCES]
    found = new.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_mtime_ns) == (0o640, 1500, 2_000_000_000)


@root
@needs_landlock
def test_looking_child_reads_everywhere_and_writes_nowhere(place: Path) -> None:
    file = place / "file"
    file.write_text("text")
    steps: list[list[Any]] = [["read", str(file)], ["read", "/etc/hosts"]]
    assert attempts(steps, "LOOK", keep=AS_ROOT).results == [0, 0]
    denied([["write", str(file)], ["overwrite", str(file)], ["write", str(place / "new")]], "LOOK", keep=AS_ROOT)
    assert file.read_text() == "text"
