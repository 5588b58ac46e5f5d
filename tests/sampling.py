"""A pytest plugin: exhaustive tests run a seeded sample of their cases, unless the whole is asked for.

A walk over every fault at every step takes hours, and one day's change rarely breaks a single step only. A default run
therefore takes a sample. The seed is the date (UTC), so that all cases are met within some weeks, and everybody has the
same sample on the same day. The header and the summary print the seed.

    --seed N    run the sample of another day, or of a failed run
    --whole     run every case (`make test-all`)

A sample is taken by a mark, by a fixture, or by hypothesis:

    @pytest.mark.sampled(5)                # at most 5 of the cases that the `parametrize` marks of this test make
    @pytest.mark.sampled(2, per="node")    # at most 2 for each value of the parameter `node`
    @pytest.mark.sampled(2, cover="point") # 2, chosen so that the run meets every value of `point` in one of its tests
    @pytest.mark.sampled(2, group="torch") # at most 2 of the cases of all tests of this group

    def test_walk(sampled: Sampler) -> None:
        for event in sampled(events, 20): # at most 20 of these events, in their order

    @settings(DRAWN, max_examples=examples(200)) # hypothesis: a quarter of them, drawn by the seed

A run that names its tests (with `::`, `-k` or `--last-failed`) runs all cases of a marked test, so a failed case can be
repeated by its name. The sample of a test depends on the seed and on the name of the test or its group. With `cover` it also
depends on the other tests of the run: a case is exchanged for one whose value no other test meets, and added if none can be
exchanged.
"""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Protocol, TypeVar

import hypothesis.core
import pytest
from hypothesis import HealthCheck, settings

T = TypeVar("T")


class Sampler(Protocol):
    def __call__(self, cases: Iterable[T], keep: int, /) -> list[T]: ...


class _Run:
    """How this run samples. Set once, before the tests are collected."""

    seed = 0
    whole = False


def sample(cases: Sequence[T], keep: int, seed: int, name: str) -> list[T]:
    """At most `keep` of the cases, in their order; another choice for each seed and each name."""
    if keep < 1:
        raise ValueError("a sample has at least one case")
    if len(cases) <= keep:
        return list(cases)
    kept = Random(f"{seed}/{name}").sample(range(len(cases)), keep)
    return [cases[index] for index in sorted(kept)]


def cover(kept: dict[str, list[T]], cases: dict[str, list[T]], value: Callable[[T], object], seed: int) -> None:
    """Changes the samples in `kept` so that together they have every value that is in `cases`.

    Both have the same names. A case whose value another one has too is replaced; without one, a case is added.
    """
    random = Random(f"{seed}/cover")
    count = Counter(value(case) for sampled in kept.values() for case in sampled)
    places: defaultdict[object, list[tuple[str, T]]] = defaultdict(list)
    for name in sorted(cases):
        for case in cases[name]:
            places[value(case)].append((name, case))
    for missing in sorted(places.keys() - +count, key=lambda one: (len({name for name, _ in places[one]}), str(one))):
        random.shuffle(places[missing])
        for name, case in places[missing]:
            twice = [index for index, old in enumerate(kept[name]) if count[value(old)] > 1]
            if twice:
                index = random.choice(twice)
                count[value(kept[name][index])] -= 1
                kept[name][index] = case
                break
        else:
            name, case = places[missing][0]
            kept[name].append(case)
        count[missing] += 1


def examples(whole: int) -> int:
    """How many examples hypothesis tries, where `whole` are tried in a whole run."""
    return whole if _Run.whole else max(1, whole // 4)


#: Hypothesis without a clock and without a memory of earlier runs: the seed alone decides what is drawn.
DRAWN = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def sampled(request: pytest.FixtureRequest) -> Sampler:
    def take(cases: Iterable[T], keep: int, /) -> list[T]:
        listed = list(cases)
        return listed if _Run.whole else sample(listed, keep, _Run.seed, request.node.nodeid)

    return take


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sampling", "sample of the exhaustive tests")
    group.addoption("--seed", type=int, metavar="N", help="seed of the sample (default: the date as YYYYMMDD)")
    group.addoption("--whole", action="store_true", help="run every case of the exhaustive tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "sampled(keep, per=None, cover=None, group=None): run at most `keep` cases (for each value of `per`; of all tests of"
        " the same `group`); all tests with the same `cover` together run every value of that parameter",
    )
    if config.option.seed is None:
        # Stored in the options, which pytest-xdist hands to its workers: all of them have the seed of one day.
        config.option.seed = int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))
    _Run.seed, _Run.whole = config.option.seed, config.option.whole
    hypothesis.core.global_force_seed = _Run.seed  # type: ignore[assignment]


def describe() -> str:
    if _Run.whole:
        return "sample: none, every case runs"
    return f"sample: --seed {_Run.seed} (--whole runs every case)"


def pytest_report_header() -> str:
    return describe()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(describe())


def _parameter(name: str, item: pytest.Item) -> object:
    assert isinstance(item, pytest.Function)
    return item.callspec.params[name]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args) or config.option.keyword or config.getoption("lf", False)
    if _Run.whole or named:
        return
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    keep: dict[str, int] = {}
    covering: defaultdict[str, list[str]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None and isinstance(item, pytest.Function):
            name = mark.kwargs.get("group") or item.nodeid.partition("[")[0]
            if (per := mark.kwargs.get("per")) is not None:
                name += f"[{per}={item.callspec.params[per]}]"
            if (parameter := mark.kwargs.get("cover")) is not None and name not in cases:
                covering[parameter].append(name)
            cases[name].append(item)
            keep[name] = mark.args[0]
    samples = {name: sample(group, keep[name], _Run.seed, name) for name, group in cases.items()}
    for parameter, names in covering.items():
        covered = {name: samples[name] for name in names}
        cover(covered, {name: cases[name] for name in names}, partial(_parameter, parameter), _Run.seed)
    kept = {item for group in samples.values() for item in group}
    left_out = [item for group in cases.values() for item in group if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
