"""The sample of the exhaustive tests (tests/sampling.py): repeatable, different each day, whole on request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import cover, sample

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = """
import pytest
from tests.sampling import Sampler, examples

@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(20))
def test_marked(case: int) -> None: print(f"marked {case}.")

@pytest.mark.sampled(1, per="node")
@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("node", ["a", "b"])
def test_per_node(node: str, case: int) -> None: print(f"{node} {case}.")

@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", range(4))
def test_killed(point: int) -> None: print(f"killed {point}.")

@pytest.mark.sampled(3, cover="point")
@pytest.mark.parametrize("point", range(2, 6))
def test_stopped(point: int) -> None: print(f"stopped {point}.")

@pytest.mark.sampled(2, group="jobs")
@pytest.mark.parametrize("case", range(3))
def test_one_job(case: int) -> None: print(f"job {case}.")

@pytest.mark.sampled(2, group="jobs")
def test_other_job() -> None: print("job 3.")

def test_loop(sampled: Sampler) -> None:
    for event in sampled(range(30), 4): print(f"event {event}.")
    print(f"examples {examples(8)}.")
"""


def test_a_sample_keeps_the_order_and_depends_on_seed_and_name() -> None:
    cases = range(100)
    first = sample(cases, 10, 1, "x")
    assert len(first) == 10
    assert first == sorted(first) == sample(cases, 10, 1, "x")
    assert first != sample(cases, 10, 2, "x")
    assert first != sample(cases, 10, 1, "y")
    assert sample(range(3), 10, 1, "x") == [0, 1, 2]


def test_every_case_is_met_within_some_weeks() -> None:
    met = {case for day in range(20261101, 20261131) for case in sample(range(20), 4, day, "x")}
    assert met == set(range(20))


def test_samples_cover_every_value_and_grow_only_if_necessary() -> None:
    whole = {"killed": list(range(8)), "stopped": list(range(4, 12)), "cut off": [3, 4]}
    for day in range(20261101, 20261131):
        kept = {
            name: sample(values, keep, day, name) for (name, values), keep in zip(whole.items(), (6, 6, 1), strict=True)
        }
        cover(kept, whole, lambda point: point, day)
        assert {point for points in kept.values() for point in points} == set(range(12))
        assert all(set(points) <= set(whole[name]) for name, points in kept.items())
        assert [len(points) == len(set(points)) for points in kept.values()] == [True] * 3
        assert sum(map(len, kept.values())) == 13
    small = {"killed": [1]}
    cover(small, {"killed": [1, 2, 3]}, lambda point: point, 1)
    assert sorted(small["killed"]) == [1, 2, 3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.sampling"]\n')
    (tmp_path / "test_it.py").write_text(PROJECT)
    return tmp_path


def run(project: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-rP", "-p", "no:cacheprovider", "--rootdir", str(project), *options]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cases(output: str, kind: str) -> list[str]:
    return re.findall(rf"^{kind} (\d+)\.$", output, re.MULTILINE)


def test_a_default_run_takes_a_sample_and_prints_how_to_repeat_it(project: Path) -> None:
    output = run(project)
    assert [len(cases(output, kind)) for kind in ("marked", "a", "b", "event")] == [3, 1, 1, 4]
    assert cases(output, "examples") == ["2"]
    seed = re.search(r"sample: --seed (\d+) \(--whole runs every case\)", output)
    assert seed is not None
    again = run(project, "--seed", seed[1])
    assert cases(again, "marked") == cases(output, "marked")
    assert cases(again, "event") == cases(output, "event")
    other = run(project, "--seed", "7", "-n", "2")
    assert (cases(other, "marked"), cases(other, "event")) != (cases(output, "marked"), cases(output, "event"))
    assert len(cases(other, "marked")) == 3


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_a_default_run_covers_every_point(project: Path, seed: str) -> None:
    output = run(project, "--seed", seed)
    met = cases(output, "killed") + cases(output, "stopped")
    assert set(met) == set("012345")
    assert len(met) == 6, (
        "two points are only killed: one case more than the four of the sample, and one of another point"
    )


def test_tests_of_a_group_have_one_sample(project: Path) -> None:
    drawn = [tuple(cases(run(project, "--seed", seed), "job")) for seed in ("1", "2", "3", "4")]
    assert [len(jobs) for jobs in drawn] == [2] * 4
    assert len(set(drawn)) > 1


def test_a_whole_run_takes_every_case(project: Path) -> None:
    output = run(project, "--whole")
    assert cases(output, "job") == ["0", "1", "2", "3"]
    assert [len(cases(output, kind)) for kind in ("marked", "a", "b", "event")] == [20, 5, 5, 30]
    assert cases(output, "examples") == ["8"]


def test_a_run_that_names_its_tests_takes_all_their_cases(project: Path) -> None:
    assert len(cases(run(project, "test_it.py::test_marked"), "marked")) == 20
    assert len(cases(run(project, "-k", "test_marked"), "marked")) == 20
