"""Runs as user 1500 with files below /tmp open: one that it reads again at every step, and a set-user-id program."""

import os

from steps import say, steps

USER_ID = 1500

numbers = steps()
next(numbers)  # it imports modules that the user may not be able to read
os.setgroups([])
os.setresgid(USER_ID, USER_ID, USER_ID)
os.setresuid(USER_ID, USER_ID, USER_ID)
os.makedirs("/tmp/carrier", exist_ok=True)
state = os.open("/tmp/carrier/state", os.O_RDWR | os.O_CREAT, 0o600)
os.pwrite(state, b"of the user", 0)
program = os.open("/tmp/carrier/program", os.O_RDWR | os.O_CREAT, 0o755)
os.fchmod(program, 0o6755)
for step in numbers:
    owner, mode = os.fstat(state).st_uid, os.fstat(program).st_mode
    say(step, os.pread(state, 100, 0).decode(), owner, f"{mode:o}")
