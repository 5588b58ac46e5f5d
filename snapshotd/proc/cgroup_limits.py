"""The limits that a rank's cgroups (v2) set: memory, swap, processes, CPU time, huge pages.

A rank that moves leaves the cgroups of its scheduler. Without these limits it could use all of the target. Limits above a
rank's own group count for all ranks of its job on one node; a rank that has moved away has them for itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from pathlib import Path

_NAME = re.compile(r"memory\.(max|high|swap\.max)|pids\.max|cpu\.max|hugetlb\.[0-9]+[KMG]B\.max")
_VALUE = re.compile(r"max|\d{1,20}")
#: Some controllers show a number like this one instead of `max`.
_UNLIMITED = 1 << 62
_CPU = re.compile(r"(max|\d{1,20}) ([1-9]\d{0,19})")


def read(group: Path, root: Path) -> dict[str, str]:
    """The tightest limit of each kind, from `group` up to `root`, where cgroup2 is mounted: file name -> value.

    Groups without a limit are left out, and so are those that are removed meanwhile."""
    found: dict[str, str] = {}
    for folder in (group, *group.parents):
        if folder == root or not folder.is_relative_to(root):
            break
        for path in folder.iterdir() if folder.is_dir() else ():
            if _NAME.fullmatch(path.name):
                try:
                    value = path.read_text().strip()
                except FileNotFoundError:
                    continue
                if _size(path.name, value) is not None:
                    found[path.name] = min(value, found.get(path.name, value), key=lambda one: _order(path.name, one))
    return found


def controllers(limits: Iterable[str]) -> set[str]:
    """The controllers that these limits need."""
    return {name.partition(".")[0] for name in limits}


def unenforceable(limits: Mapping[str, str], available: Collection[str]) -> list[str]:
    """Those of the limits that a group with these controllers cannot set, and those that are malformed."""
    wrong = (name for name, value in limits.items() if not _NAME.fullmatch(name) or _size(name, value) is None)
    return sorted({*wrong, *(name for name in limits if name.partition(".")[0] not in available)})


def available(parent: Path) -> set[str]:
    """The controllers that groups in `parent`, which may not exist yet, can have."""
    if _is_root(parent.parent):
        file = parent.parent / "cgroup.controllers"
    else:
        file = parent / "cgroup.controllers" if parent.is_dir() else parent.parent / "cgroup.subtree_control"
    return set(file.read_text().split())


def apply(group: Path, limits: Mapping[str, str]) -> None:
    """Sets the limits of a group. Raises OSError; FileNotFoundError if a controller is missing. Blocking."""
    parent = group.parent
    for folder in (parent.parent, parent) if _is_root(parent.parent) else (parent,):
        missing = controllers(limits) - set((folder / "cgroup.subtree_control").read_text().split())
        if missing:
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))
    for name, value in limits.items():
        (group / name).write_text(value)


def _is_root(folder: Path) -> bool:
    """Only the root group has no type: its controllers may be enabled for groups below without asking anyone."""
    return (folder / "cgroup.controllers").exists() and not (folder / "cgroup.type").exists()


def _size(name: str, value: str) -> Fraction | None:
    """The limit as a number; None if there is none."""
    if name == "cpu.max":
        found = _CPU.fullmatch(value)
        return Fraction(int(found[1]), int(found[2])) if found and found[1] != "max" else None
    return Fraction(int(value)) if _VALUE.fullmatch(value) and value != "max" and int(value) < _UNLIMITED else None


def _order(name: str, value: str) -> Fraction:
    size = _size(name, value)
    assert size is not None
    return size
