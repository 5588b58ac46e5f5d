"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it works, and should be changed
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    check: str
    state: State
    text: str
    remedy: str = ""

    def lines(self) -> str:
        """For a person. The remedy is on a line of its own."""
        first = f"{self.state:<8} {self.check:<15} {self.text}"
        return f"{first}\n{'':24} remedy: {self.remedy}" if self.remedy else first


def ok(check: str, text: str) -> Finding:
    return Finding(check, State.OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, State.WARNING, text, remedy)


def failed(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, State.FAILED, text, remedy)
