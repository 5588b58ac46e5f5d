"""Uses an interval timer, a timerfd and the monotonic clock: ticks continue, none is early, and the clock never goes back."""

import ctypes
import os
import signal
import struct
import time

from steps import say, steps, wrong

libc = ctypes.CDLL(None, use_errno=True)
PERIOD_S = 0.02


class Spec(ctypes.Structure):
    _fields_ = [("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2)]


ticks = 0


def tick(_number: int, _frame: object) -> None:
    global ticks
    ticks += 1


signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, PERIOD_S, PERIOD_S)
timer = libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
period = (ctypes.c_long * 2)(0, int(PERIOD_S * 1e9))
libc.timerfd_settime(timer, 0, ctypes.byref(Spec(period, period)), None)
before, seen = time.monotonic(), 0
for step in steps():
    (expired,) = struct.unpack("Q", os.read(timer, 8))
    now = time.monotonic()
    if now < before:
        wrong("monotonic time ran backwards")
    if now - before > 3600:
        wrong("monotonic time jumped")
    deadline = time.monotonic() + 30
    while ticks <= seen:
        if time.monotonic() > deadline:
            wrong("the interval timer stopped")
        time.sleep(0.001)
    before, seen = now, ticks
    say(step, "ticking", expired > 0)
signal.setitimer(signal.ITIMER_REAL, 0)
