"""What the shim notices about the real libraries: threads that NCCL itself starts, and the GPUs that a program lets CUDA see.

Both depend on how NCCL and the CUDA driver start their threads, which the fakes only imitate. DEVICE=cpu skips everything.
"""

from __future__ import annotations

import os
import sys

import pytest

from integration.gpu.gpu_jobs import RUN_OPTIONS, SOURCE, TARGET, needs_cuda
from integration.harness import Cluster, Job, until
from snapshotd.inprocess import shimctl
from snapshotd.proc import tree

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300), needs_cuda()]

PATIENCE_S = 180.0

#: Sets what CUDA sees itself. With "past", it then makes a unique id as vLLM's pynccl does, for which NCCL starts a thread
#: that waits for the members. With "thread", a thread of its own has only called ncclGetVersion, and then sleeps.
PROGRAM = """
import os, sys, threading, time
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
import ctypes, torch
torch.ones(1, device="cuda").sum().item()
path = next(line.split()[-1] for line in open("/proc/self/maps") if "/libnccl.so" in line)
nccl = ctypes.CDLL(path)
kept = ctypes.create_string_buffer(128)
if sys.argv[1] == "past":
    assert nccl.ncclGetUniqueId(kept) == 0
def look():
    assert nccl.ncclGetVersion(ctypes.byref(ctypes.c_int())) == 0
    time.sleep(3600)
if sys.argv[1] == "thread":
    threading.Thread(target=look, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


#: Asks whether there is a GPU, as libraries do, and sees none.
WITHOUT = """
import os, time
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
assert not torch.cuda.is_available()
for step in range(1 << 30):
    print("step", step, flush=True)
    time.sleep(0.05)
"""


def start(nodes: Cluster, how: str) -> Job:
    job = nodes.start(SOURCE, [sys.executable, "-c", PROGRAM, how], options=RUN_OPTIONS, env=dict(os.environ))
    job.await_lines(1, PATIENCE_S)
    return job


def test_nccl_that_is_called_past_the_shim_is_refused(nodes: Cluster) -> None:
    job = start(nodes, "past")

    def refusal() -> str:
        """A thread that runs at the moment of a look is not counted."""
        done = nodes.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
        return done.stdout if "for which the shim knows no communicator" in done.stdout else ""

    assert until("NCCL's thread to be recognised", refusal, PATIENCE_S)


def test_rank_that_never_used_nccl_is_not_refused_for_a_call_that_returned(nodes: Cluster) -> None:
    """It also sees the GPU that the program itself chose, before it imported torch."""
    job = start(nodes, "thread")
    done = nodes.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
    assert "for which the shim knows no communicator" not in done.stdout, done
    (pid,) = [pid for pid in nodes.processes_of(PROGRAM[:40].strip()) if shimctl.find(tree.Process.of(pid)) is not None]
    found = shimctl.find(tree.Process.of(pid))
    assert found is not None
    assert found.state().visible == "0"
    nodes.move(job, TARGET, timeout_s=PATIENCE_S)


def test_rank_for_which_cuda_finds_no_gpu_moves(nodes: Cluster) -> None:
    """The driver says that it runs, and would refuse to lock it."""
    job = nodes.start(SOURCE, [sys.executable, "-c", WITHOUT], options=RUN_OPTIONS, env=dict(os.environ))
    job.await_lines(5, PATIENCE_S)
    for to in (TARGET, SOURCE):
        assert nodes.move(job, to)["device_bytes"] == 0
        job.await_progress(5)
    assert job.lines() == [f"step {step}" for step in range(len(job.lines()))]
    job.kill()
