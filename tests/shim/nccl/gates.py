"""Controls the gates of a job's ranks as the daemons do: through their mailboxes, with the cut that the driver computes.

Every method blocks. A command that fails raises `Refused`, with the shim's error text.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from migrator.quiesce.cut import Channel, Cut, Decision, Report, next_targets
from snapshotd.inprocess import abi, shimctl
from snapshotd.proc import tree
from tests.shim.jobs import until

PARK, RELEASE = abi.Command.PARK, abi.Command.RELEASE
ROOM, CLOSE, TARGETS = abi.Command.NCCL_ROOM, abi.Command.NCCL_CLOSE, abi.Command.NCCL_TARGETS
REPORT, OPEN, DETACH = abi.Command.NCCL_REPORT, abi.Command.NCCL_OPEN, abi.Command.NCCL_DETACH
NEW_ID, FRESH, ATTACH = abi.Command.NCCL_NEW_ID, abi.Command.NCCL_FRESH, abi.Command.NCCL_ATTACH
CLOSE_DEVICES = abi.Command.NCCL_CLOSE_DEVICES
DEVICES = abi.Command.NCCL_DEVICES


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{errno.errorcode.get(status, status)}: {text}")
        self.status = status
        self.text = text


class Gate:
    """The NCCL part of one process's shim."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        while (found := shimctl.find(tree.Process.of(pid))) is None or self._owner(found.address) == 0:
            time.sleep(0.005)
        self.address = found.address

    def _owner(self, address: int) -> int:
        with self._memory() as memory:
            (owner,) = struct.unpack("<i", os.pread(memory, 4, address + abi.Offset.OWNER))
        return int(owner)

    @contextmanager
    def _memory(self) -> Iterator[int]:
        memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR)
        try:
            yield memory
        finally:
            os.close(memory)

    def begin(self, command: int, timeout_s: float, length: int) -> int:
        with self._memory() as memory:
            (number,) = struct.unpack("<I", os.pread(memory, 4, self.address + abi.Offset.REQUEST))
            number = number % 0xFFFFFFFE + 1
            arguments = struct.pack("<I4Q", command, round(timeout_s * 1000), length, 0, 0)
            os.pwrite(memory, arguments, self.address + abi.Offset.COMMAND)
            os.pwrite(memory, struct.pack("<I", number), self.address + abi.Offset.REQUEST)
            (thread,) = struct.unpack("<i", os.pread(memory, 4, self.address + abi.Offset.THREAD))
        tree.Process.of(self.pid).signal_thread(thread, abi.SIGNAL)
        return int(number)

    def finish(self, number: int) -> tuple[list[int], bytes]:
        while True:
            with self._memory() as memory:
                box = abi.unpack(os.pread(memory, abi.MAILBOX_BYTES, self.address))
                if box.answer == number:
                    if box.status:
                        raise Refused(box.status, box.text.partition(b"\0")[0].decode())
                    result = list(box.result)
                    return result, os.pread(memory, result[1], result[0]) if result[1] else b""
            time.sleep(0.0005)

    def cancel(self, number: int) -> None:
        with self._memory() as memory:
            os.pwrite(memory, struct.pack("<I", number), self.address + abi.Offset.CANCEL)

    def send(self, command: int, text: str = "", timeout_s: float = 20.0) -> int:
        """Starts a command and returns its number for `finish`."""
        data = text.encode()
        if data:
            (address, *_), _ = self.finish(self.begin(ROOM, timeout_s, len(data)))
            with self._memory() as memory:
                os.pwrite(memory, data, address)
        return self.begin(command, timeout_s, len(data))

    def ask(self, command: int, text: str = "", timeout_s: float = 20.0) -> str:
        return self.finish(self.send(command, text, timeout_s))[1].decode()

    def until_idle(self) -> None:
        """Waits for a command that was given up: until it has ended, others that call NCCL are refused."""

        def idle() -> bool:
            try:
                self.ask(DEVICES)
            except Refused as refused:
                if refused.status != errno.EBUSY:
                    raise
                return False
            return True

        until(idle, "the earlier command has ended")

    def report(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self.ask(REPORT))
        return reply

    def processor_ns(self) -> dict[int, str]:
        """The CPU time of each thread."""
        used = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                used[int(task.name)] = (task / "schedstat").read_text().split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
        return used


