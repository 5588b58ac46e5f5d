"""The commands of docs/quickstart.md, "On one machine", as they are written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integration.harness import MIGRATOR, until
from migrator.lab import Lab

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quickstart.md"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]


def commands(name: str) -> list[list[str]]:
    """The lines of the block that follows <!-- name -->, without the activation of the environment."""
    block = PAGE.read_text().split(f"<!-- {name} -->\n```\n")[1].split("```")[0]
    lines = [line.split() for line in block.splitlines()]
    assert lines[0] == [".", ".venv/bin/activate"]
    assert all(words[0] == "migrator" for words in lines[1:])
    return [words[1:] for words in lines[1:]]


@pytest.mark.timeout(300)
def test_lab_commands_of_the_quick_start_move_a_rank(tmp_path: Path) -> None:
    name = f"quickstart-{os.getpid() % 100000}"  # labs of other runs may be up
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def ask(words: list[str]) -> str:
        done = subprocess.run(
            [*MIGRATOR, "--lab", name, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    (up, start), (*questions, move, history, down) = commands("lab: first terminal"), commands("lab: second terminal")
    assert [up[1], start[1], move[0], history[0], down[1]] == ["up", "run", "move", "history", "down"]
    out = tmp_path / "out"
    job = None
    try:
        ask(up)
        with out.open("wb") as file:
            job = subprocess.Popen([*MIGRATOR, "--lab", name, *start], cwd=ROOT, env=environment, stdout=file)
        until("20 steps of rank 1", lambda: len(re.findall(r"^\[1\] step", out.read_text(), re.MULTILINE)) > 20)
        for words in questions:
            ask(words)
        assert "→ spare-1" in ask(move)
        before = out.read_text().count("[1] step")
        until("steps after the move", lambda: out.read_text().count("[1] step") > before + 20)
        assert "moved" in ask(history)
        ask(down)
        job.wait(120)
    finally:
        Lab(name).down()
        if job is not None:
            job.kill()
            job.wait()
