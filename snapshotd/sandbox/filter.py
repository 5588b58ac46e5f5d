"""A seccomp filter as a list of rules, compiled to the kernel's BPF, and its installation.

What a rule denies fails with EPERM. Calls of another ABI (32 bits, x32) are denied altogether, because their numbers mean
something else. clone3 fails with ENOSYS: its flags are in memory, where a filter cannot see them, and the C library then
uses clone.

Arguments are compared by their lower 32 bits: all flags and numbers that are examined here fit. Of a pointer, both halves are
compared with 0.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from snapshotd.sandbox import syscalls

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SET_MODE_FILTER, _FLAG_SPEC_ALLOW = 1, 4

Instruction = tuple[int, int, int, int]

_libc = ctypes.CDLL(None, use_errno=True)


class Rule(NamedTuple):
    """When a system call is denied. Without a condition: always. A condition concerns one argument, counted from 0."""

    name: str
    argument: int = 0
    #: Denied if the argument has one of these bits.
    any_bit: int = 0
    #: Denied unless the argument has one of these bits.
    without_bit: int = 0
    #: Denied if the argument is one of these values.
    one_of: tuple[int, ...] = ()
    #: Denied unless the argument is one of these values.
    none_of: tuple[int, ...] = ()
    #: Denied unless the argument is a null pointer.
    not_null: bool = False
    error: int = errno.EPERM


def always(names: str) -> tuple[Rule, ...]:
    return tuple(Rule(name) for name in names.split())


def compiled(denied: Iterable[Rule], allowed: Sequence[str] | None, machine: str) -> bytes:
    """The program. `allowed`: everything else is denied too; None: everything that is not denied is allowed."""
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, syscalls.ARCHITECTURES[machine]),
        _fail(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [(_JUMP_AT_LEAST, 0, 1, syscalls.X32_BIT), _fail(errno.EPERM)]
    for rule in denied:
        if (number := syscalls.number(rule.name, machine)) is not None:
            body = _body(rule)
            program += [(_JUMP_EQUAL, 0, len(body), number), *body]
    if allowed is None:
        program.append((_RETURN, 0, 0, _ALLOW))
    else:
        for name in allowed:
            if (number := syscalls.number(name, machine)) is not None:
                program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
        program.append(_fail(errno.EPERM))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _body(rule: Rule) -> list[Instruction]:
    """What follows when the number is that of the rule. It ends with the number loaded again, for the next rules."""
    fail = _fail(rule.error)
    load = (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * rule.argument)
    again = (_LOAD, 0, 0, _NUMBER_AT)
    if rule.any_bit:
        return [load, (_JUMP_ANY_BIT, 0, 1, rule.any_bit), fail, again]
    if rule.without_bit:
        return [load, (_JUMP_ANY_BIT, 1, 0, rule.without_bit), fail, again]
    if rule.one_of:
        tests = [part for value in rule.one_of for part in ((_JUMP_EQUAL, 0, 1, value), fail)]
        return [load, *tests, again]
    if rule.none_of:
        count = len(rule.none_of)
        return [load, *((_JUMP_EQUAL, count - at, 0, value) for at, value in enumerate(rule.none_of)), fail, again]
    if rule.not_null:
        upper = (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * rule.argument + 4)
        return [load, (_JUMP_EQUAL, 0, 2, 0), upper, (_JUMP_EQUAL, 1, 0, 0), fail, again]
    return [fail]


def _fail(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


class _Program(ctypes.Structure):
    """struct sock_fprog, linux/filter.h"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(program: bytes) -> bool:
    """Whether this kernel has seccomp. Applies to this thread and what it starts, for ever. no_new_privs must be set."""
    machine = os.uname().machine
    described = _Program(len(program) // 8, program)
    # Without SPEC_ALLOW, kernels before 5.16 slow the process down against attacks on speculative execution, which
    # concern interpreters of a stranger's code.
    result = _libc.syscall(
        _SYS_SECCOMP[machine], _SET_MODE_FILTER, ctypes.c_ulong(_FLAG_SPEC_ALLOW), ctypes.byref(described)
    )
    if result == 0:
        return True
    if ctypes.get_errno() == errno.ENOSYS:
        result = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(described), None, None)
        if result and ctypes.get_errno() == errno.EINVAL:
            return False
    if result:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
    return True


def available() -> bool:
    return os.path.exists("/proc/sys/kernel/seccomp/actions_avail") and os.uname().machine in syscalls.ARCHITECTURES
