"""The root file system of the nodes: a small Debian with systemd, made by mmdebstrap from the machine's own registries.

Invariant: a complete image is never changed. It is kept outside the repository, by the hash of what was asked for, and
every node gets a copy. It has what the Debian package depends on, so that apt installs the package without a network.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

PACKAGES = (
    "dbus",
    "dbus-user-session",
    "iproute2",
    "libnftables1",
    "libpam-systemd",
    "nftables",
    "openssh-client",
    "openssh-server",
    "procps",
    "python3",
    "systemd",
    "systemd-sysv",
)
#: Programs without which no node can be booted, and the Debian packages that have them.
NEEDED = {"mmdebstrap": "mmdebstrap", "systemd-nspawn": "systemd-container", "dpkg-deb": "dpkg"}


def lacking() -> str:
    """Why nodes cannot be booted on this machine, or ""."""
    if os.geteuid() != 0:
        return "systemd nodes need root"
    missing = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    if missing:
        return f"systemd nodes need: apt-get install {' '.join(missing)}"
    return ""


def cache() -> Path:
    """The folder for what takes long to make and does not change."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snapshotd-systemd"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def root_image() -> Path:
    """The folder of the image. Made if it is missing, which takes a minute and the registries."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = release["VERSION_CODENAME"].strip('"')
    key = hashlib.sha256("\n".join((suite, *PACKAGES)).encode()).hexdigest()[:12]
    image = cache() / f"{suite}-{key}"
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.exists():
            _make(image, suite)
    return image


def _make(image: Path, suite: str) -> None:
    """mmdebstrap uses apt with the sources of this machine, and with its settings for reaching them."""
    acquire = image.with_name("acquire.conf")
    dump = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout
    acquire.write_text("".join(f"{line}\n" for line in dump.splitlines() if line.startswith("Acquire::")))
    sources = [*Path("/etc/apt").glob("sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))]
    unfinished = image.with_name(f"{image.name}.new")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(PACKAGES)}", f"--aptopt={acquire}"]
    done = subprocess.run(
        [*command, suite, str(unfinished), *map(str, sources)], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"mmdebstrap failed:\n{done.stderr[-2000:]}"
    unfinished.rename(image)
