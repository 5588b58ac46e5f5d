"""Gives nodes the files with which they join: by ssh, or as files that a person copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snapshotd.api.errors import Busy, Refused, SnapshotError, Usage
from snapshotd.api.new_files import NewFile, replace_all
from snapshotd.api.node_file import SUFFIX, NodeFile, is_for


def check(nodes: list[str], folder: Path) -> None:
    """Before anything is made: the files can be written, and replace nothing but earlier files of the same nodes."""
    if not folder.is_dir():
        raise Usage(f"{folder} is not a folder", remedy="make it, or name another one with --output")
    for name in nodes:
        path = folder / f"{name}{SUFFIX}"
        if path.exists() and not is_for(path, name):
            raise Busy(
                f"{path} exists and is not a file of {name}", remedy="move it away, or name a folder with --output"
            )


def give(files: list[NodeFile], destinations: dict[str, str], folder: Path, *, start: bool) -> list[dict[str, Any]]:
    """Sends each file by ssh, or writes it. What could not be sent is written, so that it can be copied."""
    from migrator import ssh

    sent: list[dict[str, Any]] = []
    for made in files:
        if not (destination := destinations.get(made.node)):
            sent.append(write(made, folder))
            continue
        where: dict[str, Any] = {"node": made.node, "file": "", "ssh": destination, "problem": ""}
        try:
            ssh.join(destination, made, start=start)
        except SnapshotError as error:
            where |= {"file": write(made, folder)["file"], "problem": error.message}
        sent.append(where)
    failed = [where for where in sent if where["problem"]]
    if failed:
        first = f"{failed[0]['problem']}\n"
        names = ", ".join(where["file"] for where in failed)
        raise Refused(
            f"{len(failed)} of {len(sent)} nodes did not join through ssh: {first}The certificates are made, and the files of"
            f" these nodes were written: {names}",
            remedy="copy each file to its node and run `snapshotd join FILE` there, or correct what ssh said and run"
            " `migrator cluster rotate NODE --ssh`",
        )
    return sent


def write(made: NodeFile, folder: Path) -> dict[str, Any]:
    path = folder / f"{made.node}{SUFFIX}"
    replace_all([NewFile(path, made.text().encode(), 0o600)])
    return {"node": made.node, "file": str(path), "ssh": "", "problem": ""}


def show(sent: list[dict[str, Any]], *, start: bool) -> None:
    for where in sent:
        if where["ssh"]:
            print(f"{where['node']} has joined through ssh {where['ssh']}" + (", and its daemon runs" if start else ""))
        else:
            print(
                f"wrote {where['file']}: copy it to {where['node']}, and there: snapshotd join {Path(where['file']).name}"
            )
