"""Writes charts of medians for RESULTS.md as Mermaid blocks, which are readable as text too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def lines(title: str, x_axis: str, y_axis: str, xs: Sequence[float], series: Mapping[str, Sequence[float]]) -> str:
    """A chart with one line per series over the same `xs`, after a legend in the order of the lines."""
    top = max(max(values) for values in series.values())
    drawn = [
        f"Lines, from the top: {', '.join(sorted(series, key=lambda name: -series[name][-1]))}.",
        "",
        "```mermaid",
        "xychart-beta",
        f'    title "{title}"',
        f'    x-axis "{x_axis}" [{", ".join(f"{x:g}" for x in xs)}]',
        f'    y-axis "{y_axis}" 0 --> {top * 1.05:.1f}',
    ]
    drawn += [f"    line [{', '.join(f'{value:.2f}' for value in values)}]" for values in series.values()]
    return "\n".join([*drawn, "```"])
