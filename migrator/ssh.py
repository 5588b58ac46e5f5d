"""Runs `snapshotd join` on a node through ssh. The node's key goes through the connection and is on no disk on the way."""

from __future__ import annotations

import shlex
import shutil
import subprocess

from snapshotd.api.errors import NotFound, SnapshotError, Unreachable, Usage
from snapshotd.api.node_file import NodeFile

#: ssh itself exits with this; any other status is the remote command's.
_SSH_FAILED = 255
#: A user other than root needs sudo without a password: standard input is the file, and there may be no terminal.
_JOIN = 's=; [ "$(id -u)" = 0 ] || s="sudo -n"; PATH="$PATH:/usr/sbin:/sbin"; $s snapshotd join -'
_START = " && $s systemctl enable --now snapshotd"


def join(destination: str, file: NodeFile, *, start: bool) -> None:
    """Has the node join, and starts its daemon if `start`. Raises SnapshotError with what ssh or the node has said."""
    if shutil.which("ssh") is None:
        raise NotFound("there is no program ssh on this machine", remedy="install it, or copy the file yourself")
    done = subprocess.run(
        ["ssh", "--", destination, f"sh -c {shlex.quote(_JOIN + (_START if start else ''))}"],
        input=file.text().encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode == 0:
        return
    said = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-8:]) or "it gave no reason"
    kind: type[SnapshotError] = Unreachable if done.returncode == _SSH_FAILED else Usage
    what = f"ssh {destination} failed" if kind is Unreachable else f"{file.node} at {destination} did not join"
    raise kind(f"{what}: {said}")
