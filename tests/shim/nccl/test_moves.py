"""Tests that a job stops at a cut, its communicators are rebuilt, and it continues with exact results."""

from __future__ import annotations

import contextlib
import errno
import time
from pathlib import Path

import pytest

from snapshotd.inprocess import ncclctl
from tests.shim.jobs import compile_c, until
from tests.shim.nccl.conftest import Job
from tests.shim.nccl.gates import ATTACH, CLOSE, DETACH, FRESH, NEW_ID, OPEN, PARK, RELEASE, REPORT, Gates, Refused


def rebuild(gates: Gates, *, fresh: int | None = None) -> None:
    """The gate commands of one move; `fresh` is the rank that was moved."""
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    for report in gates.reports():
        assert {comm["state"] for comm in report["comms"]} <= {"detached"}
    # The kernel may still list a thread that was joined.
    until(lambda: all(report["nccl_threads"] == 0 for report in gates.reports()), "NCCL's threads are gone")
    if fresh is not None:
        gates.gates[fresh].ask(FRESH)
    gates.attach(reports, comms)
    for report in gates.reports():
        assert {comm["state"] for comm in report["comms"]} <= {"live"}


@pytest.mark.parametrize(
    ("scenario", "nranks"),
    [
        ("jobs.grid", 2),
        ("jobs.grid", 4),
        ("jobs.grid", 8),
        ("jobs.two_threads", 3),
        ("jobs.patient", 3),
        ("jobs.watched", 2),
    ],
)
def test_communicators_are_rebuilt_repeatedly_during_steps(job: Job, scenario: str, nranks: int) -> None:
    job.start(scenario, nranks)
    job.reach(2)
    gates = job.gates()
    for move in range(5):
        rebuild(gates, fresh=move % nranks)
        launched = gates.launched()  # not the steps: a rank that has launched all of one may not be at the gate yet
        time.sleep(0.05)
        assert gates.launched() == launched
        gates.all(OPEN)
        job.reach(max(job.steps()) + 2)
    assert [report["instance"] for report in gates.reports()] == [len(range(rank, 5, nranks)) for rank in range(nranks)]
    job.stop()


def test_cut_falls_while_communicators_are_created_and_destroyed(job: Job) -> None:
    """A cut may fall where only some ranks have created or destroyed one: only those alive everywhere are rebuilt."""
    job.start("jobs.makes_and_ends", 4)
    job.reach(2)
    gates = job.gates()
    for _ in range(5):
        gates.to_the_cut()
        reports = gates.reports()
        gone = {comm["id"] for report in reports for comm in report["ended"]}
        pending = {comm["id"] for report in reports for comm in report["comms"] if comm["state"] == "pending"}
        gates.detach(gates.live(reports) | pending)
        gates.attach(reports, gates.live(reports) - gone)
        before = max(job.steps())
        gates.all(OPEN)
        job.reach(before + 2)
    job.stop()


def test_communicators_of_one_process_with_all_devices_are_rebuilt(job: Job) -> None:
    job.start("jobs.all_in_one", 1)
    job.reach(2)
    gates = job.gates()
    for _ in range(3):
        gates.to_the_cut()
        reports = gates.reports()
        comms = gates.live(reports)
        assert len(reports[0]["comms"]) == 3
        gates.detach(comms)
        with pytest.raises(Refused, match="attach it untried"):
            gates.attach(reports, comms)
        gates.attach(reports, comms, how="untried")
        before = job.step(0)
        gates.all(OPEN)
        job.reach(before + 2)
    job.stop()


