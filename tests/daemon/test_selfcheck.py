"""`snapshotd --check`: every part is started once; what is broken is named, with a remedy."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from migrator import pki
from shim.keeper import library
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig
from snapshotd.criu.find import PRIVATE
from snapshotd.inprocess import symbols
from snapshotd.proc import host, mountinfo
from snapshotd.proc.mountinfo import Mount
from snapshotd.runtime.blocking import in_thread
from snapshotd.selfcheck import every, kernel, parts, processes, spilling
from snapshotd.selfcheck.finding import Finding, State
from tests.daemon.test_main import REPO, Place, place  # noqa: F401
from tests.fakes.cuda_fake import GpuNode
from tests.fakes.cuda_fake import gpus as some_gpus
from tests.installation import NOBODY, readable_copy, readable_python
from tests.shim.jobs import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="snapshotd runs as root only")

PARTS = (
    *("imports", "criu", "shim", "gpu", "certificates", "network"),
    *("images", "snapshot-disk", "cgroup", "kernel", "time-namespace", "descriptors"),
)


def check(place: Place, option: str = "--check") -> tuple[int, dict[str, str], str]:  # noqa: F811
    """Exit status, the state of each check, and the whole output. In a process, as an operator runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "snapshotd.main", "--config", str(place.config), option],
        cwd=REPO,
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    words = [line.split() for line in done.stdout.splitlines()]
    states = {line[1]: line[0] for line in words if line[0] in list(State)}
    return done.returncode, states, done.stdout + done.stderr


def with_real_criu(place: Place) -> None:  # noqa: F811
    text = place.config.read_text()
    place.config.write_text(text.replace(f'criu = "{place.folder}/criu"', f'criu = "{PRIVATE[1]}"'))


def test_disk_for_snapshots_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_ram_backed", lambda _path: False)  # folders of tests may be in memory

    def found(folder: str) -> Finding:
        config: Any = SimpleNamespace(snapshot_spill_dir=folder)
        return spilling.spilling(config)

    assert found("").state is State.OK
    assert found(str(tmp_path / "none")).state is State.FAILED
    disk = tmp_path / "disk"
    disk.mkdir()
    good = found(str(disk))
    assert good.state is State.OK or "free space" in good.remedy, good
    assert list(disk.iterdir()) == []
    monkeypatch.setattr(mountinfo, "mount_of", lambda path: Mount(path, "nfs4", (), 0, "server:/export"))
    assert "no local disk" in found(str(disk)).text
    (disk / "file").touch()
    assert "not empty" in found(str(disk)).text


@pytest.mark.parametrize("option", ["--check", "--check-config"])
def test_every_part_is_started_once(place: Place, option: str) -> None:  # noqa: F811
    if not PRIVATE[1].exists():
        pytest.skip("CRIU is not in the checkout: run `make setup`")
    with_real_criu(place)
    status, states, output = check(place, option)
    assert status == 0, output
    assert set(states) == set(PARTS)
    assert set(states.values()) <= {"ok", "warning"}, output
    assert not (place.folder / "run").exists(), "nothing of it is left"
    # A test in another process may have one at this moment.
    until(lambda: not list(Path("/run").glob("snapshotd-check-*")), "no folder of a check is left")


def test_a_running_daemon_is_not_disturbed(place: Place) -> None:  # noqa: F811
    daemon = place.start()
    place.hear("READY=1")
    status, states, output = check(place)
    assert status == 0, output
    assert f"snapshotd (pid {daemon.pid}) listens on 127.0.0.1:{place.port}" in output
    assert states["network"] == "ok"
    assert daemon.poll() is None
    assert place.admin.exists()


def test_a_port_that_is_taken_and_a_criu_that_fails_are_both_named(place: Place) -> None:  # noqa: F811
    criu = place.folder / "criu"
    failing = "[ \"$1\" = check ] && { echo 'Error (criu/kerndat.c): no such feature'; exit 1; }"
    criu.write_text(f"#!/bin/sh\n{failing}\necho 'Version: 4.2.1'\n")
    with socket.socket() as other:
        other.bind(("127.0.0.1", place.port))
        other.listen()
        status, states, output = check(place)
    assert status == BadConfig.exit_code
    assert {name for name, state in states.items() if state == "failed"} == {"criu", "network"}
    assert "check: Error (criu/kerndat.c): no such feature" in output
    assert f"127.0.0.1:{place.port}" in output
    assert "2 of 12 checks failed: criu, network" in output
    assert output.count("remedy: ") >= 3


