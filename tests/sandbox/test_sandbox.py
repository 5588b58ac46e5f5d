"""Sandboxes: real children enter one, then try what it denies and what their work needs."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox import landlock, privileges, syscalls
from snapshotd.sandbox.enter import enter, missing
from snapshotd.sandbox.privileges import CAP_CHECKPOINT_RESTORE, CAP_CHOWN, CAP_SYS_PTRACE, Ids
from snapshotd.sandbox.profiles import Profile
from tests.sandbox.children import USER, attempts, denied, needs_landlock, needs_seccomp, root, simulated

FILTERED = ["NETWORK", "FILES", "LOOK", "MEMORY", "PARSER", "TRACKER", "COPIER", "STRIPE"]

#: Every one of these fails where nothing denies it, with another error than EPERM.
NEVER: list[list[Any]] = [
    ["call", "execve", 0, 0, 0],
    ["call", "execveat", -1, 0, 0, 0, 0],
    ["call", "ptrace", 16, 0x7FFFFFFF, 0, 0],
    ["call", "process_vm_readv", 0x7FFFFFFF, 0, 0, 0, 0, 0],
    ["call", "process_vm_writev", 0x7FFFFFFF, 0, 0, 0, 0, 0],
    ["call", "pidfd_getfd", -1, 0, 0],
    ["call", "mount", 0, 0, 0, 0, 0],
    ["call", "umount2", 0, 0],
    ["call", "pivot_root", 0, 0],
    ["call", "chroot", 0],
    ["call", "move_mount", -1, 0, -1, 0, 0],
    ["call", "open_tree", -1, 0, 0],
    ["call", "fsopen", 0, 0],
    ["call", "fsmount", -1, 0, 0],
    ["call", "setns", -1, 0],
    ["call", "unshare", 1],
    ["call", "bpf", 0, 0, 0],
    ["call", "perf_event_open", 0, 0, 0, 0, 0],
    ["call", "userfaultfd", 0x7FFF],
    ["call", "keyctl", 9999, 0, 0, 0, 0],
    ["call", "add_key", 0, 0, 0, 0, 0],
    ["call", "io_uring_setup", 0, 0],
    ["call", "kexec_load", 0, 99, 0, 0x7FFF],
    ["call", "init_module", 0, 0, 0],
    ["call", "delete_module", 0, 0],
    ["call", "open_by_handle_at", -1, 0, 0],
    ["call", "reboot", 0, 0, 0, 0],
    ["call", "swapon", 0, 0],
    ["call", "personality", 0xFFFFFFFF],
    ["call", "acct", 1],
    ["call", "sethostname", 0, -1],
    ["call", "syslog", 99, 0, 0],
    ["call", "kill", 0x7FFFFFFF, 0],
    ["call", "clone", 0x10000000 | 0x200, 0, 0, 0, 0],  # CLONE_NEWUSER with CLONE_FS, which is invalid
    ["call", "clone", 0x20000 | 0x200, 0, 0, 0, 0],
    ["call", "ioctl", -1, 0x5412, 0],
]
NETWORK: list[list[Any]] = [
    ["call", "socket", -1, 0, 0],
    ["call", "socketpair", -1, 0, 0, 0],
    ["call", "connect", -1, 0, 0],
    ["call", "bind", -1, 0, 0],
    ["call", "listen", -1, 0],
    ["call", "accept4", -1, 0, 0, 0],
]


@pytest.fixture
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one.getsockname()[1]


# ---------------------------------------------------------------- the filter


@needs_seccomp
@root
def test_every_denied_call_fails_otherwise_without_a_sandbox() -> None:
    """Otherwise the next test would show nothing."""
    steps = NEVER + NETWORK
    results = attempts(steps, None).results
    assert [step for step, result in zip(steps, results, strict=True) if result == errno.EPERM] == []


@needs_seccomp
@root
@pytest.mark.parametrize("profile", FILTERED)
def test_filter_denies_what_no_child_needs_even_to_root(profile: str) -> None:
    denied(NEVER, "filter only", rules=profile)


@needs_seccomp
@pytest.mark.parametrize("profile", ["FILES", "LOOK", "MEMORY", "PARSER", "TRACKER", "COPIER", "STRIPE"])
def test_filter_denies_the_network(profile: str) -> None:
    denied(NETWORK, "filter only", rules=profile)


@needs_seccomp
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 exists on x86-64 only")
@pytest.mark.parametrize("profile", FILTERED)
def test_filter_denies_numbers_of_the_x32_abi(profile: str) -> None:
    """Through them every call of a deny list could be made under another number."""
    assert attempts([["raw", 0x40000000 | 520]], "filter only", rules=profile).results == [errno.EPERM]


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_filter_is_right_on_both_architectures(machine: str) -> None:
    rules = Profile.MEMORY.value
    program = seccomp.compiled(rules.denied, rules.allowed, machine)
    assert simulated(program, machine, "execve") == errno.EPERM
    assert simulated(program, machine, "read") == 0
    assert simulated(program, machine, "clone3") == errno.ENOSYS
    assert simulated(program, machine, "openat", 0, 0, os.O_RDWR) == 0
    assert simulated(program, machine, "openat", 0, 0, os.O_WRONLY) == errno.EPERM
    assert simulated(program, machine, "openat", 0, 0, os.O_RDWR | os.O_CREAT) == errno.EPERM
    assert simulated(program, machine, "mmap", 0, 0, 3, 2) == 0
    assert simulated(program, machine, "mmap", 0, 0, 3, 1) == errno.EPERM
    rules = Profile.NETWORK.value
    program = seccomp.compiled(rules.denied, rules.allowed, machine)
    assert simulated(program, machine, "clone", 0x3D0F00) == 0  # pthread_create
    assert simulated(program, machine, "clone", 17) == errno.EPERM  # fork
    assert simulated(program, machine, "clone", 0x3D0F00 | 0x40000000) == errno.EPERM
    assert [simulated(program, machine, "socket", family) for family in (1, 2, 10, 16)] == [0] * 4
    assert [simulated(program, machine, "socket", family) for family in (17, 38, 40)] == [errno.EPERM] * 3
    rules = Profile.PARSER.value
    program = seccomp.compiled(rules.denied, rules.allowed, machine)
    allowed = {name for name in syscalls.names() if syscalls.number(name, machine) is not None}
    allowed = {name for name in allowed if simulated(program, machine, name) == 0}
    assert allowed == {name for name in rules.allowed or () if syscalls.number(name, machine) is not None}


def test_filter_denies_calls_of_another_architecture() -> None:
    program = seccomp.compiled((), None, "x86_64")
    words = {**syscalls.ARCHITECTURES}
    assert simulated(program, "x86_64", "read") == 0
    foreign = program.replace(words["x86_64"].to_bytes(4, "little"), words["aarch64"].to_bytes(4, "little"))
    assert simulated(foreign, "x86_64", "read") == errno.EPERM


@pytest.mark.parametrize(
    ("machine", "header", "define"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+) (\d+)$"),
        ("aarch64", "/usr/include/asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+) (\d+)$"),
    ],
)
def test_numbers_are_those_of_the_kernel_s_headers(machine: str, header: str, define: str) -> None:
    if not Path(header).exists():
        assert machine != platform.machine(), f"{header} is not installed"
        pytest.skip(f"{header} is installed on {machine.replace('_', '-')} only")
    theirs = {name: int(number) for name, number in re.findall(define, Path(header).read_text(), re.MULTILINE)}
    ours = {name: syscalls.number(name, machine) for name in syscalls.names()}
    assert {name: number for name, number in ours.items() if number != theirs.get(name, number)} == {}
    assert len(theirs.keys() & ours.keys()) > 100


# ---------------------------------------------------------------- privileges


@root
@pytest.mark.parametrize("profile", ["NETWORK", "FILES", "LOOK", "MEMORY", "STRIPE"])
def test_child_has_its_user_and_the_profile_s_capabilities_alone(profile: str) -> None:
    fields = attempts([["setuid", 0]], profile, ids=USER).fields
    kept = Profile[profile].value.capabilities
    mask = f"{sum(1 << number for number in kept):016x}"
    users = ["65534"] * 3 + ["1500"] if Profile[profile].value.only_files else ["1500"] * 4
    assert (fields["Uid"], fields["Gid"], fields["Groups"]) == (users, ["1500"] * 4, ["1502"])
    assert [fields[kind] for kind in ("CapPrm", "CapEff", "CapBnd")] == [[mask]] * 3
    assert [fields[kind] for kind in ("CapInh", "CapAmb")] == [["0" * 16]] * 2
    assert fields["NoNewPrivs"] == ["1"]
    assert fields["Seccomp"] == ["2" if seccomp.available() else "0"]


@root
def test_capabilities_can_be_kept_and_root_without_others_is_bound_by_permissions(place: Path) -> None:
    secret = place / "secret"
    secret.touch(mode=0o600)
    os.chown(secret, 1500, 1500)
    tried = attempts([["read", str(secret)], ["setuid", 1500]], "FILES", keep=[CAP_CHOWN])
    assert tried.results == [errno.EACCES, errno.EPERM]
    assert tried.fields["CapEff"] == [f"{1 << CAP_CHOWN:016x}"]


@root
def test_child_still_dies_with_the_daemon() -> None:
    """The kernel forgets the signal when a process changes its user."""
    assert attempts([], "MEMORY", ids=USER, **{"dies with": 9}).results == [9]


@pytest.mark.parametrize(("inherited", "expected"), [("-900", "0"), ("300", "300")])
def test_oom_score_of_the_daemon_is_given_up(tmp_path: Path, inherited: str, expected: str) -> None:
    """In a file: root needs CAP_SYS_RESOURCE for a negative score, which it lacks in many containers."""
    score = tmp_path / "oom_score_adj"
    score.write_text(inherited)
    privileges.give_up_oom_protection(score)
    assert score.read_text() == expected


@root
def test_child_gives_up_the_oom_score_of_the_daemon() -> None:
    code = """