def test_fresh_copies_load_beside_others_and_are_closed_later(job: Job) -> None:
    """A running thread may execute any copy, so none can be closed. Each move then needs a name that no loaded copy has."""
    job.start("jobs.busy", 2)
    job.reach(1)
    gates = job.gates()
    gate = gates.gates[1]
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)

    def copies() -> int:
        maps = Path(f"/proc/{gate.pid}/maps").read_text().splitlines()
        return len([line for line in maps if "memfd:libnccl" in line and " r-xp " in line])

    for _ in range(12):
        gate.ask(FRESH)
    assert copies() > 1, "the test has no effect if each could be closed at once"
    gate.ask(PARK)

    def alone() -> bool:
        gate.ask(FRESH)  # a thread of the command before may still run
        return copies() == 1

    until(alone, "earlier copies are closed")
    gates.attach(reports, comms)
    gates.all(OPEN)
    gate.ask(RELEASE)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_only_communicators_of_the_moved_rank_are_rebuilt(job: Job) -> None:
    """Communicators that do not contain the moved rank are left alone."""
    job.start("jobs.grid", 4)
    job.reach(2)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()
    moved = {comm["id"] for comm in reports[3]["comms"]}
    gates.detach(moved)
    for report in gates.reports():
        for comm in report["comms"]:
            assert comm["state"] == ("detached" if comm["id"] in moved else "live")
    gates.gates[3].ask(FRESH)
    gates.attach(reports, moved)
    gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_commands_are_idempotent(job: Job) -> None:
    job.start("jobs.grid", 2)
    job.reach(1)
    gates = job.gates()
    gates.all(CLOSE)
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    for _ in range(2):
        gates.detach(comms)
    gates.attach(reports, comms)
    gates.attach(reports, comms)
    for _ in range(2):
        gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_watchdog_gets_success_during_a_move(job: Job) -> None:
    job.start("jobs.watched", 2)
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()

    def asked() -> int:
        return int((job.meeting / "asked-0").read_text() or 0)

    for act in ("wait", "detach", "attach"):
        if act == "detach":
            gates.detach(gates.live(reports))
        elif act == "attach":
            gates.attach(reports, gates.live(reports))
        before = asked()
        while asked() < before + 5:
            assert job.processes[0].poll() is None, job.output()
            time.sleep(0.002)
    gates.all(OPEN)
    job.stop()