def test_a_module_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('no NVML here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = parts.imports()
    assert found.state is State.FAILED
    assert "pynvml: ImportError: no NVML here" in found.text


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "lib"
    shutil.copytree(library.FOLDER, folder)
    monkeypatch.setattr(parts, "_LIBRARIES", folder)
    monkeypatch.setattr(symbols, "_INSTALLED", folder)
    assert parts.shim_libraries().state is State.OK
    return folder


def test_a_missing_library_is_named(libraries: Path) -> None:
    (libraries / "libcriufiles.so").unlink()
    assert_failed(parts.shim_libraries(), "lacks libcriufiles.so")
    (libraries / library.OFFLOAD_LIBRARY).unlink()
    assert_failed(parts.shim_libraries(), f"{library.OFFLOAD_LIBRARY} is missing")


def test_a_library_of_another_interface_version_is_named(libraries: Path) -> None:
    path = libraries / library.DRIVER_LIBRARY
    version = library.read(path).abi
    before, after = (b"SNAPSHIM" + struct.pack("<I", number) for number in (version, version + 1))
    path.write_bytes(path.read_bytes().replace(before, after))
    assert_failed(parts.shim_libraries(), f"has version {version + 1} of the interface")


def assert_failed(found: Finding, text: str) -> None:
    assert found.state is State.FAILED, found
    assert text in found.text
    assert found.remedy


async def test_gpus_are_listed_and_a_broken_driver_is_named(tmp_path: Path) -> None:
    node = GpuNode(tmp_path / "node", some_gpus("node-1", 2, memory_mib=1024))
    config = SimpleNamespace(gpu_library_dir=node.library_dir)
    found = await processes.gpu(config)  # type: ignore[arg-type]
    assert found.text == "2 GPUs, driver 580.159.04"
    (Path(node.library_dir) / "libcuda.so.1").unlink()
    (Path(node.library_dir) / "libcuda.so.1").write_bytes(b"not a library")
    assert_failed(await processes.gpu(config), "the CUDA driver cannot be used: ")  # type: ignore[arg-type]


def test_a_certificate_that_expires_soon_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pki, "LEAF_VALID", timedelta(days=7))
    pki.init(tmp_path / "ca")
    identity = pki.issue_node(tmp_path / "ca", "node-1")
    credentials = Credentials(identity.ca, identity.cert, identity.key)
    (found,) = parts.certificate(SimpleNamespace(credentials=credentials))  # type: ignore[arg-type]
    assert found.state is State.WARNING
    assert "expires on" in found.text
    assert found.remedy.startswith("run `migrator cluster rotate`")


@pytest.mark.parametrize(("size", "state"), [("64k", State.FAILED), ("16m", State.WARNING)])
def test_a_tmpfs_that_is_too_small_is_named(tmp_path: Path, size: str, state: State) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", tmp_path], check=True)
    try:
        found = kernel.images(SimpleNamespace(image_dir=tmp_path / "images"))  # type: ignore[arg-type]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert found.state is state, found
    assert "tmpfs" in found.remedy


def test_a_cgroup_that_cannot_be_frozen_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.proc.cgroup.mount_point", lambda: tmp_path)
    assert_failed(kernel.cgroups(), "a cgroup cannot be made, frozen and killed")


def test_no_cgroup_is_left() -> None:
    assert kernel.cgroups().state is State.OK
    assert not kernel.check_cgroup(os.getpid()).exists()


def test_a_time_namespace_that_is_denied_is_named(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program as a user who may not make one."""
    copy = readable_copy(open_folder / "installation")
    python = open_folder / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(NOBODY)} env PYTHONPATH={copy} {readable_python()} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert_failed(kernel.time_namespace(), "unshare: Operation not permitted")


def test_a_kernel_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux 5.10 has no cgroup.kill. Its hierarchy is a folder with the files that it has."""
    (tmp_path / "system.slice").mkdir()
    (tmp_path / "system.slice/cgroup.freeze").touch()
    monkeypatch.setattr("snapshotd.preflight.node.mountinfo.cgroup2_root", lambda: tmp_path)
    monkeypatch.setattr("snapshotd.proc.host.kernel", lambda: "5.10.0-32-amd64")
    found = kernel.features()
    assert_failed(found, "Linux 5.10.0-32-amd64 lacks: cgroup.kill in cgroup v2 (Linux 5.14)")
    assert found.remedy == "use Linux 5.14 or newer"


def test_few_descriptors_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    found = kernel.descriptors()
    assert (found.state, found.text) == (State.WARNING, "at most 1024 open files")


def test_lines_have_the_remedy_below() -> None:
    found = Finding("images", State.FAILED, "too small", "make it larger")
    assert found.lines() == f"failed   images          too small\n{'':24} remedy: make it larger"


async def test_a_check_that_fails_itself_is_a_finding() -> None:
    def broken() -> Finding:
        raise ModuleNotFoundError("No module named 'pycriu'")

    found = await every._result("criu", in_thread(broken))
    assert [(each.check, each.state) for each in found] == [("criu", State.FAILED)]
    assert "No module named 'pycriu'" in found[0].text
    assert found[0].remedy