from snapshotd.sandbox import privileges
from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.profiles import Profile
privileges.give_up_oom_protection = lambda: print("given up")
enter(Profile.FILES, privileges.Ids(1500, 1500))
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "given up\n"


@root
def test_user_of_a_child_cannot_return_to_root() -> None:
    assert attempts([["setuid", 0]], "FILES", ids=USER).results == [errno.EPERM]


def test_sandbox_is_refused_beside_threads() -> None:
    """The kernel keeps capabilities and filters for each thread: another thread would keep them all."""
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        with pytest.raises(RuntimeError, match="before threads"):
            enter(Profile.FILES)
    finally:
        stop.set()
        other.join()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0


def test_missing_parts_are_named() -> None:
    assert len(missing()) == (not seccomp.available()) + (not landlock.version())


# ---------------------------------------------------------------- the profiles at work


@root
@needs_seccomp
def test_network_child_reaches_others_but_neither_executes_nor_writes(server: int) -> None:
    steps: list[list[Any]] = [
        ["connect", socket.AF_INET, ["127.0.0.1", server]],
        ["socket", socket.AF_INET6],
        ["thread"],
        ["read", "/etc/hosts"],
        ["read", "/usr/lib/os-release"],
    ]
    assert attempts(steps, "NETWORK", ids=USER).results == [0] * len(steps)
    steps = [["exec"], ["fork"], ["socket", 17], ["socket", 38], ["kill", os.getpid()]]
    denied(steps, "NETWORK", ids=USER)


