"""`migrator run --protect`: the home keeper of rank 0 runs `migrator protect` beside its rank, for as long as that lives.

A second one stands by on another node where that is known: it acts when the home node of rank 0 does not answer any more.

Only the standard library is imported, because this runs in front of every rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from migrator.cli import intervals

#: What launchers pass on to their workers. The first one may also be set by an administrator, as a default.
VARIABLE = "MIGRATOR_PROTECT"
CLUSTER = "MIGRATOR_PROTECT_CLUSTER"
#: What is done with output that a rank prints again after a rollback: shim/keeper/relay.py.
REPLAYED = ("suppress", "mark", "pass")
REPLAYED_OPTION, REPLAYED_VARIABLE = "--replayed-output", "MIGRATOR_REPLAYED_OUTPUT"
#: What a rollback does with files that ranks had open for writing, and that were deleted, renamed, replaced or shortened
#: since: snapshotd/moves/changed_file.py.
CHANGED = ("restore", "keep", "refuse")
CHANGED_OPTION, CHANGED_VARIABLE = "--changed-files", "MIGRATOR_CHANGED_FILES"
#: How many other nodes keep a copy of each rank's image: migrator/jobs/buddies.py.
COPIES_OPTION, COPIES_VARIABLE = "--copies", "MIGRATOR_COPIES"
OPTION = "--protect"  # its value may be left out
VARIABLES = (VARIABLE, CLUSTER, REPLAYED_VARIABLE, CHANGED_VARIABLE, COPIES_VARIABLE)
OFF = "off"


class Invalid(Exception):
    """The options, or the variables, cannot be meant."""


@dataclass(frozen=True)
class Wanted:
    """How a job is to be protected."""

    every: str  # as on the command line
    cluster: tuple[str, ...] = ()  # the options that name it
    changed_files: str = CHANGED[0]
    copies: str = ""  # as on the command line; empty: as the cluster file says

    @property
    def variables(self) -> dict[str, str]:
        """For the workers of a launcher."""
        return {
            VARIABLE: self.every,
            CLUSTER: " ".join(self.cluster),
            CHANGED_VARIABLE: self.changed_files,
            COPIES_VARIABLE: self.copies,
        }

    @property
    def more(self) -> list[str]:
        """Options of `migrator run` that `migrator protect` has, too."""
        files = [CHANGED_OPTION, self.changed_files] if self.changed_files != CHANGED[0] else []
        return [*files, *((COPIES_OPTION, self.copies) if self.copies else ())]

    @property
    def options(self) -> list[str]:
        """For another `migrator run`."""
        return [OPTION, self.every, *self.more, *self.cluster]


def add_options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        OPTION,
        nargs="?",
        const=intervals.DEFAULT,
        metavar="5m|auto",
        help="take a snapshot of the whole job at intervals (300, 90s, 5m, 2h; auto: what costs least), and roll the job back"
        f" when it has lost a rank or a node: `migrator protect` runs beside rank 0. Give it to all ranks (without a value:"
        f" {intervals.DEFAULT}; default: ${VARIABLE}, else the job is not protected)",
    )
    made.add_argument(
        REPLAYED_OPTION,
        choices=REPLAYED,
        help="what is done with output that the rank prints again after a rollback: leave it out as long as it is identical,"
        f" print it between two lines that say so, or print it (default: ${REPLAYED_VARIABLE}, else suppress)",
    )
    made.add_argument(
        CHANGED_OPTION,
        choices=CHANGED,
        help="with --protect: what a rollback does with files that ranks had open for writing at the snapshot, and that were"
        " deleted, renamed, replaced or shortened since: put them back as they were, and keep what is at their names beside"
        " them; leave what is there now; or do not resume the job"
        f" (default: ${CHANGED_VARIABLE}, else {CHANGED[0]})",
    )
    made.add_argument(
        COPIES_OPTION,
        metavar="N",
        help="with --protect: number of other nodes that keep a copy of each rank's image in its snapshots"
        f" (default: ${COPIES_VARIABLE}, else snapshot_copies in the cluster file, else 1)",
    )


def chosen(options: argparse.Namespace, environment: dict[str, str], warn: Callable[[str], None]) -> Wanted | None:
    """How the job is to be protected. The rank itself does not get our variables: they are removed. Raises Invalid."""
    try:
        found = wanted(
            *(options.protect, options.cluster, options.lab, environment, options.changed_files, options.copies)
        )
    except ValueError as error:
        raise Invalid(str(error)) from None
    if not options.worker:
        for name in VARIABLES:
            environment.pop(name, None)
    if found is not None and options.no_shim and options.protect is not None:
        warn("a GPU rank without the library cannot be snapshotted; leave --no-shim out to protect one")
    if found is None and options.changed_files is not None:
        warn(f"{CHANGED_OPTION} has no effect without {OPTION}; give it to `migrator job rollback`")
    if found is None and options.copies is not None:
        warn(f"{COPIES_OPTION} has no effect without {OPTION}; give it to `migrator job snapshot`")
    return found


def wanted(
    every: str | None,
    cluster: str | None,
    lab: str | None,
    environment: Mapping[str, str],
    changed_files: str | None = None,
    copies: str | None = None,
) -> Wanted | None:
    """None: the job is not protected. Raises ValueError."""
    asked = every if every is not None else environment.get(VARIABLE, "")
    if asked in ("", OFF):
        return None
    try:
        intervals.seconds(asked)
    except ValueError as error:
        raise ValueError(str(error) if every is not None else f"${VARIABLE}: {error}") from None
    option, _, value = environment.get(CLUSTER, "").partition(" ")
    if cluster or lab:
        option, value = ("--cluster", str(cluster)) if cluster else ("--lab", str(lab))
    if option == "--cluster" and not os.access(value, os.R_OK):
        raise ValueError(f"the cluster file {value} cannot be read, and without it nothing protects the job")
    changed = changed_files or environment.get(CHANGED_VARIABLE, "") or CHANGED[0]
    if changed not in CHANGED:
        raise ValueError(f"${CHANGED_VARIABLE}: {changed!r} is none of {', '.join(CHANGED)}")
    return Wanted(asked, (option, value) if option else (), changed, _copies(copies, environment))


def _copies(asked: str | None, environment: Mapping[str, str]) -> str:
    found = asked if asked is not None else environment.get(COPIES_VARIABLE, "")
    if found and not (found.isascii() and found.isdigit() and len(found) < 10 and int(found) > 0):
        raise ValueError(
            f"{COPIES_OPTION if asked is not None else f'${COPIES_VARIABLE}'}: {found!r} is not a number above 0"
        )
    return found


def replayed(asked: str | None, environment: Mapping[str, str]) -> str:
    """What a rank's keeper does with output that is printed again."""
    found = asked or environment.get(REPLAYED_VARIABLE, "")
    return found if found in REPLAYED else REPLAYED[0]


def is_guard(rank: int, environment: Mapping[str, str]) -> bool:
    """Whether the keeper of this rank runs the protection, or stands by: rank 0, and the first rank of the second node. A
    launcher that does not say how many ranks a node has is taken for one with one rank on each."""
    try:
        on_each = max(1, int(environment.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        on_each = 1
    return rank in (0, on_each)


def argv(wanted: Wanted, rank: int, uid: str) -> Sequence[str]:
    """The command line of the protection. The uid of a rank is that of its job, its number, and its own part."""
    job = uid.rsplit("-", 2)[0]
    return [
        *(sys.executable, "-P", "-m", "migrator.cli", "protect", job, "--user", str(os.getuid())),
        *("--every", wanted.every, *wanted.more, "--for-keeper", f"{os.getpid()}:{rank}"),
        *wanted.cluster,
    ]
