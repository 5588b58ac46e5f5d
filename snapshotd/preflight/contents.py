"""Checks of named, removed and node-local files on the source, and how much memory all of it takes."""

from __future__ import annotations

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.look import Look
from snapshotd.preflight.objects import Kind, is_carried
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc.processes import DELETED, read_status


def open_files(look: Look) -> Check:
    survey = look.survey
    for found, reason, remedy in (
        (survey.unnameable, "names that are not UTF-8", "rename the file"),
        (
            survey.hidden,
            "files that their name no longer leads to (covered by a mount, or moved)",
            "unmount, or reopen it",
        ),
        (survey.foreign_proc, "files of /proc about a process that stays behind", "close the file before the move"),
    ):
        if found:
            return refused("open-files", f"{reason}: {listed(found)}", remedy)
    return passed(
        "open-files", f"{sum(not fact.carried for fact in survey.facts)} named files, to be found on the target"
    )


def deleted_files(look: Look) -> Check:
    if look.survey.nameless:
        return refused(
            "deleted-files",
            "removed names of files that have other names, outside carry_paths or in other directories, or that NFS keeps:"
            f" {listed(look.survey.nameless)}",
            "close the file, or remove its other names too",
        )
    gone = [str(process) for process in look.tree.alive if process.cwd.endswith(DELETED)]
    if gone:
        return warned("deleted-files", f"working directory was removed: {listed(gone)}", "change to one that exists")
    ghosts = look.of_kind(Kind.GHOST)
    renamed = sum(1 for thing in look.objects if thing.other_name)
    parts = [f"{len(ghosts)} unlinked files travel in the image"] if ghosts else []
    parts += [f"{renamed} travel under another name of theirs"] if renamed else []
    return passed("deleted-files", ", ".join(parts) or "none")


def node_local_files(look: Look) -> Check:
    """Open and mapped ones travel; what lies beside them does not, which a person may want to know."""
    survey = look.survey
    carried = sum(fact.carried for fact in survey.facts)
    local = sorted({process.cwd for process in look.tree.alive if is_carried(process.cwd, look.carry_paths)})
    if local:
        return warned(
            "node-local-files",
            f"works in {listed(local)}, which is local to this node: only files that are open or mapped travel",
            "start the job in a directory that both nodes see",
        )
    return passed("node-local-files", f"{carried} carried along, {survey.carried_bytes >> 20} MiB")


def image_bytes(look: Look) -> int:
    """What the image takes at most.

    Each process's own anonymous pages, counted in full: CRIU writes pages that a fork shares once per process, so the
    proportional size would be too little by the number of DataLoader workers. Shared memory and unlinked files once.
    """
    total = look.survey.image_bytes
    for process in look.tree.alive:
        try:
            sizes = read_status(f"/proc/{process.pid}/smaps_rollup")
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += 1024 * sum(
            int(sizes.get(name, "0").split()[0]) for name in ("Anonymous", "Swap", "Private_Hugetlb", "Shared_Hugetlb")
        )
    return total
