"""The kernel's log of a lab's node, which is a file: a line there is what its daemon takes for a message of the kernel."""

from __future__ import annotations

import time

from migrator.lab import Lab


def kernel_says(lab: Lab, node: str, text: str) -> None:
    path = lab.layout.node(node) / "health/dev/kmsg"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"4,{time.time_ns()},{int(time.monotonic() * 1e6)},-;{text}\n")
