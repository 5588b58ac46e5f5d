"""Builds the wheel: the shim is compiled into it, and it is tagged for the platforms on which the result runs.

Everything else about the project is in pyproject.toml. An editable install compiles nothing; tools/setup does that. The
commit and the build date come from $SNAPSHOT_COMMIT and $SOURCE_DATE_EPOCH if they are set (tools/package), so that two
builds of one commit have the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from datetime import UTC, datetime
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithShim(build_py):
    """Compiles the shim from a copy of its sources, so that no library that lies in the checkout gets into the wheel."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package, sources = Path(self.build_lib).resolve() / "shim", ROOT / "build" / "shim"
        shutil.rmtree(sources, ignore_errors=True)
        shutil.copytree(ROOT / "shim", sources, ignore=shutil.ignore_patterns("*.so", "build", "__pycache__"))
        # Debugging information must not name the folder of the build.
        flags = f"{os.environ.get('CFLAGS', '-O2 -g')} -ffile-prefix-map={sources}=shim"
        subprocess.run(["make", "--no-print-directory", "-C", str(sources), f"CFLAGS={flags}"], check=True)
        (package / "lib").mkdir(exist_ok=True)
        for library in sorted((sources / "lib").glob("*.so")):
            shutil.copy2(library, package / "lib" / library.name)
        (package.parent / "snapshotd" / "build.json").write_text(json.dumps(build_facts()) + "\n")


class PlatformWheel(bdist_wheel):
    """For any Python 3, but one architecture, and C libraries that have what the shim needs."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = list((ROOT / "build" / "shim" / "lib").glob("*.so"))
        machine = sysconfig.get_platform().rpartition("-")[2]
        return "py3", "none", f"manylinux_2_{max(map(glibc_minor, libraries), default=17)}_{machine}"


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


def glibc_minor(library: Path) -> int:
    """The oldest C library, 2.x, that has every symbol version which the library asks for."""
    shown = subprocess.run(["readelf", "--version-info", library], check=True, capture_output=True, text=True).stdout
    return max(int(minor) for minor in re.findall(r"\bGLIBC_2\.(\d+)", shown))


def build_facts() -> dict[str, str]:
    commit = os.environ.get("SNAPSHOT_COMMIT", "")
    if not commit:
        asked = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], check=False, capture_output=True, text=True)
        commit = asked.stdout.strip() if asked.returncode == 0 else "unknown"
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    date = datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now(UTC)
    return {"commit": commit, "date": date.strftime("%Y-%m-%d")}


setup(cmdclass={"build_py": BuildWithShim, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
