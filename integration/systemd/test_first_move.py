"""From three freshly booted nodes to a moved rank, with the commands of docs/quickstart.md alone; how long it takes."""

from __future__ import annotations

import pytest

from integration.harness import until
from integration.systemd.cluster import USER, SystemdCluster, steps
from integration.systemd.document import commands

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_commands_of_the_quick_start_lead_to_a_moved_rank(
    installed: SystemdCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    first, out = installed.nodes["node-1"], installed.home / "first.out"
    with installed.timed("look"):
        looked = first.session(commands("look"))
    for name in installed.nodes:
        assert any(line.split()[0] == name and "up" in line.split() for line in looked.splitlines() if line), looked

    with installed.timed("first job"):
        first.run(  # the user's first terminal
            *("systemd-run", "--collect", "--unit=first", f"--uid={USER}", f"--working-directory=/home/{USER}"),
            *(f"--property=StandardOutput=append:/home/{USER}/{out.name}", "--property=StandardError=journal"),
            *("bash", "-c", commands("first job")),
        )
        until("the first steps", lambda: steps(out) >= 2)
    with installed.timed("first move"):
        moved = first.session(commands("first move"))
    assert "→ spare-1" in moved
    assert installed.node_of("first") == "spare-1"
    with capsys.disabled():
        spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in installed.seconds.items())
        print(f"\nfrom nothing to a moved rank: {sum(installed.seconds.values()):.0f} s ({spent})")

    installed.await_steps(out, 5)
    first.run("systemctl", "stop", "first", timeout_s=300)
    lines = out.read_text().splitlines()
    assert lines == [f"step {number}" for number in range(1, len(lines) + 1)]
