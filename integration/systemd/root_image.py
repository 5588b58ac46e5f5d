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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Release:
    """A distribution whose roots can be made on another one, from its own registry. An environment variable has the address
    of that: SNAPSHOT_REGISTRY_DEBIAN or SNAPSHOT_REGISTRY_UBUNTU."""

    suite: str
    registry: str
    components: str
    keyring: Path

    def sources(self) -> list[str]:
        return [f"deb [signed-by={self.keyring}] {self.registry} {self.suite} {self.components}"]


_KEYRINGS = Path("/usr/share/keyrings")
RELEASES = {
    "debian-13": Release(
        "trixie", os.environ.get("SNAPSHOT_REGISTRY_DEBIAN", ""), "main", _KEYRINGS / "debian-archive-keyring.gpg"
    ),
    # For arm64 the first one that is in this registry; its older releases have amd64 there alone.
    "ubuntu-26.04": Release(
        "resolute",
        os.environ.get("SNAPSHOT_REGISTRY_UBUNTU", ""),
        "main universe",
        _KEYRINGS / "ubuntu-archive-keyring.gpg",
    ),
}


def root_image(release: Release | None = None, more: tuple[str, ...] = ()) -> Path:
    """The folder of the image, of this machine's release if none is given, with `more` packages. Made if it is missing."""
    if release is None:
        lines = Path("/etc/os-release").read_text().splitlines()
        suite = dict(line.split("=", 1) for line in lines if "=" in line)["VERSION_CODENAME"].strip('"')
        own = [*Path("/etc/apt").glob("sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))]
        sources = [str(path) for path in own]
    else:
        suite, sources = release.suite, release.sources()
    key = hashlib.sha256("\n".join((suite, *PACKAGES, *more)).encode()).hexdigest()[:12]
    image = cache() / f"{suite}-{key}"
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.exists():
            _make(image, suite, sources, (*PACKAGES, *more))
    return image


def _make(image: Path, suite: str, sources: list[str], packages: tuple[str, ...]) -> None:
    """mmdebstrap uses apt with this machine's settings for reaching registries."""
    acquire = image.with_name("acquire.conf")
    dump = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout
    acquire.write_text("".join(f"{line}\n" for line in dump.splitlines() if line.startswith("Acquire::")))
    unfinished = image.with_name(f"{image.name}.new")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(packages)}", f"--aptopt={acquire}"]
    done = subprocess.run([*command, suite, str(unfinished), *sources], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"mmdebstrap failed:\n{done.stderr[-2000:]}"
    unfinished.rename(image)
