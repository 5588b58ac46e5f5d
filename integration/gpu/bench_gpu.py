"""Measures the parts of the pause of a GPU rank: `python3 -m integration.gpu.bench_gpu --gib 1 8 32`.

The same job is measured several times in one run: moved between two lab nodes with its device memory kept on the GPU until it
is sent, offloaded by the shim into files, or left to the driver, and checkpointed with plain `criu` and the driver's calls
(`by_hand.py`). With --gpt the job is the training of a GPT with torch.compile (`gpu_gpt.py`). Nothing here passes or fails.
Tables and a chart come last; each result is written to gpu-bench.json immediately, and the trace of each move beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from integration.gpu import by_hand, chart, host_memory
from integration.gpu.by_hand import Part
from integration.gpu.gpu_jobs import DEVICE, GIB, GPT, OUT, ROOT, TRAIN, hold_device_memory, why_not
from integration.harness import Cluster, cluster, until

NODES = ("node-1", "spare-1")
NAMES = (
    *("empty-cache", "prepare", "park", "lock", "offload", "checkpoint", "criu-dump", "stream"),
    *("criu-restore", "place-memory", "cuda-restore", "unlock", "refill", "pause"),
)
HOLD, OFFLOAD, DRIVER, BY_HAND = WAYS = ("hold", "offload", "driver", "by hand")
SLOW = (DRIVER, BY_HAND)
#: More than any of these moves takes.
MOVE_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 8, 32], help="device memory of the job")
    parser.add_argument(
        "--cached-gib", type=float, default=0.0, help="device memory that its allocator keeps for nothing"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--others-at-gib", type=float, nargs="+", help="the slow ways at these sizes alone")
    parser.add_argument("--gpt", action="store_true", help="train a GPT, and no ballast of --gib")
    parser.add_argument("--precopy-limit", type=float, default=0.0, help="see `migrator move --precopy-limit`")
    options = parser.parse_args(arguments)
    if why_not():
        sys.exit(f"bench_gpu: {why_not()}")
    results: list[dict[str, Any]] = []
    with cluster("gpubench", NODES) as nodes:
        for gib in [0.0] if options.gpt else options.gib:
            command = [sys.executable, *_program(gib, options)]
            for round_ in range(options.rounds):
                for way in options.only:
                    if way in SLOW and options.others_at_gib and gib not in options.others_at_gib:
                        continue
                    result: dict[str, Any] = {"gib": gib, "way": way, "round": round_ + 1}
                    try:
                        if way == BY_HAND:
                            result["parts"] = by_hand.run(command)
                        else:
                            result |= moved(nodes, command, way, options.precopy_limit)
                    except (RuntimeError, AssertionError, OSError) as error:  # continue with the other measurements
                        result["failed"] = str(error)[:4000]
                    results.append(result)
                    print(_line(result), flush=True)
                    _save(results)
    print(f"\n{table(results)}\n\n{ratios(results)}\n\n{growth(results)}")
    return 0


def _program(gib: float, options: argparse.Namespace) -> list[str]:
    endless = ["--steps", "1000000000", "--digest-every", "1000000000"]
    if options.gpt:
        folder = ROOT / "integration" / ".work"
        folder.mkdir(exist_ok=True)
        return [GPT, "--data", str(folder / "tokens"), *endless]
    return [TRAIN, "--gib", str(gib), "--cached-gib", str(options.cached_gib), "--pace-s", "0.02", *endless]


def moved(nodes: Cluster, command: Sequence[str], way: str, precopy_limit: float) -> dict[str, Any]:
    """Moves a new job once; returns the parts of the move as reported, and the host memory that it used."""
    hold_device_memory(nodes, NODES, on=way == HOLD)
    job = nodes.start(NODES[0], command, options=["--device-memory", DRIVER if way == DRIVER else OFFLOAD])
    try:
        until("the job's first steps", lambda: _steps(job.text()) > 10 or job.process.poll() is not None, 300)
        if job.process.poll() is not None:
            raise RuntimeError(f"the job ended with {job.process.returncode}:\n{job.text()[-2000:]}")
        with host_memory.peaks(nodes) as peaks:
            OUT.mkdir(parents=True, exist_ok=True)
            trace = ("--trace", str(OUT / f"trace-{job.name}-{way}.json"))
            limit = ("--precopy-limit", str(precopy_limit)) if precopy_limit else ()
            answer = nodes.move(job, NODES[1], timeout_s=MOVE_S, more=(*trace, *limit))
        steps = _steps(job.text())
        until("the job to go on", lambda: _steps(job.text()) > steps + 3, 60)
        copied = copied_gbps(nodes.logs(400), answer["move"])
    finally:
        job.kill()
        nodes.tidy()
    parts = [Part(part["name"], part["seconds"], part["bytes"]) for part in answer.get("parts", [])]
    return {
        "parts": [*parts, Part("pause", answer["pause_s"])],
        "answer": answer,
        "host_bytes": peaks.bytes,
        "copied_gbps": copied,
    }


def copied_gbps(logs: str, move: str) -> dict[str, str]:
    """The speed of the copy alone in each direction, if the shim copied in this move. The daemons log it."""
    copies = re.compile(r"(taken off|put back onto) the GPU, copied in \S+ s, ([\d.]+) GB/s")
    found = [copies.search(line) for line in logs.splitlines() if f" {move} " in line]
    return {one[1]: one[2] for one in found if one is not None}


def _steps(text: str) -> int:
    return text.count("\nstep ")


# ---------------------------------------------------------------- output


def _line(result: dict[str, Any]) -> str:
    head = f"{result['gib']:g} GiB, {result['way']}:"
    if "failed" in result:
        return f"{head} failed: {result['failed'][:1500]}"
    copied = "".join(f", {name} the GPU at {gbps} GB/s" for name, gbps in result.get("copied_gbps", {}).items())
    return f"{head} " + ", ".join(f"{part.name} {_cell([part])}" for part in _whole(result["parts"])) + copied


def _whole(parts: Sequence[Part]) -> list[Part]:
    """Adds the pause, which for plain criu is the sum of all parts."""
    if any(part.name == "pause" for part in parts):
        return list(parts)
    return [*parts, Part("pause", sum(part.seconds for part in parts))]


def _cell(parts: Sequence[Part]) -> str:
    """Seconds, and GB/s if bytes were moved: medians over the rounds."""
    if not parts:
        return ""
    seconds = statistics.median(part.seconds for part in parts)
    if not all(part.bytes and part.seconds for part in parts):
        return f"{seconds:.3f}"
    return f"{seconds:.2f} ({statistics.median(part.bytes / part.seconds for part in parts) / 1e9:.2f})"


def table(results: Sequence[dict[str, Any]]) -> str:
    good = [result for result in results if "failed" not in result]
    columns = list(dict.fromkeys((result["gib"], result["way"]) for result in results))
    heads = [f"{gib:g} GiB {way}" for gib, way in columns]
    lines = [f"| seconds (GB/s) | {' | '.join(heads)} |", f"| --- |{' --- |' * len(columns)}"]
    for name in NAMES:
        cells = []
        for column in columns:
            mine = [result for result in good if (result["gib"], result["way"]) == column]
            cells.append(_cell([part for result in mine for part in _whole(result["parts"]) if part.name == name]))
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cell or '–' for cell in cells)} |")
    for name, label in (("device_bytes", "device memory moved"), ("device_bytes_left", "free blocks given back")):
        sizes = {(result["gib"], result["way"]): result["answer"].get(name, 0) for result in good if "answer" in result}
        cells = [f"{sizes[column] / GIB:.2f} GiB" if sizes.get(column) else "–" for column in columns]
        if any(sizes.values()):
            lines.append(f"| {label} | {' | '.join(cells)} |")
    for name in ("taken off", "put back onto"):
        rates = {(result["gib"], result["way"]): result.get("copied_gbps", {}).get(name) for result in good}
        if any(rates.values()):
            lines.append(f"| {name} the GPU, GB/s | {' | '.join(rates.get(column) or '–' for column in columns)} |")
    lines += [f"\n{result['gib']:g} GiB {result['way']} failed" for result in results if "failed" in result]
    return "\n".join(lines)


def _pause(results: Sequence[dict[str, Any]], gib: float, way: str) -> float | None:
    """The median over the rounds."""
    mine = [result for result in results if (result["gib"], result["way"]) == (gib, way) and "failed" not in result]
    pauses = [part.seconds for result in mine for part in _whole(result["parts"]) if part.name == "pause"]
    return statistics.median(pauses) if pauses else None


def ratios(results: Sequence[dict[str, Any]]) -> str:
    """A table of how much the fast ways shorten the pause, and of host memory relative to device memory in use."""
    lines = ["| moved | driver ÷ it | by hand ÷ it | host memory, source | host memory, target |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for gib, way in [
        (gib, way) for gib in dict.fromkeys(result["gib"] for result in results) for way in (HOLD, OFFLOAD)
    ]:
        pause = _pause(results, gib, way)
        if pause is None:
            continue
        times = [_pause(results, gib, other) for other in SLOW]
        cells = [f"{other / pause:.1f}" if other else "–" for other in times]
        taken = [
            [result["host_bytes"][node] / max(1, result["answer"]["device_bytes"]) for node in NODES]
            for result in results
            if (result["gib"], result["way"]) == (gib, way) and "failed" not in result
        ]
        cells += [f"{max(ratio):.2f}" for ratio in zip(*taken, strict=True)]
        lines.append(f"| {gib:g} GiB, {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def growth(results: Sequence[dict[str, Any]]) -> str:
    """A chart of the pause over the device memory, for each method that was measured at every size."""
    sizes = list(dict.fromkeys(result["gib"] for result in results))
    pauses = {way: [_pause(results, gib, way) for gib in sizes] for way in WAYS}
    whole = {way: [value for value in values if value is not None] for way, values in pauses.items()}
    series = {way: values for way, values in whole.items() if len(values) == len(sizes)}
    if len(sizes) < 2 or not series:
        return ""
    return chart.lines("pause of a GPU rank", "live device memory, GiB", "seconds", sizes, series)


def _save(results: Sequence[dict[str, Any]]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"device": DEVICE, "results": results}, default=lambda part: part.__dict__, indent=1)
    (OUT / "gpu-bench.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
