"""Calls that block, one after the other in threads of their own. Each must end as it does in a process that is never stopped:
no call is interrupted, and none returns before its time."""

import ctypes
import os
import platform
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from steps import say, steps, wrong

libc = ctypes.CDLL(None, use_errno=True)
WAIT_S = 2
problems: list[str] = []


class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]


def must_return(name: str, expected: int, returned: int) -> None:
    if returned != expected:
        problems.append(f"{name} returned {returned}: {os.strerror(ctypes.get_errno())}")


def sleep() -> None:
    must_return("sleep", 0, libc.sleep(WAIT_S))


def usleep() -> None:
    must_return("usleep", 0, libc.usleep(WAIT_S * 1_000_000))


def nanosleep() -> None:
    asked, left = Timespec(WAIT_S, 1), Timespec(77, 0)
    must_return("nanosleep", 0, libc.nanosleep(ctypes.byref(asked), ctypes.byref(left)))


def poll() -> None:
    must_return("poll", 0, libc.poll(None, 0, WAIT_S * 1000))


def epoll() -> None:
    events = select.epoll()
    space = ctypes.create_string_buffer(64)
    must_return("epoll_wait", 0, libc.epoll_wait(events.fileno(), space, 1, WAIT_S * 1000))
    events.close()


def semaphore() -> None:
    space = ctypes.create_string_buffer(64)
    libc.sem_init(space, 0, 0)
    now = time.time()
    until = Timespec(int(now) + WAIT_S, 0)
    must_return("sem_timedwait", -1, libc.sem_timedwait(space, ctypes.byref(until)))
    if ctypes.get_errno() != 110:  # ETIMEDOUT
        problems.append(f"sem_timedwait: {os.strerror(ctypes.get_errno())}")


def receive() -> None:
    mine, other = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", WAIT_S, 0))
    space = ctypes.create_string_buffer(8)
    must_return("recv", -1, libc.recv(mine.fileno(), space, 8, 0))
    if ctypes.get_errno() != 11:  # EAGAIN
        problems.append(f"recv: {os.strerror(ctypes.get_errno())}")
    mine.close()
    other.close()


def again_and_again(call: Callable[[], None], at_least_s: float) -> None:
    while True:
        began = time.monotonic()
        call()
        if time.monotonic() - began < at_least_s:
            problems.append(f"{call.__name__} took {time.monotonic() - began:.3f} s")


calls = [sleep, usleep, nanosleep, poll, semaphore]
if platform.machine() == "x86_64":  # elsewhere the kernel ends these two when the process is stopped
    calls += [epoll, receive]
for call in calls:
    at_least_s = 0.0 if call is semaphore else WAIT_S - 0.1
    threading.Thread(target=again_and_again, args=(call, at_least_s), daemon=True).start()
for step in steps():
    if problems:
        wrong("; ".join(problems))
    say(step)
