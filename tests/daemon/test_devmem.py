"""Device memory spoken of with a real process: what an earlier life of the daemon began, and what goes wrong on the way."""

from __future__ import annotations

import pytest

from snapshotd import devmem
from snapshotd.shimctl import Mailbox
from tests.shim import conftest as shim
from tests.shim.memory import conftest as memory
from tests.shim.memory.conftest import Start
from tests.shim.memory.jobs import DROP, FILL, PARK

library, parked_library = shim.library, shim.parked_library
node, program, start_job = memory.node, memory.program, memory.start_job


@pytest.mark.parametrize("command", [PARK, FILL, DROP])
def test_what_was_asked_for_and_never_signalled_is_given_up(
    start_job: Start, monkeypatch: pytest.MonkeyPatch, command: int
) -> None:
    """The daemon was killed in between."""
    job = start_job("grow 4")
    if command == FILL:
        job.park()
    else:
        job.ready()
        job.park_threads()
    with monkeypatch.context() as killed:
        killed.setattr(Mailbox, "_wake", lambda mailbox, box: None)
        job.mailbox()._write_request(command, 60.0)
    found = devmem.find(job.process)
    assert found is not None
    assert job.state().busy
    found.cancel()
    assert (job.state().busy, found.out()) == (False, command == FILL)
    job.come_back()
    job.let_go()
