"""The files of the installation, each used once as the daemon uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import shim
from shim.keeper import library
from snapshotd.api import certificates
from snapshotd.api.errors import SnapshotError
from snapshotd.config import Config
from snapshotd.inprocess.symbols import Builds
from snapshotd.runtime import programs
from snapshotd.runtime.child_process import environment
from snapshotd.selfcheck.finding import Finding, failed, ok, warning

_LIBRARIES = Path(shim.__file__).with_name("lib")
_FOR_CRIU = ("libcriulimits.so", "libcriufiles.so")
_CHECK_S = 60.0
_QUOTED = 3


def imports() -> Finding:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "snapshotd.selfcheck.import_all"],
        env=environment(site_packages=True),
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_CHECK_S * 2,
        check=False,
    )
    said = (done.stdout or done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
    if done.returncode != 0:
        remedy = "install the package again; pycriu comes with CRIU (`tools/get-criu`), not from PyPI"
        return failed("imports", "; ".join(said[:_QUOTED]), remedy)
    return ok("imports", said[-1])


def criu(config: Config) -> Finding:
    """As at a dump: the same program, libraries and environment."""
    from snapshotd.criu.session import dump_environment

    remedy = "see https://criu.org/Installation for the kernel options; run snapshotd outside containers"
    try:
        program = programs.opened(config.criu)
        done = subprocess.run(
            [*program.argv, "check"],
            env=dump_environment(program),
            cwd="/",
            pass_fds=program.fds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except (SnapshotError, OSError, subprocess.TimeoutExpired) as error:
        return failed("criu", f"{config.criu} check: {error}", remedy)
    if done.returncode != 0:
        # Every log has a harmless line about the limit of open files.
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "RLIMIT_NOFILE" not in line]
        return failed("criu", f"{config.criu} check: {'; '.join(lines[-_QUOTED:]) or 'failed'}", remedy)
    return ok("criu", f"CRIU {config.criu_version} at {config.criu}")


def shim_libraries() -> Finding:
    try:
        found = [library.usable(_LIBRARIES / name, {}) for name in library.NAMES]
    except library.Unusable as error:
        return failed("shim", str(error), error.remedy)
    known = Builds()
    try:
        known.learn_installed()
    except SnapshotError as error:
        return failed("shim", error.message, library.REINSTALL)
    for each in found:
        if problem := known.problem(bytes.fromhex(each.build), each.abi):
            return failed("shim", f"{each.path}: {problem}", library.REINSTALL)
    if missing := [name for name in _FOR_CRIU if not (_LIBRARIES / name).exists()]:
        return failed("shim", f"{_LIBRARIES} lacks {', '.join(missing)}", library.REINSTALL)
    return ok("shim", f"interface version {found[0].abi}, builds {', '.join(each.build[:12] for each in found)}")


def certificate(config: Config) -> list[Finding]:
    """Config.load has checked that it is valid."""
    if near := certificates.warnings(config.credentials):
        return [warning("certificates", *_divided(text)) for text in near]
    expiry = certificates.expiry(config.credentials)
    return [ok("certificates", f"valid until {expiry:%Y-%m-%d}" if expiry is not None else "valid")]


def _divided(text: str) -> tuple[str, str]:
    """A warning as text and remedy."""
    text, _, remedy = text.partition("; ")
    return text, remedy or "run `migrator cluster rotate` and join again"
