"""Prints a summary of pytest's --junitxml file: `python integration/gpu/table.py RESULTS.xml`.

It lists every test if they are few, otherwise every file. Tests that failed or were skipped are always listed, with the
first line of the reason. It uses the standard library only, to run wherever the suite does.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

FEW = 60
REASON_LENGTH = 110


@dataclass(frozen=True)
class Result:
    """The result of one test; `why` is empty if it passed."""

    file: str
    test: str
    outcome: str
    seconds: float
    why: str


def read(path: str) -> list[Result]:
    return [_result(case) for case in ElementTree.parse(path).getroot().iter("testcase")]


def _result(case: ElementTree.Element) -> Result:
    outcome, why = "passed", ""
    for kind, name in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
        found = case.find(kind)
        if found is not None:
            outcome, why = name, (found.get("message") or "").strip().partition("\n")[0]
    file = case.get("classname", "").rpartition(".")[2] or "?"
    return Result(file, case.get("name", "?"), outcome, float(case.get("time", "0")), why[:REASON_LENGTH])


def lines(results: Iterable[Result]) -> list[str]:
    results = list(results)
    if len(results) <= FEW:
        rows = [(result.outcome, result.seconds, f"{result.file}::{result.test}") for result in results]
    else:
        rows = [_summary(file, results) for file in dict.fromkeys(result.file for result in results)]
    lines = [f"{outcome:24s} {seconds:8.1f} s  {what}" for outcome, seconds, what in rows]
    lines += [f"  {result.outcome} {result.file}::{result.test}: {result.why}" for result in results if result.why]
    return [*lines, f"{_counts(results):24s} {sum(result.seconds for result in results):8.1f} s  in all"]


def _summary(file: str, results: list[Result]) -> tuple[str, float, str]:
    mine = [result for result in results if result.file == file]
    return _counts(mine), sum(result.seconds for result in mine), file


def _counts(results: list[Result]) -> str:
    return (
        ", ".join(f"{count} {outcome}" for outcome, count in Counter(r.outcome for r in results).items()) or "no test"
    )


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(read(sys.argv[1]))) + "\n")
