"""Asks the fakes of libcuda and NVML from a child process, as a program would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fakes.cuda_fake import GpuNode
from tests.fakes.device_job import DeviceJob

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
ASK = Path(__file__).parent / "cuda_ask.py"
CRIU = Path(__file__).resolve().parents[2] / ".criu" / "criu"
DEVICE_BYTES = 16 << 20
MIB = 1 << 20


def asking(node: GpuNode, call: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ASK, call, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **node.environment},
    )


def ask(node: GpuNode, call: str, *arguments: object) -> dict[str, Any]:
    with asking(node, call, *arguments) as asker:
        out, _ = asker.communicate(timeout=60)
    assert asker.returncode == 0, (call, out)
    answer: dict[str, Any] = json.loads(out)
    return answer


def error(node: GpuNode, call: str, *arguments: object) -> str:
    return str(ask(node, call, *arguments)["error"]).removeprefix("CUDA_").removeprefix("ERROR_")


def state(node: GpuNode, pid: int) -> int:
    answer = ask(node, "state", pid)
    assert answer["error"] == "CUDA_SUCCESS"
    return int(answer["state"])


def used(node: GpuNode) -> list[dict[str, int]]:
    """Per GPU: bytes by pid."""
    found = ask(node, "nvml")["gpus"]
    for gpu in found:
        assert gpu["used"] == sum(gpu["processes"].values())
    return [gpu["processes"] for gpu in found]


def alone(node: GpuNode, tmp_path: Path, *options: str) -> list[str]:
    """The output of an undisturbed run."""
    job = DeviceJob(tmp_path / "alone", node.environment, *options, "--pace-s", "0")
    try:
        return job.finish()
    finally:
        job.end()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def device_mappings(pid: int) -> list[str]:
    return [line.split()[0] for line in maps(pid).splitlines() if line.startswith("3000")]