def test_a_peer_that_hangs_makes_attach_fail_in_time_and_the_next_attempt_succeeds(job: Job, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.touch()
    job.start("jobs.grid", 2, FAKE_NCCL_FAULT_FILE=str(faults))
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    lines = gates.attach_lines(reports, comms)
    with pytest.raises(Refused) as refused:
        gates.gates[0].ask(ATTACH, lines, timeout_s=1.0)  # rank 1 never attaches
    assert refused.value.status == errno.ETIMEDOUT
    gates.gates[0].until_idle()
    assert {comm["state"] for comm in gates.gates[0].report()["comms"]} == {"detached"}
    # Only the unique ids that no rank has used still have threads.
    until(lambda: gates.gates[0].report()["nccl_threads"] <= len(comms), "NCCL's other threads are gone")
    gates.attach(reports, comms)
    gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


@pytest.mark.parametrize("how", ["try", "untried"])
def test_attach_is_cancelled(job: Job, how: str) -> None:
    """Rank 2 never attaches, so the others would wait until the deadline. A cancellation that is late, or for another
    request, has no effect."""
    job.start("jobs.grid", 3)
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    lines = gates.attach_lines(reports, comms, how)
    waiting = [(gate, gate.send(ATTACH, lines, timeout_s=3600.0)) for gate in gates.gates[:2]]
    statuses = []
    for gate, number in waiting:
        gate.cancel(number)
        with pytest.raises(Refused) as refused:
            gate.finish(number)
        statuses.append(refused.value.status)
        gate.until_idle()
        assert {comm["state"] for comm in gate.report()["comms"]} == {"detached"}
        gate.cancel(number)  # answered already
    late = errno.ETIMEDOUT  # the call had not returned yet when the cancellation was answered
    assert statuses[0] in {errno.ECANCELED, late}
    assert statuses[1] in {errno.ECANCELED, late, errno.EIO}  # it may see the first rank's end before `cancel`
    gates.attach(reports, comms)
    assert {comm["state"] for report in gates.reports() for comm in report["comms"]} == {"live"}
    gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_communicators_are_initialised_at_once(job: Job) -> None:
    """One member has them in the opposite order: one after the other, each would wait for ever for the other member."""
    job.start("jobs.grid", 2)
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    assert len(comms) > 1
    gates.detach(comms)
    lines = gates.attach_lines(reports, comms, how="untried")
    gates.all(ATTACH, [lines, "\n".join(reversed(lines.split("\n")))])
    assert {comm["state"] for report in gates.reports() for comm in report["comms"]} == {"live"}
    gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_gate_does_not_open_in_front_of_a_detached_communicator(job: Job) -> None:
    job.start("jobs.grid", 2)
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    for gate in gates.gates:
        with pytest.raises(Refused, match="is not attached: the gate stays closed") as refused:
            gate.ask(OPEN)
        assert refused.value.status == errno.EBUSY
        assert gate.report()["gate"] == "closed"
        assert {comm["state"] for comm in gate.report()["comms"]} == {"detached"}
    gates.attach(reports, comms)
    gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_a_communicator_that_is_abandoned_is_an_error_to_the_job_not_a_hang(job: Job) -> None:
    job.start("jobs.grid", 2)
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    gates.detach(gates.live(gates.reports()))
    with contextlib.suppress(ProcessLookupError):  # the process may have ended before its answer was read
        gates.all(OPEN, "abandon")
    for process in job.processes:
        assert process.wait() != 0
    assert "was taken down for a move and could not be attached again" in job.output()


def test_communicator_that_a_member_destroys_while_it_is_down_can_be_left_out(job: Job, tmp_path: Path) -> None:
    """The member's report says so. The rest is attached, and the other member can still destroy its part."""
    job.start("jobs.ends_one_behind_the_gate", 2)
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    (tmp_path / "destroy").touch()
    until(lambda: gates.gates[0].report()["ended"], "the report names the communicator that was destroyed")
    (gone,) = [comm["id"] for comm in gates.gates[0].report()["ended"]]
    gates.attach(reports, comms - {gone})
    with pytest.raises(Refused, match="is not attached: the gate stays closed"):
        gates.gates[1].ask(OPEN)
    gates.all(OPEN, "abandon")
    assert {comm["id"]: comm["state"] for comm in gates.gates[1].report()["comms"]}[gone] == "lost"
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_detach_with_an_open_gate_is_refused_and_changes_nothing(job: Job) -> None:
    job.start("jobs.grid", 2)
    job.reach(1)
    gates = job.gates()
    with pytest.raises(Refused, match="the gate is open"):
        gates.gates[0].ask(DETACH, next(iter(gates.live(gates.reports()))))
    gates.gates[0].ask(CLOSE)
    with pytest.raises(Refused, match="not an id of a communicator"):
        gates.gates[0].ask(DETACH, "nonsense")
    gates.gates[0].ask(OPEN)
    job.stop()


def test_detach_gives_up_while_a_thread_is_inside_nccl(job: Job, tmp_path: Path) -> None:
    """Rank 0 is in an operation that hangs: DETACH gives up in time and changes nothing."""
    faults = tmp_path / "faults"
    faults.touch()
    job.start("jobs.plain", 2, FAKE_NCCL_FAULT_FILE=str(faults))  # one communicator: in others both are rank 0
    job.reach(1)
    gates = job.gates()
    faults.write_text("allreduce:0:*:hang")
    looks = 0
    while looks < 10:  # in a call that began before it is for a moment only
        looks = looks + 1 if gates.gates[0].report()["calling"] else 0
        time.sleep(0.01)
    gates.all(CLOSE)
    with pytest.raises(Refused, match="still inside ncclAllReduce; nothing was taken down"):
        gates.gates[0].ask(DETACH, "\n".join(gates.live(gates.reports())), timeout_s=0.5)
    faults.write_text("")
    gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_fresh_copy_is_loaded_from_a_file_that_may_be_executed(job: Job, tmp_path: Path) -> None:
    """With vm.memfd_noexec=1 a memory file that does not ask for it may not be."""
    source, library, noted = tmp_path / "note.c", tmp_path / "note.so", tmp_path / "noted"
    source.write_text(
        "#define _GNU_SOURCE\n#include <stdio.h>\n#include <stdlib.h>\n#include <sys/syscall.h>\n#include <unistd.h>\n"
        'int memfd_create(const char *name, unsigned int flags) { FILE *file = fopen(getenv("NOTED"), "a");\n'
        'fprintf(file, "%x\\n", flags); fclose(file); return (int)syscall(SYS_memfd_create, name, flags); }\n'
    )
    compile_c(source, library, "-shared", "-fPIC")
    job.start("jobs.plain", 1, LD_PRELOAD=f"{library} {job.built / 'libsnapshim.so'}", NOTED=str(noted))
    job.reach(1)
    gates = job.gates()
    rebuild(gates, fresh=0)
    gates.all(OPEN)
    job.stop()
    flags = [int(line, 16) for line in noted.read_text().split()]
    assert flags
    assert flags[0] & 0x10  # MFD_EXEC


def test_report_of_a_process_without_nccl_is_empty(tmp_path: Path, built: Path) -> None:
    job = Job(built, tmp_path)
    job.start("jobs.idle", 1)
    try:
        until(lambda: job.gates().reports()[0]["version"] == 22809, "it has loaded NCCL")
        (report,) = job.gates().reports()
        assert report["comms"] == report["held"] == report["calling"] == []
        assert job.gates().gates[0].ask(REPORT)
    finally:
        job.kill()


def test_threads_of_nccl_that_is_called_past_the_shim_are_reported(job: Job, tmp_path: Path) -> None:
    job.start("jobs.past_the_shim", 1)
    until(lambda: (tmp_path / "made").exists() or job.processes[0].poll() is not None)
    gate = job.gates().gates[0]
    # A thread that runs at the moment of a look is not counted.
    until(lambda: ncclctl.parse(gate.ask(REPORT)).strange_threads > 0, "NCCL's threads are seen")
    assert ncclctl.parse(gate.ask(REPORT)).comms == ()
    (tmp_path / "seen").touch()
    job.all_right()


def test_thread_of_the_program_with_an_old_address_of_nccl_is_not_reported(job: Job, tmp_path: Path) -> None:
    """A rank that never used NCCL must not be refused for the remains of a call on a stack."""
    source, library = tmp_path / "remains.c", tmp_path / "remains.so"
    source.write_text(
        "#include <unistd.h>\n"
        "long wait_with(void *address, int descriptor) { void *volatile kept[8]; char byte; long got;\n"
        "for (int i = 0; i < 8; i++) kept[i] = address;\n"
        "got = read(descriptor, &byte, 1); return kept[0] == address ? got : 0; }\n"
    )
    compile_c(source, library, "-shared", "-fPIC")
    job.start("jobs.remains", 1, REMAINS=str(library))
    until(lambda: (tmp_path / "made").exists() or job.processes[0].poll() is not None)
    gate = job.gates().gates[0]
    until(lambda: ncclctl.parse(gate.ask(REPORT)).unseen_threads == 0, "the thread waits")
    assert ncclctl.parse(gate.ask(REPORT)).strange_threads == 0
    (tmp_path / "seen").touch()
    job.all_right()


def test_rebuilt_while_every_thread_of_the_job_is_parked(job: Job) -> None:
    """As on the target before COMMIT: only the shim's threads run, and they rebuild all of the rank's communicators."""
    job.start("jobs.two_threads", 2)
    job.reach(1)
    gates = job.gates()
    for _ in range(3):
        gates.to_the_cut()
        reports = gates.reports()
        comms = gates.live(reports)
        gates.detach(comms)
        gates.gates[1].ask(PARK)
        gates.gates[1].ask(FRESH)
        gates.attach(reports, comms)
        standing = job.steps()
        gates.gates[0].ask(OPEN)
        gates.gates[1].ask(OPEN)
        time.sleep(0.05)
        assert job.step(1) == standing[1]
        gates.gates[1].ask(RELEASE)
        job.reach(max(standing) + 2)
    job.stop()


def test_destroy_that_hangs_is_reported_in_time_and_completes_later(job: Job, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.touch()
    job.start("jobs.plain", 2, FAKE_NCCL_FAULT_FILE=str(faults))
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()
    (comm,) = gates.live(reports)
    faults.write_text("destroy:0:1:hang")
    other = gates.gates[1].send(DETACH, comm)
    with pytest.raises(Refused, match="a call into NCCL did not return in time") as refused:
        gates.gates[0].ask(DETACH, comm, timeout_s=0.5)
    assert refused.value.status == errno.ETIMEDOUT
    with pytest.raises(Refused, match="an earlier command still waits for a call into NCCL"):
        gates.gates[0].ask(NEW_ID)
    assert gates.gates[0].report()["comms"][0]["state"] == "detaching"
    faults.write_text("")
    gates.gates[1].finish(other)
    gates.gates[0].until_idle()
    assert gates.gates[0].report()["comms"][0]["state"] == "detached"
    gates.attach(reports, [comm])
    gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_operations_fail_if_communicators_are_abandoned_while_a_destroy_hangs(job: Job, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.touch()
    job.start("jobs.plain", 2, FAKE_NCCL_FAULT_FILE=str(faults))
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    (comm,) = gates.live(gates.reports())
    faults.write_text("destroy:0:1:hang")
    with pytest.raises(Refused, match="a call into NCCL did not return in time"):
        gates.gates[0].ask(DETACH, comm, timeout_s=0.5)
    assert gates.gates[0].report()["comms"][0]["state"] == "detaching"
    with pytest.raises(Refused, match="is not attached: the gate stays closed"):
        gates.gates[0].ask(OPEN)
    gates.gates[0].send(OPEN, "abandon")  # the process may end before its answer can be read
    assert job.processes[0].wait(timeout=60) != 0
    assert "was taken down for a move and could not be attached again" in job.output()
