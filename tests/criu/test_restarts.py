"""Calls that a stop interrupted are restarted, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from pycriu import images

from snapshotd.criu import restarts

EINTR = (1 << 64) - 4
IP = 0x7F00_0000_1002


def thread(call: int, result: int) -> Any:
    core = images.pb.core_entry()
    core.mtype = 1
    registers = core.thread_info.gpregs
    registers.ax, registers.orig_ax, registers.ip = result, call & (1 << 64) - 1, IP
    return core


@pytest.mark.parametrize("call", sorted(restarts.CALLS))
def test_interrupted_call_is_made_again(call: int) -> None:
    core = thread(call, EINTR)
    core.thread_info.gpregs.di = 5
    assert restarts.restart_call(core)
    registers = core.thread_info.gpregs
    assert (registers.ax, registers.ip, registers.di) == (call, IP - 2, 5)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (35, 0),  # it has ended
        (7, (1 << 64) - 11),
        (3, EINTR),  # close
        (-1, EINTR),  # in no call: the handler of a signal has run
        (15, EINTR),  # rt_sigreturn
    ],
)
def test_other_threads_stay_as_they_are(call: int, result: int) -> None:
    core = thread(call, result)
    before = core.SerializePartialToString()
    assert not restarts.restart_call(core)
    assert core.SerializePartialToString() == before


def test_processes_of_32_bits_and_other_architectures_stay_as_they_are() -> None:
    core = thread(7, EINTR)
    core.thread_info.gpregs.mode = 2
    assert not restarts.restart_call(core)
    core = thread(7, EINTR)
    core.mtype = images.pb.core_entry.DESCRIPTOR.fields_by_name["mtype"].enum_type.values_by_name["AARCH64"].number
    assert not restarts.restart_call(core)


@pytest.mark.parametrize("ip", [0, 1])
def test_thread_before_which_there_is_no_instruction_stays_as_it_is(ip: int) -> None:
    """No rank can be there, but an image from another node can say so."""
    core = thread(7, EINTR)
    core.thread_info.gpregs.ip = ip
    assert not restarts.restart_call(core)
