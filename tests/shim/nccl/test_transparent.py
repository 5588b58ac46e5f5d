"""Tests that the stand-in's own scenarios see no difference behind the shim, down to threads and descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import cuda_fake
from tests.shim.jobs import until
from tests.shim.nccl.conftest import Job
from tests.shim.nccl.gates import DEVICES


@pytest.mark.parametrize(
    ("scenario", "nranks"),
    [
        ("operations.reductions", 2),
        ("operations.moves", 3),
        ("operations.moves", 8),
        ("operations.scaled_sums", 3),
        ("operations.point_to_point", 5),
        ("operations.large_both_ways", 3),
        ("operations.waits_for_all", 3),
        ("operations.streams", 4),
        ("operations.mismatch", 3),
        ("making.splits", 5),
        ("making.shrinks", 2),
        ("making.non_blocking", 3),
        ("making.all_in_one_process", 1),
        ("making.attachments", 2),
        ("making.configs", 2),
        ("making.wrong_init", 2),
        ("making.reenters", 1),
        ("ending.leaves_nothing", 4),
        ("ending.destroy_waits", 3),
        ("ending.finalize_is_collective", 3),
        ("ending.abort_while_a_peer_hangs", 2),
    ],
)
def test_scenario_runs_unchanged_behind_the_shim(job: Job, scenario: str, nranks: int) -> None:
    job.start(scenario, nranks)
    job.all_right()


def test_grouped_initialisation_keeps_the_device_of_each_call(job: Job, tmp_path: Path) -> None:
    """The calls of a group reach NCCL at its end, when the last device is current."""
    node = cuda_fake.GpuNode(tmp_path / "gpus", cuda_fake.gpus("node-1", 3))
    job.start("jobs.devices_in_a_group", 1, **node.environment)
    until(lambda: (tmp_path / "devices").exists() or job.processes[0].poll() is not None)
    assert job.processes[0].poll() is None, job.output()
    bus_ids = dict(line.split() for line in job.gates().gates[0].ask(DEVICES).splitlines())
    assert bus_ids == {str(device): f"0000:{0x10 + device:02x}:00.0" for device in range(3)}
    (tmp_path / "seen").touch()
    job.all_right()
