"""Checks of named, removed and node-local files on the source, and the size of the image."""

from __future__ import annotations

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.objects import Kind, is_carried
from snapshotd.preflight.verdict import RETRY, listed, passed, refused, warned
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
    users = {process.user_id for process in rank.tree.alive}
    ghosts = rank.of_kind(Kind.GHOST)
    foreign = [str(thing) for thing in ghosts if thing.stat is not None and not users & {0, thing.stat.st_uid}]
    if foreign:  # the target would refuse them, but only after the freeze
        return refused(
            "deleted-files",
            "the rank has files of other users that were removed or replaced since it opened them, as an upgrade does with"
            f" libraries: {listed(foreign)}",
            "restart the job, so that it opens the new files",
        )
    gone = [str(process) for process in rank.tree.alive if process.cwd.endswith(DELETED)]
    if gone:
        return warned(
            "deleted-files",
            f"the working directory of these processes was removed: {listed(gone)}",
            "have them change to a directory that exists",
        )
    renamed = sum(1 for thing in rank.objects if thing.other_name)
    parts = [f"{len(ghosts)} unlinked files, moved in the image"] if ghosts else []
    parts += [f"{renamed} moved under another name"] if renamed else []
    return passed("deleted-files", ", ".join(parts) or "none")


def node_local_files(rank: Inspection) -> Check:
    """Files that existed before the rank, and that it does not have open, may not be moved, which the operator may need to
    know."""
    survey = rank.survey
    carried = sum(fact.carried for fact in survey.facts)
    local = sorted({process.cwd for process in rank.tree.alive if is_carried(process.cwd, rank.carry_paths)})
    if local:
        return warned(
            "node-local-files",
            f"the rank's working directory is local to this node ({listed(local)}): files there that are"
            " neither open nor made by the rank may not be moved",
            "start the job in a directory that both nodes share",
        )
    return passed("node-local-files", f"{carried} to be moved, {survey.carried_bytes >> 20} MiB")


def closed_files(
    count: int,
    size_bytes: int,
    older_left: int,
    limit_bytes: int,
    *,
    complete: bool,
    crowd: tuple[int, int] | None = None,
) -> Check:
    """Files that the rank's user has made below carry_paths in the rank's time, and that the rank has closed. `older_left` is
    the number of those in the same directories that are left out because all of them exceed the limit; `crowd` another user
    with so many files there that those of the rank's user cannot be found among them."""
    name = "closed-files"
    if not limit_bytes:
        return passed(name, "not moved (carry_closed_bytes is 0)")
    if not complete and crowd is not None:
        return refused(
            name,
            f"user {crowd[0]} has {crowd[1]} files or more below carry_paths, among which those of the rank cannot be found",
            "have them removed, and give users quotas there; carry_closed_bytes = 0 on the source leaves closed files behind",
        )
    if size_bytes > limit_bytes or not complete:
        what = f"{count} files with {size_bytes >> 20} MiB" if complete else f"more than {count} files"
        return refused(
            name,
            f"the rank's user has made {what} below carry_paths since the rank started; the limit is"
            f" {limit_bytes >> 20} MiB (carry_closed_bytes)",
            "remove what is not needed, keep it on shared storage, or raise carry_closed_bytes on the source; 0 leaves all of"
            " them behind",
        )
    if older_left:
        return warned(
            name,
            f"{count} files with {size_bytes >> 20} MiB are moved; {older_left} older files in the same directories are not,"
            f" because all of them would exceed the limit of {limit_bytes >> 20} MiB (carry_closed_bytes)",
            "raise carry_closed_bytes on the source if the job uses them, or remove them",
        )
    return passed(name, f"{count} to be moved, {size_bytes >> 20} MiB")


def failed(name: str, error: Exception) -> Check:
    return refused(name, f"the files below carry_paths cannot be looked at: {error}", RETRY)


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