class Gates:
    """All ranks of a job, in the order of their ranks."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.gates = [Gate(pid) for pid in pids]
        self._ran: list[dict[int, str]] = [{} for _ in self.gates]

    def all(self, command: int, text: str | Sequence[str] = "", timeout_s: float = 20.0) -> list[str]:
        """Sends the same command to all ranks concurrently and returns their answers."""
        texts = [text] * len(self.gates) if isinstance(text, str) else text
        numbers = [gate.send(command, part, timeout_s) for gate, part in zip(self.gates, texts, strict=True)]
        return [gate.finish(number)[1].decode() for gate, number in zip(self.gates, numbers, strict=True)]

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(reply) for reply in self.all(REPORT)]

    def launched(self) -> list[dict[Channel, int]]:
        """The number of operations that each rank has launched."""
        return [dict(report.launched) for report in self._as_reports(self.reports()).values()]

    def to_the_cut(self, patience_s: float = 60.0) -> Cut:
        """Closes all gates and lets the ranks run until all are at one cut."""
        self.all(CLOSE)
        cut: Cut | None = None
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            reports = self.reports()
            cut = next_targets(self._as_reports(reports), cut)
            if cut.decision is Decision.REACHED and not any(report["calling"] for report in reports):
                return cut
            assert cut.decision is not Decision.NEVER, cut.reason
            self.all(TARGETS, self._targets(cut, reports))
            time.sleep(0.002)
        raise AssertionError(f"no cut: {cut.reason if cut else 'no round'}")

    @staticmethod
    def job_ranks(reports: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], int]:
        """Which rank of the job has which rank of a communicator."""
        return {
            (comm["id"], comm["rank"]): rank
            for rank, report in enumerate(reports)
            for comm in (*report["comms"], *report["ended"])
            if comm["rank"] >= 0
        }

    def _as_reports(self, reports: Sequence[Mapping[str, Any]]) -> dict[int, Report]:
        job_ranks = self.job_ranks(reports)
        return {rank: self._as_report(rank, report, job_ranks) for rank, report in enumerate(reports)}

    def _as_report(self, rank: int, report: Mapping[str, Any], job_ranks: Mapping[tuple[str, int], int]) -> Report:
        def channel(comm: str, kind: str, peer: int) -> Channel:
            if kind == "c":
                return Channel(comm)
            other = job_ranks[comm, peer]
            return Channel(comm, (rank, other) if kind == "s" else (other, rank))

        launched: dict[Channel, int] = {}
        for comm in (*report["comms"], *report["ended"]):
            launched[Channel(comm["id"])] = comm["collectives"]
            for kind, counts in (("s", comm["sent"]), ("r", comm["received"])):
                launched |= {channel(comm["id"], kind, int(peer)): count for peer, count in counts.items()}
        held: dict[int, dict[Channel, int]] = {}
        for thread in report["held"]:
            group = held.setdefault(thread["thread"], {})
            for comm, kind, peer, count in thread["group"]:
                at = channel(comm, kind, peer)
                group[at] = group.get(at, 0) + count
        users = {comm["id"]: frozenset(comm["users"]) for comm in report["comms"]}
        ran, self._ran[rank] = self._ran[rank], self.gates[rank].processor_ns()
        moved = {thread for thread, spent in self._ran[rank].items() if ran.get(thread) != spent}
        members = {
            comm["id"]: tuple(job_ranks.get((comm["id"], comm_rank)) for comm_rank in range(comm["nranks"]))
            for comm in (*report["comms"], *report["ended"])
            if comm["nranks"] > 0
        }
        running = frozenset().union(*users.values()) & moved - held.keys() if users else frozenset[int]()
        return Report(launched, held, members, users, running, passed=report["passed"])

    def _targets(self, cut: Cut, reports: Sequence[Mapping[str, Any]]) -> list[str]:
        comm_rank_of = {(comm, rank): comm_rank for (comm, comm_rank), rank in self.job_ranks(reports).items()}

        def lines(rank: int, channel: Channel, count: int) -> Iterator[str]:
            comm, pair = channel
            if pair is None:
                yield f"{comm} c -1 {count}"
                return
            for end, other, kind in ((pair[0], pair[1], "s"), (pair[1], pair[0], "r")):
                if end == rank:
                    yield f"{comm} {kind} {comm_rank_of[comm, other]} {count}"

        texts = []
        for rank in range(len(self.gates)):
            told = [line for channel, count in cut.targets.items() for line in lines(rank, channel, count)]
            for thread, channel, count, passed in cut.permissions.get(rank, ()):
                told += [f"permit {thread or 0} {passed} {line}" for line in lines(rank, channel, count)]
            texts.append("\n".join(told))
        return texts

    # -- detaching and attaching

    def detach(self, comms: Iterable[str], timeout_s: float = 20.0) -> None:
        self.all(DETACH, "\n".join(sorted(comms)), timeout_s)

    def attach(self, reports: Sequence[Mapping[str, Any]], comms: Iterable[str], *, how: str = "try") -> None:
        """Attaches on all ranks concurrently, in the same order."""
        self.all(ATTACH, self.attach_lines(reports, comms, how))

    def attach_lines(self, reports: Sequence[Mapping[str, Any]], comms: Iterable[str], how: str = "try") -> str:
        """The request of ATTACH: a new unique id from the first member of each communicator."""
        job_ranks = self.job_ranks(reports)
        return "\n".join(f"{comm} {self.gates[job_ranks[comm, 0]].ask(NEW_ID)} {how}" for comm in sorted(comms))

    def live(self, reports: Sequence[Mapping[str, Any]]) -> set[str]:
        """All communicators that exist, without those whose creation waits at the gate."""
        return {comm["id"] for report in reports for comm in report["comms"] if comm["state"] != "pending"}
