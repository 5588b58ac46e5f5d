"""What the daemon needs of the kernel, tried."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

from snapshotd.api.errors import SnapshotError
from snapshotd.config import Config
from snapshotd.preflight.node import kernel_problems
from snapshotd.proc import cgroup, host
from snapshotd.runtime.child_process import environment
from snapshotd.selfcheck.finding import Finding, failed, ok, warning

_FREEZE_S = 10.0
_FEW_DESCRIPTORS = 8192
_SMALL_BYTES = 1 << 30
_PROBE_BYTES = 1 << 20


def cgroups() -> Finding:
    """Makes a cgroup with a process in it, and freezes and kills that."""
    remedy = (
        "boot with cgroup v2 (`systemd.unified_cgroup_hierarchy=1`), and give snapshotd the rights of its unit file"
    )
    place: cgroup.Cgroup | None = None
    try:
        place = check_cgroup(os.getpid()).create()
        with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as process:
            try:
                place.add(process.pid)
                place.freeze(_FREEZE_S)
                place.kill(_FREEZE_S)
            finally:
                with contextlib.suppress(OSError):
                    place.thaw(_FREEZE_S)
                process.kill()
    except (OSError, SnapshotError) as error:
        return failed("cgroup", f"a cgroup cannot be made, frozen and killed: {error}", remedy)
    finally:
        if place is not None:
            place.remove()
    return ok("cgroup", f"made, frozen and killed in {place.path.parent}")


def check_cgroup(pid: int) -> cgroup.Cgroup:
    """The cgroup of a process that checks. Not beside its own, which may be that of a login or of a container's manager."""
    return cgroup.Cgroup(cgroup.mount_point() / f"snapshotd-check-{pid}")


def remove_cgroup(pid: int) -> None:
    """Removes what `cgroups` has left in a process that was killed meanwhile."""
    with contextlib.suppress(OSError, SnapshotError):
        left = check_cgroup(pid)
        if left.exists():
            left.kill(_FREEZE_S)
            left.remove()


def features() -> Finding:
    problems = kernel_problems()
    if problems:
        return failed("kernel", f"Linux {host.kernel()} lacks: {', '.join(problems)}", "use Linux 5.14 or newer")
    return ok("kernel", f"Linux {host.kernel()}, {host.architecture()}")


def time_namespace() -> Finding:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "snapshotd.selfcheck.enter_time_namespace"],
        env=environment(site_packages=True),
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = (done.stdout or done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
    if done.returncode != 0:
        remedy = "use a kernel with CONFIG_TIME_NS (Linux 5.6), and run snapshotd outside containers that deny it"
        return failed("time-namespace", f"no time namespace can be made: {said[-1]}", remedy)
    return ok("time-namespace", said[-1])


def images(config: Config) -> Finding:
    """The store of images: Config.load has checked that it is in memory."""
    place = config.image_dir
    while not place.exists():
        place = place.parent
    try:
        room = os.statvfs(place)
        descriptor = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        return failed(
            "images", f"{place} cannot be written to: {error.strerror}", "mount a tmpfs there, and free memory"
        )
    size = room.f_blocks * room.f_frsize
    text = f"{config.image_dir}: {size / 1e9:.1f} GB, {room.f_bavail * room.f_frsize / 1e9:.1f} GB of them free"
    if size < _SMALL_BYTES:
        remedy = (
            f"make the tmpfs larger (`mount -o remount,size=50% {place}`): it takes the host memory of a moved rank"
        )
        return warning("images", text, remedy)
    return ok("images", text)


def descriptors() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FEW_DESCRIPTORS:
        remedy = f"set LimitNOFILE to at least {_FEW_DESCRIPTORS}: a rank needs two, and a move one for each connection"
        return warning("descriptors", f"at most {hard} open files", remedy)
    return ok(
        "descriptors", "at most " + ("any number of" if hard == resource.RLIM_INFINITY else str(hard)) + " open files"
    )


def holder_of_lock(run_dir: Path) -> int | None:
    """The process id of the daemon that serves `run_dir`; None if there is none."""
    import fcntl

    try:
        descriptor = os.open(run_dir / "snapshotd.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
    return None
