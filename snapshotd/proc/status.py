"""/proc/PID/status: the users and groups, namespace pid, tracer and signal masks of a process or thread."""

from __future__ import annotations

from dataclasses import dataclass

from snapshotd.proc.files import parse_fields, process_path, read_text


@dataclass(frozen=True, slots=True)
class Status:
    user_ids: tuple[int, ...]  # real, effective, saved, of file accesses
    group_ids: tuple[int, ...]  # the same four
    groups: tuple[int, ...]  # supplementary, sorted
    inner_pid: int  # its number in its innermost pid namespace
    tracer_pid: int  # 0 if it is not traced
    blocked_mask: int
    caught_mask: int

    @property
    def user_id(self) -> int:
        """The real one."""
        return self.user_ids[0]

    def blocks(self, signal: int) -> bool:
        return bool(self.blocked_mask >> (signal - 1) & 1)

    def catches(self, signal: int) -> bool:
        return bool(self.caught_mask >> (signal - 1) & 1)


def parse(text: str) -> Status:
    fields = parse_fields(text)
    return Status(
        user_ids=_numbers(fields["Uid"]),
        group_ids=_numbers(fields["Gid"]),
        groups=tuple(sorted(_numbers(fields.get("Groups", "")))),
        inner_pid=int(fields.get("NSpid", fields["Pid"]).split()[-1]),
        tracer_pid=int(fields.get("TracerPid", "0")),
        blocked_mask=int(fields.get("SigBlk", "0"), 16),
        caught_mask=int(fields.get("SigCgt", "0"), 16),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split())


def read(pid: int, thread: int | None = None) -> Status:
    """The status of a process or one of its threads. Raises FileNotFoundError or ProcessLookupError if it has ended."""
    return parse(read_text(process_path(pid, "status", thread)))
