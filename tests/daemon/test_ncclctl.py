"""Which processes are asked about NCCL, and what counts as an open gate, with doubles for mailboxes."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed, NcclFailed, RankGone
from snapshotd.inprocess import ncclctl, shimctl
from snapshotd.proc.tree import Process

ME = Process.of(os.getpid())


@pytest.mark.parametrize(("gate", "counts"), [("closed", True), ("open", False)])
def test_process_without_communicators_counts_behind_a_closed_gate(
    monkeypatch: pytest.MonkeyPatch, gate: str, counts: bool
) -> None:
    """It has destroyed its last one there. The next one that it makes waits, so the gate must be opened."""
    report = {"gate": gate, "instance": 1, "comms": [], "nccl_threads": 0}
    monkeypatch.setattr(ncclctl, "uses_nccl", list)
    monkeypatch.setattr(shimctl, "find", lambda process: SimpleNamespace(serves=lambda: True))
    monkeypatch.setattr(ncclctl, "read", lambda process: ncclctl.parse(json.dumps(report)))
    assert [process for process, _ in ncclctl.reports([ME.pid])] == ([ME] if counts else [])


def speak(monkeypatch: pytest.MonkeyPatch, mailbox: Any, error: Exception) -> None:
    def ask(*_: object) -> str:
        raise error

    monkeypatch.setattr(ncclctl, "_ask", ask)
    monkeypatch.setattr(shimctl, "find", lambda process: mailbox)


@pytest.mark.parametrize(
    ("mailbox", "error"),
    [
        (None, NcclFailed("libsnapshim.so is not in it")),
        (SimpleNamespace(serves=lambda: False), GpuFailed("no control thread")),
        (None, RankGone("it has ended")),
    ],
)
def test_replaced_program_has_no_closed_gate(monkeypatch: pytest.MonkeyPatch, mailbox: Any, error: Exception) -> None:
    speak(monkeypatch, mailbox, error)
    ncclctl.open_gate(ME)


def test_gate_that_does_not_open_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    speak(monkeypatch, SimpleNamespace(serves=lambda: True), NcclFailed("it says no"))
    with pytest.raises(NcclFailed):
        ncclctl.open_gate(ME)
