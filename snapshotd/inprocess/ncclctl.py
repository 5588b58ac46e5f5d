"""Controls the NCCL part of libsnapshim.so: closes and opens a process's gate, reads its report, takes communicators down.

Requests and answers are text in the process's own memory, through the mailbox (snapshotd/inprocess/shimctl.py);
shim/README.md has their formats. Every command has a deadline, which the shim enforces, because NCCL has none.
Commands are idempotent.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from snapshotd.api.errors import Damaged, GpuFailed, NcclFailed, RankGone, SnapshotError, Timeout, Where
from snapshotd.inprocess import nccl_lines, shimctl
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.mailbox import LIBRARY, Answer
from snapshotd.proc import maps, tree
from snapshotd.proc.comm import thread_names

log = logging.getLogger(__name__)

#: Commands to the gate take milliseconds. A process that is stopped never answers.
GATE_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20
_LIBRARY = re.compile(rb"/libnccl[^/\n]*$", re.MULTILINE)

#: Why a communicator in this state can never be moved.
_BROKEN = {
    "detached": "an earlier move has taken it down and not built it again",
    "lost": "it could not be built again after an earlier move",
}
#: Transient states of a communicator. At a cut, where no thread is inside NCCL, none is in such a state.
_PASSING = {
    "pending": "it is being made",
    "detaching": "it is being taken down",
    "attaching": "it is being built again",
    "ending": "the application is destroying it",
}


@dataclass(frozen=True)
class ChannelCount:
    """Operations of one channel: a communicator's collectives, or sends to or receives from one of its members."""

    comm: str
    kind: str  # "c", "s" or "r"
    peer: int  # the member's rank in the communicator, -1 for collectives
    count: int


@dataclass(frozen=True)
class Communicator:
    """One membership of a process in a communicator. The id is the same for all members."""

    id: str
    nranks: int
    rank: int
    state: str
    refusals: tuple[str, ...] = ()
    held: bool = False  # its creation waits at the gate: NCCL has nothing of it yet
    collectives: int = 0
    sent: Mapping[int, int] = field(default_factory=dict)  # by the member's rank in the communicator
    received: Mapping[int, int] = field(default_factory=dict)
    users: tuple[int, ...] = ()  # threads that have used it

    @property
    def real(self) -> bool:
        """Whether NCCL has, or may have, something to take down."""
        return self.state not in {"detached", "lost"} and not self.held

    @property
    def unfinished(self) -> str:
        """The operation in progress on it, as text; "" if there is none."""
        return "" if self.held else _PASSING.get(self.state, "")


#: States of a communicator that the job cannot use, and that is to be built again.
DOWN = frozenset({"detached", "detaching", "attaching"})


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device that a process has open through libibverbs."""

    device: str
    owner: str  # the path of the library that opened it
    nccl: bool  # an NCCL that the shim knows opened it, and the shim can close it
    descriptors: tuple[int, ...]  # of the device and of its events


@dataclass(frozen=True)
class Report:
    """The state of a process's gate and communicators. `text` is the shim's JSON, unparsed."""

    text: str
    gate_closed: bool
    instance: int  # number of the library copy; each fresh copy has a higher one
    comms: tuple[Communicator, ...]
    threads: int  # that NCCL itself has, where no communicator is up; else -1
    ended: tuple[Communicator, ...] = ()  # destroyed or aborted; what was launched on them still counts
    waiting: Mapping[int, tuple[ChannelCount, ...]] = field(default_factory=dict)  # by thread: the group at the gate
    calling: tuple[int, ...] = ()  # threads inside an NCCL call
    passed: int | None = (
        None  # groups that have passed the closed gate; None: the library is older and knows no permissions
    )
    unseen_threads: int = 0  # ran when `threads` were counted, so that they are NCCL's or the job's
    ids_unused: int = 0  # unique ids that were made and not used: NCCL has a thread for each
    rdma: tuple[RdmaDevice, ...] | None = None  # None: the library is older and does not know
    version: int = 0  # of NCCL, as 22809 for 2.28.9; 0: not loaded

    @property
    def concerned(self) -> bool:
        """Whether it has communicators, a closed gate, or RDMA devices that NCCL keeps after its last communicator."""
        return bool(self.comms) or self.gate_closed or any(device.nccl for device in self.rdma or ())

    @property
    def strange_threads(self) -> int:
        """Threads of NCCL, by their stacks, in a process for which the shim never had a communicator: the program calls NCCL
        past the shim, as with functions that it looked up in libnccl itself."""
        return 0 if self.comms or self.ended else max(0, self.threads - self.ids_unused)

    def refusals(self) -> list[str]:
        """ "COMM: why", for every communicator that cannot be taken down."""
        return [f"{comm.id}: {why}" for comm in self.comms for why in comm.refusals]


def uses_nccl(pids: Iterable[int]) -> list[int]:
    """The processes that have libnccl loaded; no other can have communicators. Takes about a millisecond each."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if _LIBRARY.search(maps.read_raw(pid)):
                found.append(pid)
    return found


