"""/proc/cpuinfo: what the CPUs of this node can do."""

from __future__ import annotations

import re

from snapshotd.proc.files import read_text

_FEATURES = re.compile(r"^(?:flags|Features)\s*:\s*(.*)$", re.MULTILINE)  # on x86, on arm


def parse_features(text: str) -> tuple[str, ...]:
    """The features that every CPU has, sorted."""
    found = [frozenset(line.split()) for line in _FEATURES.findall(text)]
    return tuple(sorted(frozenset.intersection(*found))) if found else ()


def features() -> tuple[str, ...]:
    return parse_features(read_text("/proc/cpuinfo"))
