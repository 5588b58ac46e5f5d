"""Signs of failing hardware in a lab: errors of a GPU and lines of the kernel's log become alarms that stay until cleared."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.gpu_nodes import GpuCluster
from integration.harness import until

NODE, OTHER = "node-1", "node-2"


@pytest.fixture
def cleared(lab: GpuCluster) -> Iterator[GpuCluster]:
    """Alarms of other tests, which change GPUs while daemons watch them, are cleared before and after."""
    lab.cluster.migrator("health", "--clear", "all", *lab.lab.nodes)
    yield lab
    lab.cluster.migrator("health", "--clear", "all", *lab.lab.nodes)


def health(lab: GpuCluster, node: str) -> dict[str, Any]:
    (found,) = json.loads(lab.cluster.migrator("health", node, "--json").stdout)["nodes"]
    assert isinstance(found, dict)
    return found


def alarms(lab: GpuCluster, node: str, check: str) -> list[tuple[str, str]]:
    found = health(lab, node)["alarms"]
    return [(alarm["subject"], alarm["severity"]) for alarm in found if alarm["check"] == check]


def kernel_says(lab: GpuCluster, node: str, text: str) -> None:
    """Into the file that is the kernel's log for the daemon of this node."""
    path: Path = lab.lab.layout.node(node) / "health/dev/kmsg"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"4,{time.time_ns()},{int(time.monotonic() * 1e6)},-;{text}\n")


def test_errors_of_a_gpu_raise_an_alarm_that_a_restart_keeps_and_an_operator_clears(cleared: GpuCluster) -> None:
    lab = cleared
    made = lab.nodes[NODE]
    until("the GPUs to be read", lambda: _state(lab, NODE, "gpu-ecc") == "running")
    before = health(lab, NODE)
    made.change(ecc_uncorrected=made.gpus[0].ecc_uncorrected + 2)
    expected = [(f"gpu:{made.gpus[0].uuid}", "critical")]
    until("the alarm", lambda: alarms(lab, NODE, "gpu-ecc") == expected)
    assert alarms(lab, OTHER, "gpu-ecc") == []
    lab.restart(NODE)
    after = until("the daemon to answer", lambda: _answer(lab, NODE))
    assert alarms(lab, NODE, "gpu-ecc") == expected
    assert after["epoch"] == before["epoch"]
    assert after["sequence"] > before["sequence"]
    done = lab.cluster.migrator("health", "--clear", "gpu-ecc", NODE)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"{NODE}: 1 alarms cleared")
    until("the GPUs to be read", lambda: _state(lab, NODE, "gpu-ecc") == "running")
    assert alarms(lab, NODE, "gpu-ecc") == [], "the same errors do not raise it again"
    made.change(lost=True)
    until("the alarm", lambda: alarms(lab, NODE, "gpu-lost") == expected)


def test_a_line_of_the_drivers_in_the_kernels_log_names_the_gpu(cleared: GpuCluster) -> None:
    lab = cleared
    until("the GPUs to be read", lambda: _state(lab, NODE, "gpu-ecc") == "running")
    kernel_says(lab, NODE, "NVRM: Xid (PCI:0000:10:00): 79, pid='<unknown>', GPU has fallen off the bus.")
    expected = [(f"gpu:{lab.nodes[NODE].gpus[0].uuid}", "critical")]
    until("the alarm", lambda: alarms(lab, NODE, "gpu-xid") == expected)
    shown = lab.cluster.migrator("health", NODE)
    assert shown.returncode == 10
    assert "fallen off the bus" in shown.stdout
    assert alarms(lab, OTHER, "gpu-xid") == [], "the log of another node is another file"


def _answer(lab: GpuCluster, node: str) -> dict[str, Any] | None:
    done = lab.cluster.migrator("health", node, "--json")
    return health(lab, node) if '"alarms"' in done.stdout else None


def _state(lab: GpuCluster, node: str, check: str) -> str:
    return next((found["state"] for found in health(lab, node)["checks"] if found["name"] == check), "")