@root
@needs_landlock
def test_network_child_opens_nothing_outside_its_paths(place: Path) -> None:
    theirs = place / "theirs"
    theirs.write_text("x")
    theirs.chmod(0o666)
    given = place / "given"
    given.mkdir()
    (given / "file").write_text("x")
    denied([["read", str(theirs)], ["write", str(theirs)], ["write", str(place / "new")]], "NETWORK", ids=USER)
    assert attempts([["read", str(given / "file")]], "NETWORK", ids=USER, read=[str(given)]).results == [0]


@root
@needs_landlock
def test_files_child_writes_below_its_paths_only(place: Path) -> None:
    carried, elsewhere = place / "carried", place / "elsewhere"
    for folder in (carried, elsewhere):
        folder.mkdir()
        os.chown(folder, 1500, 1500)
    steps: list[list[Any]] = [
        ["write", str(carried / "new")],
        ["read", str(carried / "new")],
        ["write", str(elsewhere / "new")],
    ]
    tried = attempts(steps, "FILES", ids=USER, write=[str(carried)])
    assert tried.results == [0, 0, errno.EACCES]
    assert attempts(steps, None, write=[str(carried)]).results == [0, 0, 0]
    steps = [["exec"], ["fork"], ["socket", socket.AF_UNIX]]
    denied(steps, "FILES", ids=USER)