def reports(pids: Iterable[int]) -> list[tuple[tree.Process, Report]]:
    """The processes that have something to take down, or a closed gate, with their reports. One without a control thread has
    nothing.

    One that has destroyed its last communicator behind the gate counts: its next one waits there until the gate opens.
    """
    return [(process, report) for process, report in all_reports(pids) if report.concerned]


def all_reports(pids: Iterable[int]) -> list[tuple[tree.Process, Report]]:
    """The processes that have NCCL and the shim's control thread, with their reports."""
    found = []
    for pid in uses_nccl(pids):
        with contextlib.suppress(RankGone, ProcessLookupError):
            process = tree.Process.of(pid)
            mailbox = shimctl.find(process)
            if mailbox is None or not mailbox.serves():
                continue
            if tree.stopped(pid) and _has_threads(pid):
                raise Timeout(
                    f"process {pid} is stopped by a signal and cannot say which communicators it has",
                    remedy=f"continue it (kill -CONT {pid})",
                    where=Where.SOURCE_RUNNING,
                )
            if tree.stopped(pid):
                continue
            found.append((process, read(process)))
    return found


def _has_threads(pid: int) -> bool:
    """Whether a process that cannot answer has threads of NCCL."""
    return any("nccl" in name.lower() for name in thread_names(pid).values())


def read(process: tree.Process) -> Report:
    return parse(_ask(process, Command.NCCL_REPORT, GATE_S, "tell where it is"))


def parse(text: str) -> Report:
    """Raises Damaged if the text is not a report: it comes from the job's memory, which can contain anything."""
    try:
        report = json.loads(text)
        waiting = {int(each["thread"]): tuple(map(_channel, each["group"])) for each in report.get("held", ())}
        held = {channel.comm for group in waiting.values() for channel in group}
        return Report(
            text=text,
            gate_closed=report["gate"] == "closed",
            instance=int(report["instance"]),
            comms=tuple(_communicator(comm, held) for comm in report["comms"]),
            threads=int(report["nccl_threads"]),
            ended=tuple(_counts(comm) for comm in report.get("ended", ())),
            waiting=waiting,
            calling=tuple(int(each["thread"]) for each in report.get("calling", ())),
            passed=int(report["passed"]) if "passed" in report else None,
            unseen_threads=int(report.get("unseen_threads", 0)),
            ids_unused=int(report.get("ids_unused", 0)),
            rdma=tuple(map(_device, report["rdma"])) if "rdma" in report else None,
            version=int(report.get("version", 0)),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"a process's NCCL report makes no sense ({error!r}): {text[:80]!r}") from error


