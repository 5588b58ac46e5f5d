"""Packages of other versions, for upgrades: one from the history of this repository, one from the package under test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from integration.systemd.root_image import cache

ROOT = Path(__file__).parents[2]
#: The commit that serves as the previous release; the first one that has packages if not set.
PREVIOUS = "SNAPSHOT_PREVIOUS"


def previous_release(folder: Path) -> Path | None:
    """A package of an earlier commit, with a lower version. None if this checkout does not have the commit."""
    commit = (
        os.environ.get(PREVIOUS) or _git("log", "--diff-filter=A", "--format=%H", "--", "tools/package").split("\n")[-1]
    )
    if not commit:
        return None
    return repacked(_built(commit), "0.1.99", folder)


def _built(commit: str) -> Path:
    """The package of a commit; it is kept, because a commit does not change."""
    kept = cache() / f"package-{commit[:12]}"
    if not kept.exists():
        work, unfinished = kept.with_suffix(".work"), kept.with_suffix(".new")
        for folder in (work, unfinished):
            shutil.rmtree(folder, ignore_errors=True)
        _git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(work))
        _git("-C", str(work), "checkout", "--quiet", commit)
        (work / ".venv").symlink_to(ROOT / ".venv")
        shutil.copytree(ROOT / ".criu", work / ".criu", symlinks=True)
        python = Path("/usr/bin/python3").resolve().name.removeprefix("python")
        done = subprocess.run(
            ["tools/package", "--python", python, str(unfinished)],
            cwd=work,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.rmtree(work)
        unfinished.rename(kept)
    (package,) = kept.glob("snapshotd_*.deb")
    return package


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def next_release(package: Path, folder: Path) -> Path:
    """The package under test as a later version, with another build of the library for ranks."""
    return repacked(package, "9.0.0", folder, other_library=True)


def other_protocol(package: Path, folder: Path) -> Path:
    """The package under test as a release that has no protocol in common with it."""
    return repacked(package, "9.1.0", folder, protocol="99, 99")


def repacked(package: Path, version: str, folder: Path, *, other_library: bool = False, protocol: str = "") -> Path:
    """The same package with another version. Another build id makes its library another build for every program."""
    tree, made = folder / f"tree-{version}", folder / f"snapshotd_{version}.deb"
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(tree)], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"^Version: .*$", f"Version: {version}", control.read_text(), flags=re.MULTILINE))
    for source in tree.glob("opt/snapshotd/python3.*/lib/python3.*/site-packages/snapshotd/__init__.py"):
        changed, count = re.subn(
            r'^__version__ = ".*"$', f'__version__ = "{version}"', source.read_text(), flags=re.MULTILINE
        )
        assert count == 1
        source.write_text(changed)
    if protocol:
        for source in tree.glob("opt/snapshotd/python3.*/lib/python3.*/site-packages/snapshotd/api/protocol.py"):
            pattern, text = r"^NEWEST, OLDEST = .*$", f"NEWEST, OLDEST = {protocol}"
            changed, count = re.subn(pattern, text, source.read_text(), flags=re.MULTILINE)
            assert count == 1
            source.write_text(changed)
    if other_library:
        _change_build_ids(tree)
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(tree), str(made)], check=True)
    shutil.rmtree(tree)
    return made


def _change_build_ids(tree: Path) -> None:
    listed = tree / "opt/snapshotd/shims.list"
    rows = [line.split() for line in listed.read_text().splitlines()]
    for row in rows:
        old = bytes.fromhex(row[0])
        new = bytes(byte ^ 0xFF for byte in old)
        for library in tree.glob(f"opt/snapshotd/python3.*/lib/python3.*/site-packages/shim/lib/{Path(row[1]).name}"):
            content = library.read_bytes()
            if old in content:  # else a hard link to one that was changed before
                library.write_bytes(content.replace(old, new))
        row[0] = new.hex()
    listed.write_text("".join(f"{' '.join(row)}\n" for row in rows))
