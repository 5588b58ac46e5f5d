"""Checks of named, removed and node-local files on the source, and the size of the image."""

from __future__ import annotations

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.objects import Kind, is_carried
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc import sizes
from snapshotd.proc.files import GONE
from snapshotd.proc.maps import DELETED


def open_files(rank: Inspection) -> Check:
    survey = rank.survey
    for found, reason, remedy in (
        (
            survey.unnameable,
            "the rank has files open whose names are not UTF-8",
            "rename these files, or close them before the move",
        ),
        (
            survey.hidden,
            "the rank has files open that their paths no longer lead to (a mount covers the path, or it was replaced)",
            "unmount what covers the path, or have the job reopen the file",
        ),
        (
            survey.foreign_proc,
            "the rank has files of /proc open that belong to processes outside the rank",
            "close these files before the move",
        ),
    ):
        if found:
            return refused("open-files", f"{reason}: {listed(found)}", remedy)
    return passed("open-files", f"{sum(not fact.carried for fact in survey.facts)} named files, compared on the target")


def deleted_files(rank: Inspection) -> Check:
    if rank.survey.nameless:
        return refused(
            "deleted-files",
            "the rank has files open whose names were removed while other names of them remain (outside carry_paths, in"
            f" another directory, or kept by NFS): {listed(rank.survey.nameless)}",
            "close these files, or remove their other names as well",
        )
    gone = [str(process) for process in rank.tree.alive if process.cwd.endswith(DELETED)]
    if gone:
        return warned(
            "deleted-files",
            f"the working directory of these processes was removed: {listed(gone)}",
            "have them change to a directory that exists",
        )
    ghosts = rank.of_kind(Kind.GHOST)
    renamed = sum(1 for thing in rank.objects if thing.other_name)
    parts = [f"{len(ghosts)} unlinked files, moved in the image"] if ghosts else []
    parts += [f"{renamed} moved under another name"] if renamed else []
    return passed("deleted-files", ", ".join(parts) or "none")


def node_local_files(rank: Inspection) -> Check:
    """Open and mapped files are moved. Other files in the same directories are not, which the operator may need to know."""
    survey = rank.survey
    carried = sum(fact.carried for fact in survey.facts)
    local = sorted({process.cwd for process in rank.tree.alive if is_carried(process.cwd, rank.carry_paths)})
    if local:
        return warned(
            "node-local-files",
            f"the rank's working directory is local to this node ({listed(local)}): of the files there, only those that"
            " are open or mapped are moved",
            "start the job in a directory that both nodes share",
        )
    return passed("node-local-files", f"{carried} to be moved, {survey.carried_bytes >> 20} MiB")


def image_bytes(rank: Inspection) -> int:
    """The largest size that the image can have.

    The anonymous pages of each process count in full: CRIU writes pages that are shared through a fork once for each
    process, so the proportional size would be too small by the number of DataLoader workers. Shared memory and
    unlinked files count once.
    """
    total = rank.survey.image_bytes
    for process in rank.tree.alive:
        try:
            total += sizes.anonymous_bytes(process.pid)
        except GONE:
            continue
    return total
