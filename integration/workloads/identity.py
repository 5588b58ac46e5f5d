"""Prints the identity of the process, such as user, limits and environment: the same line in every step."""

import os
import resource
import sys

from steps import say, steps, wrong


def identity() -> tuple[object, ...]:
    return (
        os.getresuid(),
        os.getresgid(),
        os.getgroups(),
        resource.getrlimit(resource.RLIMIT_NOFILE),
        resource.getrlimit(resource.RLIMIT_CORE),
        sorted(os.sched_getaffinity(0)),
        os.environ.get("MARKER"),
        os.getcwd(),
        os.nice(0),
        os.getpid(),
        os.getsid(0),
        os.isatty(0),
        os.isatty(1),
        sys.argv[0],
    )


mask = os.umask(0o22)
os.umask(mask)
first = identity()
for step in steps():
    now = identity()
    if now != first:
        wrong(f"was {first}, is {now}")
    current = os.umask(mask)
    if current != mask:
        wrong("umask")
    say(step, *first[:9])
