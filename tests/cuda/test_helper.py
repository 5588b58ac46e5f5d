"""The helper process alone: its protocol, and when it exits."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from snapshotd.cuda import bindings
from tests.cuda.processes import CudaProgram, wait_until
from tests.fakes.cuda_fake import GpuNode


class Helper:
    def __init__(self, node: GpuNode, *program: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, *(program or ("-m", "snapshotd.cuda.helper"))],
            env={**os.environ, **node.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, **request: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()

    def receive(self) -> Any:
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())


@pytest.fixture
def helper(node: GpuNode) -> Iterator[Helper]:
    helper = Helper(node)
    yield helper
    helper.child.kill()
    helper.child.wait()
    for pipe in (helper.child.stdin, helper.child.stdout, helper.child.stderr):
        assert pipe is not None
        pipe.close()


def about(program: CudaProgram) -> dict[str, int]:
    return {"pid": program.process.pid, "start_ticks": program.process.start_ticks}


def test_every_call_is_answered(helper: Helper, program: CudaProgram) -> None:
    helper.send(id=1, call="state", **about(program))
    assert helper.receive() == {"id": 1, "error": "", "state": 0}
    helper.send(id=2, call="unlock", **about(program))
    assert helper.receive() == {"id": 2, "error": "CUDA_ERROR_ILLEGAL_STATE"}
    helper.send(id=3, call="state", pid=program.process.pid, start_ticks=1)
    assert helper.receive() == {"id": 3, "gone": True}
    helper.send(id=4, call="by_name")
    assert helper.receive() == {"id": 4, "error": "unknown call 'by_name'"}
    helper.send(id=5, call="state", pid="x")
    assert helper.receive()["error"].startswith("ValueError")


def test_restore_thread_is_reported(helper: Helper, program: CudaProgram) -> None:
    helper.send(id=1, call="restore_thread", **about(program))
    answer = helper.receive()
    tasks = os.listdir(f"/proc/{program.process.pid}/task")
    assert str(answer["thread"]) in tasks
    assert answer["thread"] != program.process.pid


def test_hanging_call_delays_no_other(helper: Helper, node: GpuNode, program: CudaProgram) -> None:
    node.fault("lock", "hang")
    helper.send(id=1, call="lock", timeout_ms=1000, **about(program))
    wait_until(lambda: not node.faults())
    helper.send(id=2, call="state", **about(program))
    assert helper.receive()["id"] == 2


def test_helper_exits_with_its_stdin_even_if_a_call_hangs(helper: Helper, node: GpuNode, program: CudaProgram) -> None:
    node.fault("lock", "hang")
    helper.send(id=1, call="lock", timeout_ms=1000, **about(program))
    wait_until(lambda: not node.faults())
    assert helper.child.stdin is not None
    helper.child.stdin.close()
    assert helper.child.wait(timeout=20) == 0


PRINTING = """
import os
from snapshotd.cuda import bindings, helper

class Printing(bindings.Driver):
    def __init__(self):
        os.write(1, b"hello")
        super().__init__()

helper.Driver = Printing
helper.main()
"""


def test_output_of_a_library_is_not_an_answer(node: GpuNode, program: CudaProgram) -> None:
    helper = Helper(node, "-c", PRINTING)
    helper.send(id=1, call="state", **about(program))
    assert helper.receive() == {"id": 1, "error": "", "state": 0}
    assert helper.child.communicate() == ("", "hello")


def test_helper_imports_no_grpc() -> None:
    """Memory: there may be several helpers, and gRPC would be most of each."""
    code = "import sys, snapshotd.cuda.helper; print([m for m in ('grpc', 'google.protobuf', 'asyncio') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_structure_sizes() -> None:
    """In the driver's header every argument structure is 64 bytes."""
    assert {ctypes.sizeof(each) for each in (bindings.LockArgs, bindings.RestoreArgs)} == {64}
    assert ctypes.sizeof(bindings.GpuPair) == 32
    assert (bindings.RestoreArgs.gpuPairs.offset, bindings.RestoreArgs.gpuPairsCount.offset) == (0, 8)