def _communicator(report: dict[str, Any], held: Collection[str]) -> Communicator:
    found = _counts(report)
    why = [str(reason) for reason in report["refused"]] if isinstance(report["refused"], list) else []
    if found.state in _BROKEN:
        why.append(_BROKEN[found.state])
    elif found.state == "live" and report.get("in_progress"):
        why.append("one of its calls is still in progress (a non-blocking communicator)")
    return replace(found, refusals=tuple(why), held=found.state == "pending" and found.id in held)


def _device(report: dict[str, Any]) -> RdmaDevice:
    return RdmaDevice(
        device=str(report["device"]),
        owner=str(report["owner"]),
        nccl=bool(report["nccl"]),
        descriptors=tuple(int(number) for number in report["descriptors"]),
    )


def _counts(report: dict[str, Any]) -> Communicator:
    """The fields that a communicator and an ended one have in common."""
    if not nccl_lines.COMM.fullmatch(str(report["id"])):
        raise ValueError(f"not the id of a communicator: {report['id']!r}")
    return Communicator(
        id=str(report["id"]),
        nranks=int(report["nranks"]),
        rank=int(report["rank"]),
        state=str(report["state"]),
        collectives=int(report.get("collectives", 0)),
        sent={int(peer): int(count) for peer, count in report.get("sent", {}).items()},
        received={int(peer): int(count) for peer, count in report.get("received", {}).items()},
        users=tuple(int(thread) for thread in report.get("users", ())),
    )


def _channel(row: Sequence[Any]) -> ChannelCount:
    comm, kind, peer, count = row
    if kind not in {"c", "s", "r"}:
        raise ValueError(f"no kind of a channel: {kind!r}")
    return ChannelCount(nccl_lines.check_comm(str(comm)), str(kind), int(peer), int(count))


def close(process: tree.Process) -> None:
    """Closes the gate: nothing is launched after this that is not counted in the next report."""
    _ask(process, Command.NCCL_CLOSE, GATE_S, "close its gate")


def set_targets(process: tree.Process, lines: Sequence[str]) -> None:
    """Sets how far each channel may continue behind the closed gate: "COMM c|s|r PEER COUNT". See nccl_lines.py."""
    _ask(process, Command.NCCL_TARGETS, GATE_S, "take its targets", lines)


def open_gate(process: tree.Process, *, abandon: bool = False) -> None:
    """Opens the gate: the job continues. Raises NcclFailed while a communicator is not attached. Abandon: it never will be,
    because a member has ended; the job gets errors from it. A library of an older version opens in any case.

    A process that has ended, or replaced its program, has no closed gate any more.
    """
    try:
        _ask(process, Command.NCCL_OPEN, GATE_S, "open its gate", ["abandon"] if abandon else ())
    except RankGone:
        log.info("process %d has ended behind its gate", process.pid)
    except (GpuFailed, NcclFailed):
        if _has_gate(process):
            raise
        log.info("process %d has replaced its program behind its gate", process.pid)


def _has_gate(process: tree.Process) -> bool:
    """Whether the process still has the control thread that closed its gate. An exec removes it."""
    try:
        mailbox = shimctl.find(process)
        return mailbox is not None and mailbox.serves()
    except RankGone:
        return False


def has_replaced_its_program(process: tree.Process) -> bool:
    """Whether a process whose gate was closed has none any more: exec removes it, and the communicators with it. False also
    if the process does not say."""
    try:
        return not _has_gate(process) or not read(process).gate_closed
    except SnapshotError:
        return False


def detach(process: tree.Process, comms: Sequence[str], timeout_s: float) -> None:
    """Drains these communicators and takes them down. Skips those that the process does not have or that are down."""
    _ask(process, Command.NCCL_DETACH, timeout_s, "take its communicators down", comms)


def close_devices(process: tree.Process, timeout_s: float) -> None:
    """Closes the RDMA devices and the RAS that NCCL keeps open; its communicators are down. Devices of another library are
    refused by its name.

    What is built in this process after that is built by a fresh copy of NCCL. A library that is older does not track devices:
    if any is open, the check after the freeze refuses it.
    """
    if read(process).rdma is not None:
        _ask(process, Command.NCCL_CLOSE_DEVICES, timeout_s, "close what NCCL keeps open")


