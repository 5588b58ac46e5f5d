"""Signals of a real GPU: its counters, and what an autopilot does after a line of the driver in the log of the kernel."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.gpu.gpu_jobs import SOURCE, Training, needs_cuda, record, undisturbed_runs
from integration.harness import Cluster, until
from integration.pilot import Pilot
from snapshotd.cuda import nvml_health
from snapshotd.health.gpus import NAMES

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_cuda()]

FOLDER = Path(__file__).parents[1] / ".work" / "gpu"
FLAGS = ("--gib", "0.25", "--steps", "3000")
#: Names of nvidia-smi and of our readings that must be equal, or missing in both.
SAME = {
    "uuid": "uuid",
    "pci.bus_id": "pci",
    "ecc.errors.corrected.volatile.total": "ecc_corrected",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
    "pcie.link.width.max": "pcie_width_max",
    "pcie.link.gen.max": "pcie_generation_max",
}
POLICY = """
[[rules]]
name = "failing GPU"
checks = ["gpu-xid"]
action = "move"

[breaker]
nodes_percent = 80
"""


def test_readings_are_those_of_nvidia_smi() -> None:
    fields = [*SAME, "temperature.gpu"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    readings = nvml_health.readings()["gpus"]
    record("nvml-health", readings=readings)
    assert len(readings) == len(shown)
    for reading, row in zip(readings, csv.reader(shown, skipinitialspace=True), strict=True):
        said = dict(zip(fields, row, strict=True))
        assert reading["lost"] == ""
        for name, ours in SAME.items():
            assert str(reading.get(ours, "[N/A]")) == said[name], name
        assert abs(reading["temperature_c"] - int(said["temperature.gpu"])) < 15


def health(nodes: Cluster, node: str) -> dict[str, Any]:
    (found,) = json.loads(nodes.migrator("health", node, "--json").stdout)["nodes"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def pilot(nodes: Cluster) -> Iterator[Pilot]:
    made = Pilot(nodes, POLICY)
    yield made
    made.reset()


def test_autopilot_sees_a_failing_gpu_and_says_why_its_rank_stays(nodes: Cluster, pilot: Pilot) -> None:
    """The checks run on a healthy GPU without an alarm. Then a line of the driver's raises one for that GPU. The nodes of
    this lab share one GPU, so none has a free one: the autopilot says so and moves nothing."""
    training = Training.start(nodes, "gpu-health", FLAGS)
    with undisturbed_runs(FOLDER) as runs:
        alone = runs.want(FLAGS)
        training.await_steps(20)

        def unread() -> list[dict[str, Any]]:
            return [
                one for one in health(nodes, SOURCE)["checks"] if one["name"] in NAMES and one["state"] != "running"
            ]

        until("every check of the GPU to run", lambda: not unread() or None, 120)
        assert health(nodes, SOURCE)["alarms"] == []
        pilot.start()
        (reading,) = nvml_health.readings()["gpus"][:1]
        address = reading["pci"].lower().removeprefix("0000").removesuffix(".0")
        pilot.kernel_says(SOURCE, f"NVRM: Xid (PCI:{address}): 48, pid=1, An uncorrectable double bit error")
        until("the alert", lambda: pilot.rows("SELECT text FROM alerts WHERE text LIKE '%no node can take it%'"), 120)
        (alarm,) = health(nodes, SOURCE)["alarms"]
        assert (alarm["check"], alarm["subject"]) == ("gpu-xid", f"gpu:{reading['uuid']}")
        assert pilot.results() == []
        steps = training.ends_as(alone)
    record("autopilot-alerts", steps=steps, alarm=alarm, alerts=pilot.rows("SELECT text FROM alerts"))