@root
@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6])
def test_older_kernels_restrict_what_they_know(place: Path, version: int) -> None:
    if landlock.version() < version:
        pytest.skip(f"this kernel has no version {version} of Landlock")
    (place / "given").mkdir()
    steps = [["write", str(place / "given" / "new")], ["write", str(place / "new")]]
    assert attempts(steps, "FILES", write=[str(place / "given")], landlock=version).results == [0, errno.EACCES]


@root
@needs_seccomp
def test_memory_child_reads_a_user_s_process_and_changes_no_file(place: Path) -> None:
    file = place / "file"
    file.write_text("text")
    file.chmod(0o666)
    sleeper = subprocess.Popen(["sleep", "600"], user=1500, group=1500, extra_groups=[])
    try:
        steps: list[list[Any]] = [
            ["memory", sleeper.pid, os.O_RDONLY],
            ["memory", sleeper.pid, os.O_RDWR],
            ["read", str(file)],
        ]
        assert attempts(steps, "MEMORY", ids=USER).results == [0, 0, 0]
    finally:
        sleeper.kill()
        sleeper.wait()
    steps = [["write", str(file)], ["write", str(place / "new")], ["exec"], ["fork"], ["socket", 1]]
    denied(steps, "MEMORY", ids=USER)
    assert attempts([["overwrite", str(file)]], "MEMORY", ids=USER).results == [errno.EFBIG]
    assert file.read_text() == "text"
    assert {CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE} == set(Profile.MEMORY.value.capabilities)


@root
@needs_seccomp
def test_parser_uses_only_descriptors_that_it_has(place: Path) -> None:
    given = place / "given"
    given.write_text("x")
    with given.open("rb") as file:
        steps: list[list[Any]] = [["stat"], ["call", "lseek", 0, 0, 2], ["call", "pread64", 0, 0, 0, 0]]
        assert attempts(steps, "PARSER", stdin=file.fileno(), ids=[65534, 65534]).results == [0, 0, 0]
    steps = [["read", "/etc/hosts"], ["write", "/tmp/x"], ["exec"], ["fork"], ["socket", socket.AF_UNIX], ["kill", 1]]
    denied([*steps, ["setuid", 65534]], "PARSER", ids=[65534, 65534])


def test_child_of_the_cuda_driver_keeps_its_privileges_but_gains_none() -> None:
    before = attempts([], None).fields
    after = attempts([], "CUDA").fields
    assert (after["NoNewPrivs"], before["NoNewPrivs"]) == (["1"], ["0"])
    assert [after[kind] for kind in ("CapPrm", "CapBnd", "Seccomp")] == [
        before[kind] for kind in ("CapPrm", "CapBnd", "Seccomp")
    ]


def test_ids_have_no_default_user() -> None:
    with pytest.raises(TypeError):
        Ids()  # type: ignore[call-arg]
