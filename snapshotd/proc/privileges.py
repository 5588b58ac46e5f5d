"""/proc/PID/status: the credentials of a process or thread, which decide what it may do."""

from __future__ import annotations

import msgspec

from snapshotd.proc.files import parse_fields, process_path, read_text


class Credentials(msgspec.Struct, frozen=True):
    """What a process may do. Ids are in the order real, effective, saved, file system."""

    user_ids: tuple[int, int, int, int]
    group_ids: tuple[int, int, int, int]
    groups: tuple[int, ...]  # supplementary, sorted
    inheritable: int  # capabilities, as masks
    permitted: int
    effective: int
    ambient: int
    no_new_privs: bool
    seccomp: int  # 0: none, 1: strict, 2: filters

    @property
    def all_user_ids(self) -> frozenset[int]:
        return frozenset(self.user_ids)

    @property
    def all_group_ids(self) -> frozenset[int]:
        return frozenset((*self.group_ids, *self.groups))

    @property
    def capabilities(self) -> int:
        """Those that it has. Inheritable ones count only for programs that the administrator has given them to."""
        return self.permitted | self.effective | self.ambient


def parse(text: str) -> Credentials:
    fields = parse_fields(text)

    def ids(name: str) -> tuple[int, int, int, int]:
        real, effective, saved, file_system = map(int, fields[name].split())
        return real, effective, saved, file_system

    def mask(name: str) -> int:
        return int(fields.get(name, "0"), 16)

    return Credentials(
        user_ids=ids("Uid"),
        group_ids=ids("Gid"),
        groups=tuple(sorted(map(int, fields.get("Groups", "").split()))),
        inheritable=mask("CapInh"),
        permitted=mask("CapPrm"),
        effective=mask("CapEff"),
        ambient=mask("CapAmb"),
        no_new_privs=fields.get("NoNewPrivs", "0") == "1",
        seccomp=int(fields.get("Seccomp", "0")),
    )


def read(pid: int, thread: int | None = None) -> Credentials:
    """Raises FileNotFoundError or ProcessLookupError if it has ended."""
    return parse(read_text(process_path(pid, "status", thread)))
