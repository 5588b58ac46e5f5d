"""How `migrator run` names a job that neither a person nor a launcher has named."""

from __future__ import annotations

import pytest

from migrator.cli import run


@pytest.mark.parametrize(
    ("command", "job"),
    [
        ("python train.py", "train"),
        ("/opt/venv/bin/python3.11 -u -X dev jobs/train.py --lr 0.1", "train"),
        ("python -m my.train --lr 0.1", "train"),
        ("python -m my.train.__main__", "train"),
        ("bash -e ./train.sh 3", "train"),
        ("env OMP_NUM_THREADS=1 python train.py", "train"),
        ("CUDA_VISIBLE_DEVICES=0 ./train", "train"),
        ("python -c pass", "python"),
        ("python3", "python3"),
        ("sh -c ./train.sh", "sh"),
        ("./model.v2", "model.v2"),
        ("python", "python"),
    ],
)
def test_job_is_named_after_the_script_and_not_after_its_interpreter(command: str, job: str) -> None:
    assert run.job_name(None, command.split(), {}) == job


@pytest.mark.parametrize(
    ("job", "rank", "environment", "alone"),
    [
        (None, None, {}, True),
        ("night", None, {}, False),
        (None, "1", {}, False),
        (None, None, {"RANK": "0"}, False),
        (None, None, {"SLURM_JOB_ID": "7"}, False),
        (None, None, {"MASTER_ADDR": "10.0.0.1"}, False),  # another rank of the job may be on another node
    ],
)
def test_only_a_job_of_one_rank_may_get_a_suffix(
    job: str | None, rank: str | None, environment: dict[str, str], alone: bool
) -> None:
    assert run.stands_alone(job, rank, environment) is alone
