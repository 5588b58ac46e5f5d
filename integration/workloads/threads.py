"""Runs threads that pass a token round with a condition variable, each with its own state."""

import hashlib
import threading

from steps import say, steps, wrong

COUNT = 8
condition = threading.Condition()
holder, rounds, stop = COUNT, 0, False
digests = [b""] * COUNT
local = threading.local()


def run(number: int) -> None:
    global holder, rounds
    local.state = bytes([number])
    while True:
        with condition:
            condition.wait_for(lambda: stop or holder == number)  # noqa: B023 - globals
            if stop:
                return
            local.state = hashlib.sha256(local.state).digest()
            digests[number] = local.state
            holder = (holder + 1) % (COUNT + 1)
            if holder == COUNT:
                rounds += 1
            condition.notify_all()


threads = [threading.Thread(target=run, args=(number,)) for number in range(COUNT)]
for thread in threads:
    thread.start()
idents = [thread.native_id for thread in threads]
for step in steps():
    with condition:
        holder = 0
        condition.notify_all()
        condition.wait_for(lambda: holder == COUNT)  # noqa: B023 - a global
        say(step, rounds, hashlib.sha256(b"".join(digests)).hexdigest()[:16])
    if [thread.native_id for thread in threads] != idents:
        wrong("thread ids")
with condition:
    stop = True
    condition.notify_all()
for thread in threads:
    thread.join()
