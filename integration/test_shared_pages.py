"""Pages that forked processes share are sent once, and are shared again on the target. Others go past criu as always."""

from __future__ import annotations

import re
from pathlib import Path

from integration.harness import Cluster
from integration.test_moves import uninterrupted
from tests.kernel import needs_page_scans

#: Of forked.py.
OWN_BYTES = 24 << 20


def used_bytes(pids: list[int], kind: str) -> int:
    """The memory of processes; a page that several of them share counts once."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(size) << 10 for text in texts for size in re.findall(rf"^{kind}: +(\d+) kB", text, re.MULTILINE))


@needs_page_scans
def test_pages_that_forked_processes_share_are_sent_once_and_shared_again(nodes: Cluster) -> None:
    end = nodes.folder / "end-of-forked"
    end.unlink(missing_ok=True)
    job = nodes.workload("node-1", "forked.py", "--end-file", str(end))
    job.await_lines(10)
    for target in ("spare-1", "node-1"):
        pids = nodes.processes_of(end.name)
        assert len(pids) == 11
        all_bytes, own_bytes = used_bytes(pids, "Pss"), used_bytes(pids, "Pss_Anon")
        assert used_bytes(pids, "Rss") > 5 * all_bytes, "they share most of their memory"
        moved = nodes.move(job, target)
        assert moved["bytes"] < 1.1 * all_bytes, (moved["bytes"], all_bytes)
        (placed,) = (part["bytes"] for part in moved["parts"] if part["name"] == "place-memory")
        assert OWN_BYTES <= placed < 4 * OWN_BYTES, "what the parent shares with nobody, and has freed not long ago"
        job.await_progress()
        assert used_bytes(nodes.processes_of(end.name), "Pss_Anon") < 1.1 * own_bytes
    steps = job.end_soon(end)
    assert job.finish() == 0, job.text()[-500:]
    assert job.text() == uninterrupted("forked.py", "--steps", str(steps), "--pace-s", "0.001")
