"""Tests that the stand-in's own scenarios see no difference behind the shim, down to threads and descriptors."""

from __future__ import annotations

import pytest

from tests.shim.nccl.conftest import Job


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
