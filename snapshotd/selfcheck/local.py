"""The checks that need no other process of the daemon: `python -m snapshotd.selfcheck.local`, for a daemon that runs.

Reads {"criu", "criu_version", "image_dir", "snapshot_spill_dir", "tls": {"ca", "cert", "key"}, "paths"} as JSON from stdin,
and prints one JSON object per line as results arrive: {"check", "state", "text", "remedy"}, or {"path", "file_system",
"source"}. A check may hang, in the kernel too. So this is a process of its own, which the daemon kills after a while.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snapshotd.api.credentials import Credentials
from snapshotd.proc import mountinfo
from snapshotd.selfcheck import kernel, parts, spilling
from snapshotd.selfcheck.finding import Finding, failed

#: In the order in which they are shown.
CHECKS = ("criu", "shim", "certificates", "images", spilling.CHECK, "cgroup", "kernel", "time-namespace", "descriptors")
#: For a check that has no result.
ADVICE = "run `snapshotd --check` on the node"


def main() -> None:
    asked = json.load(sys.stdin)
    credentials = Credentials(**{name: Path(path) for name, path in asked["tls"].items()})
    config: Any = SimpleNamespace(
        criu=asked["criu"],
        criu_version=asked["criu_version"],
        image_dir=Path(asked["image_dir"]),
        snapshot_spill_dir=asked["snapshot_spill_dir"],
        credentials=credentials,
    )
    works: list[Callable[[], object]] = [
        lambda: parts.criu(config),
        parts.shim_libraries,
        lambda: parts.certificate(config),
        lambda: kernel.images(config),
        lambda: spilling.spilling(config),
        kernel.cgroups,
        kernel.features,
        kernel.time_namespace,
        kernel.descriptors,
    ]
    named = [*zip(CHECKS, works, strict=True), *((path, _looking_at(path)) for path in asked["paths"])]
    writing = threading.Lock()

    def do(name: str, work: Callable[[], object]) -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks have results
            if name not in CHECKS:
                return  # a path that does not answer
            result = failed(name, f"the check itself fails: {error!r}", ADVICE)
        with writing:
            for each in result if isinstance(result, list) else [result]:
                print(json.dumps(dataclasses.asdict(each) if isinstance(each, Finding) else each), flush=True)

    threads = [threading.Thread(target=do, args=each, daemon=True) for each in named]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _looking_at(path: str) -> Callable[[], object]:
    return lambda: path_facts(path)


def path_facts(path: str) -> dict[str, str]:
    """The file system that has `path`; an empty one if there is no such path."""
    best = mountinfo.mount_of(Path(path))
    if best is None or not Path(path).exists():
        return {"path": path, "file_system": "", "source": ""}
    return {"path": path, "file_system": best.kind, "source": best.source}


if __name__ == "__main__":
    main()
