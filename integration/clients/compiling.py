"""A job that compiles with torch.compile at its start and again after every move."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from integration.harness import Cluster, until

_PROGRAM = Path(__file__).parent / "programs" / "compile_again.py"
COMPILES_S = 400.0


def compile_after_every_move(nodes: Cluster, places: Sequence[str], *arguments: str) -> None:
    """The last place is where the job ends, so what it made there can be looked at."""
    end, orders = nodes.folder / "end", nodes.folder / "orders"
    end.unlink(missing_ok=True)
    orders.mkdir(exist_ok=True)
    for old in orders.iterdir():
        old.unlink()
    job = nodes.start(
        "node-1", [sys.executable, str(_PROGRAM), "--orders", str(orders), "--end-file", str(end), *arguments]
    )

    def has_compiled(number: int) -> None:
        until(
            f"function {number} is compiled",
            lambda: f"compiled {number}: " in job.text() or job.process.poll() is not None,
            COMPILES_S,
        )
        assert f"compiled {number}: True" in job.lines(), job.text()[-2000:]

    has_compiled(0)
    for number, place in enumerate(places, start=1):
        nodes.move(job, place)
        (orders / f"{number}.go").touch()
        has_compiled(number)
    end.touch()
    assert job.finish() == 0, job.text()[-2000:]
