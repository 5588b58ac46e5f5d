"""The README's diagram is the protocol's table, printed."""

from __future__ import annotations

from pathlib import Path

from migrator.protocol import diagram

README = Path(__file__).parents[2] / "README.md"


def test_the_diagram_is_printed_from_the_table() -> None:
    shown = README.read_text().split("<!-- diagram -->")[1].split("<!-- /diagram -->")[0].strip()
    assert shown == f"```\n{diagram()}\n```", "print it anew: python -m migrator.protocol"
