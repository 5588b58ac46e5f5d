"""The catalogue of Xids: xids.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from snapshotd.health.alarms import Severity

PATH = Path(__file__).with_name("xids.toml")


@dataclass(frozen=True)
class Xid:
    code: int
    meaning: str
    severity: Severity
    remedy: str


@functools.cache
def catalogue() -> dict[int, Xid]:
    content = tomllib.loads(PATH.read_text())
    actions = content["actions"]
    return {
        int(code): Xid(int(code), each["meaning"], Severity[each["severity"].upper()], actions[each["action"]])
        for code, each in content["xid"].items()
    }


def of(code: int) -> Xid:
    """Of any code."""
    unknown = Xid(
        code, "an error that is not in the catalogue", Severity.WARNING, "look it up in NVIDIA's list of Xids"
    )
    return catalogue().get(code, unknown)
