"""The InfiniBand plugin of the real NCCL works with the fake libibverbs, and the shim closes the devices that it opens.

No GPU is needed, but the library of NCCL 2.28.9 for this machine's processor: torch's, or the one that $REAL_NCCL_LIBRARY
names (`pip download --no-deps nvidia-nccl-cu13==2.28.9`).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from integration.gpu import ib_plugin
from integration.gpu.nccl_probe import SHIM
from integration.harness import until
from snapshotd.inprocess import ncclctl
from snapshotd.proc import tree
from tests.fakes import verbs_fake

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


def library() -> Path | None:
    if given := os.environ.get("REAL_NCCL_LIBRARY"):
        return Path(given)
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    found = [Path(folder) / "nccl" / "lib" / "libnccl.so.2" for folder in folders or ()]
    return next((path for path in found if path.exists()), None)


LIBRARY = library()
pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        LIBRARY is None, reason="no NVIDIA NCCL beside torch: install torch for CUDA, or set REAL_NCCL_LIBRARY"
    ),
]


def command(*words: str) -> list[str]:
    return [*verbs_fake.with_devices(1), sys.executable, "-m", ib_plugin.__name__, str(LIBRARY), *words]


def environment(**more: str) -> dict[str, str]:
    own = {"LD_LIBRARY_PATH": str(verbs_fake.build()), "FAKE_VERBS_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo"}
    return {**os.environ, **verbs_fake.REAL_NCCL, **own, "NCCL_DEBUG": "INFO", **more}


def run(words: Sequence[str], **more: str) -> str:
    done = subprocess.run(
        command(*words), cwd=ROOT, env=environment(**more), capture_output=True, text=True, check=False
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, f"{done.returncode}: {text}"
    return text


def test_communicators_choose_the_fake_device() -> None:
    text = run(["init"])
    assert "Assigned NET plugin IB to comm" in text
    assert "ncclNetInit returned 0" in text


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NCCL_IB_USE_INLINE": "1", "NCCL_IB_QPS_PER_CONNECTION": "2", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"},
        {"NCCL_IB_ADAPTIVE_ROUTING": "1", "NCCL_IB_PCI_RELAXED_ORDERING": "0"},
    ],
    ids=["default", "inline-two-queue-pairs", "data-before-immediate"],
)
def test_data_arrives_through_queue_pairs(variables: dict[str, str]) -> None:
    assert "carried" in run(["data"], **variables)


def test_shim_closes_the_devices_and_ends_the_thread(tmp_path: Path) -> None:
    end, out = tmp_path / "end", tmp_path / "out"
    with out.open("wb") as file:
        more = {"LD_PRELOAD": str(SHIM), "NCCL_SET_THREAD_NAME": "1"}
        running = subprocess.Popen(
            command("data", str(end)), cwd=ROOT, env=environment(**more), stdout=file, stderr=file
        )
    try:
        until("data", lambda: running.poll() is not None or "carried" in out.read_text(), PATIENCE_S)
        assert running.poll() is None, out.read_text()
        process = tree.Process.of(running.pid)
        ncclctl.close(process)
        before = ncclctl.read(process)
        assert [(device.device, device.nccl) for device in before.rdma or ()] == [("fakeib0", True)]
        assert before.threads == 1
        ncclctl.detach(process, [], PATIENCE_S)
        ncclctl.close_devices(process, PATIENCE_S)
        after = ncclctl.read(process)
        assert after.rdma == ()
        assert after.threads == 0
        open_files = [os.readlink(one) for one in Path(f"/proc/{running.pid}/fd").iterdir() if one.is_symlink()]
        assert not [name for name in open_files if name.startswith(verbs_fake.FOLDER)]
        assert verbs_fake.FOLDER not in Path(f"/proc/{running.pid}/maps").read_text()
        end.touch()
        assert running.wait(PATIENCE_S) == 0, out.read_text()
    finally:
        running.kill()
        running.wait()
