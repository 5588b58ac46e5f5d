"""Measures what snapshots of a data-parallel job of four ranks send to the nodes that keep copies, in a lab.

python -m integration.bench_copies --width 131072 --pace-s 1 --snapshots 3
"""

from __future__ import annotations

import argparse
import json

from integration.harness import cluster
from integration.torch_jobs import HOMES, at_rest

_ROW = "| {} | {:.0f} MiB | {:.0f} MiB | {:.2f} | {:.1f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", default="131072", help="of the trained model: 131072 has 64 MiB of weights")
    parser.add_argument("--pace-s", default="1", help="pause between two steps")
    parser.add_argument("--snapshots", type=int, default=3)
    options = parser.parse_args()
    with cluster("copies", HOMES) as nodes, at_rest(nodes) as lab:
        how = ("--width", options.width, "--pace-s", options.pace_s, "--until", "{end}")
        job = lab.plain("ddp.py", *how, nodes=HOMES, name="copies")
        job.await_steps(3, 300)
        print(
            "| snapshot | one rank | sent for all ranks | sent ÷ one rank | time to send |\n| --- | --- | --- | --- | --- |"
        )
        for number in range(1, options.snapshots + 1):
            done = nodes.migrator("job", "snapshot", job.name, "--json", timeout_s=600)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            said = json.loads(done.stdout)
            sent_bytes = said["copied_bytes"]
            rank_bytes = (said["bytes"] - sent_bytes) / len(HOMES)
            (copying,) = [phase["seconds"] for phase in said["phases"] if phase["name"] == "copy"]
            sizes = rank_bytes / 2**20, sent_bytes / 2**20
            print(_ROW.format(number, *sizes, sent_bytes / rank_bytes, copying), flush=True)
            job.await_progress(2, 300)
        job.end.touch()
        job.finish(600)


if __name__ == "__main__":
    main()
