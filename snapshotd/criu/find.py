"""Which CRIU this node uses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from snapshotd.api.errors import BadConfig

OLDEST = (4, 2)
#: Where tools/get-criu and `make setup` install one: on a node, and in a checkout.
PRIVATE = (Path("/opt/snapshotd/criu/criu"), Path(__file__).resolve().parents[2] / ".criu" / "criu")

_GET_CRIU = "`tools/get-criu /opt/snapshotd/criu` installs a suitable one"


def find_criu(explicit: str | None) -> tuple[str, str]:
    """(path, version) of the CRIU to use, at least 4.2. Raises BadConfig with what was found instead.

    If one is named, in the file or by $SNAPSHOT_CRIU, only that is considered. Otherwise the first that is new enough is
    used: on PATH, in /opt/snapshotd/criu, in the checkout's .criu.
    """
    oldest = ".".join(map(str, OLDEST))
    named = explicit or os.environ.get("SNAPSHOT_CRIU")
    if named:
        version = _version(named)
        if _numbers(version) < OLDEST:
            raise BadConfig(f"{named} is CRIU {version}; {oldest} or newer is needed ({_GET_CRIU})")
        return named, version
    seen = []
    for candidate in [shutil.which("criu"), *(str(path) for path in PRIVATE if path.exists())]:
        if candidate is None:
            continue
        try:
            version = _version(candidate)
        except BadConfig as error:
            seen.append(error.message)
            continue
        if _numbers(version) >= OLDEST:
            return candidate, version
        seen.append(f"{candidate} is CRIU {version}")
    raise BadConfig(f"no CRIU {oldest} or newer was found ({_GET_CRIU}); found: {'; '.join(seen) or 'none at all'}")


def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "`--version` did not return within 10 s"
        raise BadConfig(f"{path} cannot be run: {reason}") from error
    match = re.search(r"^Version: (\d+(?:\.\d+)*)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or match is None:
        raise BadConfig(f"{path} is not CRIU: `--version` printed {(done.stdout + done.stderr).strip()[:200]!r}")
    return match[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
