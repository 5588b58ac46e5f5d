"""Entries of the registry are stored whole, whichever thread stores them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.proc import host


def test_threads_that_store_the_same_entry_do_not_disturb_each_other(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    entry = RankEntry(
        uid="job-0-00000001",
        job="job",
        rank=0,
        role="home",
        keeper_pid=1,
        keeper_start_ticks=1,
        cgroup="",
        home_node="node-1",
        home_endpoint="node-1:7070",
        relay_key="0" * 32,
        boot_id=host.boot_id(),
        user_id=1500,
        command="x" * 100_000,
    )

    def store(number: int) -> None:
        entry.nodes = [["node-2", "node-2:7070", [f"10.0.0.{number}"]]]
        ranks.put(entry)
        json.loads((ranks.folder / f"{entry.uid}.home.json").read_text())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(store, range(400)))
    assert Ranks(tmp_path).all() == [entry]