def new_id(process: tree.Process, timeout_s: float) -> str:
    """Makes a unique id, in hex. The process must run until all members have connected to it."""
    found = _ask(process, Command.NCCL_NEW_ID, timeout_s, "make an id")
    if not nccl_lines.UNIQUE_ID.fullmatch(found):
        raise Damaged(f"process {process.pid} answers with something that is not an id: {found[:80]!r}")
    return found


def devices(process: tree.Process, timeout_s: float) -> dict[int, str]:
    """The bus ids that CUDA in the process gives to the devices of its communicators. Empty: it does not say, or its library
    is of an older version."""
    try:
        found = _ask(process, Command.NCCL_DEVICES, timeout_s, "say which devices it uses")
    except NcclFailed as error:
        log.info("%s", error.message)
        return {}
    lines = [line.split() for line in found.splitlines()]
    if not all(len(line) == 2 and line[0].isdecimal() and len(line[1]) < 32 for line in lines):
        raise Damaged(f"process {process.pid} answers with something that is not a list of devices: {found[:80]!r}")
    return {int(device): bus_id.lower() for device, bus_id in lines}


def load_fresh(process: tree.Process, timeout_s: float) -> None:
    """Loads a fresh copy of the library, which has not seen another host. No communicator may be up."""
    _ask(process, Command.NCCL_FRESH, timeout_s, "load a fresh copy of NCCL")


def attach(
    process: tree.Process, lines: Sequence[str], timeout_s: float, given_up: threading.Event | None = None
) -> None:
    """Builds communicators again, in the order of `lines` (nccl_lines.py). If it fails none of them is up.

    It waits for the other members. Set `given_up` to end the wait when one of them has failed.
    """
    _ask(process, Command.NCCL_ATTACH, timeout_s, "build its communicators again", lines, given_up)


def _ask(
    process: tree.Process,
    command: Command,
    timeout_s: float,
    what: str,
    lines: Sequence[str] = (),
    given_up: threading.Event | None = None,
) -> str:
    mailbox = shimctl.find(process)
    if mailbox is None:
        raise NcclFailed(
            f"{LIBRARY} is not in process {process.pid}",
            remedy="start the job with `migrator run`",
            where=Where.SOURCE_RUNNING,
        )
    request = "\n".join(lines).encode()
    with mailbox.turn():
        if request:
            room = mailbox.ask(Command.NCCL_ROOM, GATE_S, len(request))
            if room.status:
                raise _failure(process, "make room for a request", room)
            mailbox.write(room.first, request)
        answer = mailbox.ask(command, timeout_s, len(request), given_up=given_up)
        if answer.status:
            raise _failure(process, what, answer)
        if answer.second > _ANSWER_BYTES_MAX:
            raise Damaged(f"process {process.pid} claims an answer of {answer.second >> 20} MiB")
        return mailbox.read(answer.first, answer.second).decode(errors="replace") if answer.second else ""


def _failure(process: tree.Process, what: str, answer: Answer) -> SnapshotError:
    message = f"process {process.pid} cannot {what}: {answer.text}"
    if answer.status == errno.ETIMEDOUT:
        return Timeout(message, remedy="the job goes on as it was; try again when it is less busy", where=Where.UNKNOWN)
    if answer.status == errno.ECANCELED:
        return gave_up(f"process {process.pid}")
    return NcclFailed(message, where=Where.UNKNOWN)


def gave_up(who: str) -> Timeout:
    """The error of a member that only waited for the others."""
    return Timeout(
        f"{who} has given up building communicators: another member cannot",
        remedy="the failure of that member says why; a plain retry is safe",
        where=Where.UNKNOWN,
    )
