"""Tests that forked children of a CUDA process drop what they inherited of the GPU, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.shim.jobs import Job, python

Start = Callable[..., Job]

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.getuid() != 0, reason="a /dev of its own needs root")]

#: Files stand for the devices, in a /dev that only the job sees.
_MAKE = (
    "mount -t tmpfs none /dev; mkdir /dev/nvidia-caps; mknod /dev/zero c 1 5; "
    "for f in nvidia0 nvidiactl nvidia-uvm nvidia-caps/nvidia-cap1 null; do truncate -s 64K /dev/$f; done; "
    'exec "$@"'
)
DEVICES = ("unshare", "--mount", "sh", "-ec", _MAKE, "sh")

JOB = """
import ctypes, json, mmap, os, subprocess, sys
ctypes.CDLL(None)
devices = sys.argv[1].split()
opened = {name: os.open("/dev/" + name, os.O_RDWR) for name in devices}
maps = [mmap.mmap(fd, 16384, mmap.MAP_SHARED, mmap.PROT_READ) for fd in opened.values() for _ in range(3)]
zero = os.open("/dev/zero", os.O_RDWR)
pinned = mmap.mmap(zero, 8192, mmap.MAP_SHARED)
pinned[:6] = b"pinned"
def look(name):
    lines = open("/proc/self/maps").read().splitlines()
    ranges = [[line.split()[0], line.split()[1], line.split(maxsplit=5)[5]] for line in lines if len(line.split()) > 5]
    empty = [[line.split()[0], line.split()[1]] for line in lines if len(line.split()) == 5]
    at = "/proc/self/fd/"
    fds = {fd: os.readlink(at + fd) for fd in os.listdir(at) if os.path.exists(at + fd)}
    found = {"who": name, "errno": ctypes.get_errno(), "pinned": pinned[:6].decode()}
    found["devices"] = [entry for entry in ranges if entry[2].startswith("/dev/nvidia")]
    found["zero"] = [entry for entry in ranges if entry[2].startswith("/dev/zero")]
    found["reserved"] = [entry[0] for entry in empty if entry[1].startswith("---")]
    found["fds"] = sorted(path for path in fds.values() if path.startswith("/dev/nvidia"))
    found["other"] = sorted(fd for fd, path in fds.items() if not path.startswith(("/dev/nvidia", "/proc")))
    return found
before = look("before")
read_end, write_end = os.pipe()
if os.fork() == 0:
    child = look("child")
    if os.fork() == 0:
        child["grandchild"] = look("grandchild")
        os.write(write_end, json.dumps(child).encode())
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
child = json.loads(os.read(read_end, 1 << 20))
spawned = subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True).stdout
print(json.dumps({"before": before, "child": child, "after": look("after"), "spawned": spawned}), flush=True)
"""


def _look(start: Start, devices: str) -> dict[str, Any]:
    job = start(*DEVICES, *python(JOB), devices)
    line, errors, status = job.finish()
    assert (errors, status) == ("", 0)
    found: dict[str, Any] = json.loads(line)
    return found


def test_child_of_a_cuda_process_drops_gpu_descriptors_and_mappings(start: Start) -> None:
    found = _look(start, "nvidiactl nvidia-uvm nvidia0 nvidia-caps/nvidia-cap1")
    before, child, after = found["before"], found["child"], found["after"]
    assert len({path for _, _, path in before["devices"]}) == 4
    assert len(before["fds"]) == 16, "its own, and one that each mapping keeps"
    assert child["devices"] == []
    assert child["fds"] == []
    reserved = [tuple(int(end, 16) for end in entry.split("-")) for entry in child["reserved"]]
    for entry, _, _ in before["devices"]:
        start_at, end_at = (int(end, 16) for end in entry.split("-"))
        assert any(low <= start_at and end_at <= high for low, high in reserved), "the address space stays taken"
    assert (child["zero"], child["pinned"]) == (before["zero"], "pinned")
    assert set(before["other"]) < set(child["other"]), "the pipe came later"
    assert (child["grandchild"]["devices"], child["grandchild"]["pinned"]) == ([], "pinned")
    assert (after["devices"], after["fds"]) == (before["devices"], before["fds"]), "the parent, also after vfork"
    assert found["spawned"] == "5\n"


def test_child_of_a_process_that_only_uses_nvml_keeps_its_descriptors(start: Start) -> None:
    found = _look(start, "nvidiactl nvidia0")
    assert found["child"]["devices"] == found["before"]["devices"]
    assert found["child"]["fds"] == found["before"]["fds"]
    assert found["before"]["fds"] != []
