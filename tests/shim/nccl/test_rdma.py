"""RDMA devices that NCCL keeps open are closed when its communicators are down. NCCL and libibverbs are fakes."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.descriptors import open_links
from tests.fakes import verbs_fake
from tests.shim.jobs import compile_c, until
from tests.shim.nccl.conftest import Job
from tests.shim.nccl.gates import CLOSE_DEVICES, FRESH, OPEN, Gates, Refused

pytestmark = pytest.mark.root

DEVICES = 2


def start(job: Job, scenario: str, nranks: int, **environment: str) -> Gates:
    """A job on RDMA that has made a step."""
    given = {
        "LD_LIBRARY_PATH": str(verbs_fake.build()),
        "FAKE_NCCL_NET": "IB",
        "FAKE_VERBS_ADDR": "127.0.0.1",
        **environment,
    }
    job.start(scenario, nranks, before=verbs_fake.with_devices(DEVICES), **given)
    job.reach(1)
    return job.gates()


def held(pid: int) -> list[str]:
    """What a process has of RDMA: descriptors and mappings of devices."""
    found = list(open_links(pid).values())
    found += [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return sorted(name for name in found if name.startswith(verbs_fake.FOLDER))


ALL = sorted(f"{verbs_fake.FOLDER}/uverbs{number}" for number in range(DEVICES) for _ in range(2))  # open and mapped


def down(gates: Gates) -> tuple[list[dict[str, Any]], set[str]]:
    """Stops the job at a cut and takes all communicators down."""
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    return reports, comms


def go_on(job: Job, gates: Gates) -> None:
    before = max(job.steps())
    gates.all(OPEN)
    job.reach(before + 2)


def test_devices_outlive_the_communicators_and_are_closed_on_request(job: Job) -> None:
    gates = start(job, "jobs.grid", 3)
    moved = gates.gates[1]
    for move in range(3):
        reports, comms = down(gates)
        assert [held(gate.pid) for gate in gates.gates] == [ALL, ALL, ALL]
        # A thread that runs at the moment of a look is not counted.
        until(lambda: moved.report()["nccl_threads"] >= DEVICES, "the threads that wait for events are seen")
        moved.ask(CLOSE_DEVICES)
        assert [held(gate.pid) for gate in gates.gates] == [ALL, [], ALL]
        assert (moved.report()["rdma"], moved.report()["nccl_threads"]) == ([], 0)
        moved.ask(CLOSE_DEVICES)  # idempotent
        moved.ask(FRESH)
        gates.attach(reports, comms)
        assert [report["instance"] for report in gates.reports()] == [0, move + 1, 0]
        go_on(job, gates)
        assert held(moved.pid) == ALL
    job.stop()


def test_attaching_where_the_devices_were_closed_loads_a_fresh_copy(job: Job) -> None:
    """As in an undo: the rank stays where it is."""
    gates = start(job, "jobs.grid", 2)
    reports, comms = down(gates)
    gates.gates[0].ask(CLOSE_DEVICES)  # makes the ids
    gates.gates[1].ask(CLOSE_DEVICES)
    gates.attach(reports, comms)
    assert [report["instance"] for report in gates.reports()] == [1, 1]
    go_on(job, gates)
    job.stop()


def test_a_gate_that_abandons_its_communicators_leaves_no_closed_devices_behind(job: Job) -> None:
    """The job would otherwise make its next communicator with devices that are closed."""
    gates = start(job, "jobs.makes_and_ends", 2)
    down(gates)
    gates.all(CLOSE_DEVICES)
    gates.all(OPEN, "abandon")
    assert [report["instance"] for report in gates.reports()] == [1, 1]


def test_commands_that_overlap_load_one_fresh_copy(job: Job, tmp_path: Path) -> None:
    """A command whose time is up still loads its copy when the next one comes."""
    source = tmp_path / "slow.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <sys/syscall.h>\n#include <unistd.h>\n"
        "int memfd_create(const char *name, unsigned int flags);\n"
        "int memfd_create(const char *name, unsigned int flags) { usleep(300000);\n"
        "return (int)syscall(SYS_memfd_create, name, flags); }\n"
    )
    slow = compile_c(source, tmp_path / "slow.so", "-shared", "-fPIC")
    gates = start(job, "jobs.grid", 2, LD_PRELOAD=f"{slow} {job.built / 'libsnapshim.so'}")
    reports, comms = down(gates)
    gate = gates.gates[0]
    gate.ask(CLOSE_DEVICES)
    for _ in range(2):
        with pytest.raises(Refused):
            gate.ask(OPEN, timeout_s=0.05)
    with pytest.raises(Refused, match="is not attached: the gate stays closed"):
        gate.ask(OPEN, timeout_s=60.0)
    maps = Path(f"/proc/{gate.pid}/maps").read_text().splitlines()
    assert len([line for line in maps if "memfd:libnccl" in line and " r-xp " in line]) == 1
    gates.attach(reports, comms)
    assert gate.report()["instance"] == 1
    go_on(job, gates)
    job.stop()


def test_devices_in_use_are_not_closed(job: Job) -> None:
    gates = start(job, "jobs.grid", 2)
    with pytest.raises(Refused, match="the gate is open"):
        gates.gates[0].ask(CLOSE_DEVICES)
    gates.to_the_cut()
    with pytest.raises(Refused, match=r"communicator \w+ is not detached"):
        gates.gates[0].ask(CLOSE_DEVICES)
    go_on(job, gates)
    assert held(gates.gates[0].pid) == ALL
    job.stop()


def test_device_of_another_library_is_refused_by_its_name(job: Job) -> None:
    gates = start(job, "jobs.beside_another_library", 2, FOREIGN=str(verbs_fake.build() / "libforeign.so"))
    owners = {(one["owner"].rpartition("/")[2], one["nccl"]) for one in gates.gates[0].report()["rdma"]}
    assert owners == {("libforeign.so", False), ("libnccl.so.2", True)}
    reports, comms = down(gates)
    before = held(gates.gates[0].pid)
    with pytest.raises(Refused, match=r"uverbs0 is open and belongs to libforeign\.so; nothing was closed") as refused:
        gates.gates[0].ask(CLOSE_DEVICES)
    assert refused.value.status == errno.EPERM
    assert held(gates.gates[0].pid) == before
    gates.attach(reports, comms)
    assert gates.gates[0].report()["instance"] == 0  # its devices are as they were
    go_on(job, gates)
    job.stop()


def test_event_thread_that_does_not_end_is_named_in_time(job: Job, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.write_text("ibevent:*:1:hang")
    gates = start(job, "jobs.grid", 2, FAKE_NCCL_FAULT_FILE=str(faults))
    reports, comms = down(gates)
    with pytest.raises(
        Refused,
        match=r"NCCL's thread \d+, which waits for events of the RDMA device fakeib\d|did not return in time",
    ) as refused:
        gates.gates[0].ask(CLOSE_DEVICES, timeout_s=0.5)
    assert refused.value.status == errno.ETIMEDOUT
    gates.gates[0].until_idle()  # on a busy machine it may answer before its worker does, with the second text
    faults.write_text("")
    gates.attach(reports, comms)  # the undo
    assert gates.gates[0].report()["instance"] == 1
    go_on(job, gates)
    # The next attempt closes what the first one left, too.
    down(gates)
    gates.gates[0].ask(CLOSE_DEVICES)
    assert held(gates.gates[0].pid) == []


def test_forked_child_has_none_of_the_devices(job: Job) -> None:
    gates = start(job, "jobs.with_forked_child", 2)
    children = [int((job.meeting / f"child-{rank}").read_text()) for rank in range(2)]
    assert [held(pid) for pid in children] == [[], []]
    assert held(gates.gates[0].pid) == ALL
    job.stop()


def test_rank_that_moves_alone_leaves_other_communicators_up(job: Job) -> None:
    gates = start(job, "jobs.grid", 4)
    gates.to_the_cut()
    reports = gates.reports()
    moved = {comm["id"] for comm in reports[3]["comms"]}
    gates.detach(moved)
    gates.gates[3].ask(CLOSE_DEVICES)
    with pytest.raises(Refused, match="is not detached"):
        gates.gates[0].ask(CLOSE_DEVICES)
    gates.gates[3].ask(FRESH)
    gates.attach(reports, moved)
    go_on(job, gates)
    job.stop()


def test_job_without_rdma_is_not_changed(job: Job) -> None:
    job.start("jobs.grid", 2)
    job.reach(1)
    gates = job.gates()
    reports, comms = down(gates)
    gates.all(CLOSE_DEVICES)
    gates.attach(reports, comms)
    assert [(report["instance"], report["rdma"]) for report in gates.reports()] == [(0, []), (0, [])]
    go_on(job, gates)
    job.stop()


NEXT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
pid_t getppid(void) { return -1; }
int finds_another(const char *version);
int finds_another(const char *version) { return dlvsym(RTLD_NEXT, "getppid", version) != (void *)getppid; }
"""
PROGRAM = """
int finds_another(const char *version);
int main(int count, char **words) { return count != 2 || !finds_another(words[1]); }
"""
#: The first version of glibc on this architecture, under which all its old symbols are.
GLIBC = "GLIBC_2.2.5" if platform.machine() == "x86_64" else "GLIBC_2.17"


def test_dlvsym_still_searches_after_its_caller(built: Path, tmp_path: Path) -> None:
    """A library that looks up what comes after itself must not find itself, because the shim is in between."""
    versions = f"{GLIBC} {{ global: getppid; }};"  # dlvsym finds only symbols of that version
    for name, text in (("next.c", NEXT), ("program.c", PROGRAM), ("next.map", versions)):
        (tmp_path / name).write_text(text)
    flags = ("-shared", "-fPIC", f"-Wl,--version-script={tmp_path / 'next.map'}")
    library = compile_c(tmp_path / "next.c", tmp_path / "libnext.so", *flags)
    program = compile_c(tmp_path / "program.c", tmp_path / "program", str(library), f"-Wl,-rpath,{tmp_path}")
    environment = {**os.environ, "LD_PRELOAD": str(built / "libsnapshim.so")}
    assert subprocess.run([program, GLIBC], env=environment, check=False).returncode == 0
