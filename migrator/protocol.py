"""The whole protocol of a move, on one page: what happens where, in which order, and how each step is undone.

The invariant: **at most one copy of a rank ever runs.** Before COMMIT only the source's copy can run, after COMMIT only
the target's. COMMIT is a write-once record in the source daemon's journal, so whoever dies, the record decides.

This file is pure: no I/O, no clock. `migrator/driver.py` executes it; the daemons' own rules for what a crash left
behind are in `snapshotd/moves/rules.py`; `tests/protocol/` walks every prefix of the table with every participant dying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from snapshotd.api.errors import Where


class At(StrEnum):
    """Who carries a step out."""

    BOTH = "source + target"
    SOURCE = "source"
    TARGET = "target"
    PEERS = "peers"
    JOB = "job"  # every node that has ranks of the job


@dataclass(frozen=True)
class Step:
    """One row: the driver asks for `action` at `at`; it is idempotent by (move, step)."""

    phase: str  # what a person sees
    action: str  # the RPC
    at: At
    undo: str  # what ABORT later does about it, "" where nothing is needed
    timeout_s: float
    where: Where  # where the rank is once this step is done
    says: str


TABLE: tuple[Step, ...] = (
    Step("preflight", "Inspect", At.SOURCE, "", 60, Where.SOURCE_RUNNING, "what does the rank use?"),
    Step("preflight", "Examine", At.TARGET, "", 60, Where.SOURCE_RUNNING, "can the target take it?"),
    Step(
        "preflight",
        "InspectConnections",
        At.PEERS,
        "",
        60,
        Where.SOURCE_RUNNING,
        "can its peers' sockets follow?",
    ),
    Step("prepare", "Prepare", At.TARGET, "Discard", 30, Where.SOURCE_RUNNING, "reserve memory, give a nonce"),
    Step("prepare", "Begin", At.SOURCE, "Abort", 30, Where.SOURCE_RUNNING, "journal the move, start the lease"),
    Step(
        "prepare", "PrepareDevice", At.SOURCE, "Abort", 300, Where.SOURCE_RUNNING, "device memory: files, lane, rings"
    ),
    Step(
        "prepare", "SuspendTimeouts", At.PEERS, "Settle", 30, Where.SOURCE_RUNNING, "the other ends outlive a silence"
    ),
    Step("quiesce", "Quiesce", At.JOB, "Open", 600, Where.SOURCE_RUNNING, "NCCL: every rank waits at one cut"),
    Step("detach", "Detach", At.SOURCE, "Open", 120, Where.SOURCE_RUNNING, "NCCL: its communicators are taken down"),
    Step("freeze", "Freeze", At.SOURCE, "Abort", 900, Where.SOURCE_FROZEN, "off the GPU, stop the tree, freeze it"),
    Step("stream", "Stream", At.SOURCE, "Abort", 3600, Where.SOURCE_FROZEN, "criu dump, sent while it is written"),
    Step(
        "restore", "Restore", At.TARGET, "Discard", 1800, Where.SOURCE_FROZEN, "criu restore, stopped, under a keeper"
    ),
    Step("reattach", "Attach", At.SOURCE, "Open", 180, Where.SOURCE_FROZEN, "NCCL: fresh communicators on all members"),
    Step(
        "re-point", "Repoint", At.PEERS, "Settle", 60, Where.SOURCE_FROZEN, "the other ends name the target, silently"
    ),
    Step("commit", "Commit", At.SOURCE, "", 30, Where.TARGET_HELD, "write the outcome: only the target may run"),
    Step("activate", "Activate", At.TARGET, "", 60, Where.TARGET_RUNNING, "the token lets the target's copy go"),
    Step("open", "Open", At.JOB, "", 60, Where.TARGET_RUNNING, "NCCL: every rank goes on"),
    Step("settle", "Settle", At.PEERS, "", 60, Where.TARGET_RUNNING, "the connections flow again, peer by peer"),
    Step("clean", "Release", At.SOURCE, "", 60, Where.TARGET_RUNNING, "drop the frozen copy"),
)

#: The step that writes the outcome. Everything before it can be undone, everything after it only finished.
COMMIT = next(index for index, step in enumerate(TABLE) if step.action == "Commit")

#: Steps that are left out where the moving rank is in no NCCL communicator.
NCCL_ALONE = frozenset(step.action for step in TABLE if step.says.startswith("NCCL:"))

#: An undo builds communicators again, for which the source has its own limit; its answer is worth waiting for.
ABORT_S = 240

#: What only looks; the first step after it changes something.
PREFLIGHT = sum(step.phase == "preflight" for step in TABLE)
ACTIVATE = next(index for index, step in enumerate(TABLE) if step.action == "Activate")


def next_step(done: int) -> Step | None:
    """The step after `done` steps, None when the move is complete."""
    return TABLE[done] if done < len(TABLE) else None


def undo_plan(reached: int) -> tuple[Step, ...]:
    """What to ask for when the step with index `reached` failed or its answer was lost, before COMMIT.

    Abort first, always: the source's record is what makes it safe for the target to forget its copy. The step that
    failed is undone too, since it may have happened although the answer was lost. Of NCCL's communicators the source takes
    care as it carries ABORT out: it attaches again what was detached, and only then does a gate open.
    """
    if reached > COMMIT:
        return ()
    touched = {step.undo for step in TABLE[: reached + 1]}
    plan = []
    if "Abort" in touched:
        plan.append(Step("undo", "Abort", At.SOURCE, "", ABORT_S, Where.SOURCE_RUNNING, "record ABORT, thaw"))
    if "Settle" in touched:
        plan.append(Step("undo", "Settle", At.PEERS, "", 60, Where.SOURCE_RUNNING, "point the other ends back"))
    if "Open" in touched:
        plan.append(Step("undo", "Open", At.JOB, "", 60, Where.SOURCE_RUNNING, "as the source has attached them again"))
    if "Discard" in touched:
        plan.append(Step("undo", "Discard", At.TARGET, "", 60, Where.SOURCE_RUNNING, "drop the images and the copy"))
    return tuple(plan)


class Verdict(StrEnum):
    """How a move ended, as the command line reports it."""

    MOVED = "moved"
    REFUSED = "refused"
    UNDONE = "undone"
    UNKNOWN = "unknown"


def decide(reached: int, outcome: str | None) -> tuple[Verdict, str]:
    """The verdict when the driver stops at step `reached`, given the source's outcome record.

    `outcome` is "COMMIT", "ABORT", "UNDECIDED" (the source answered and has not decided) or None (no answer).
    """
    if outcome == "COMMIT" and reached > ACTIVATE:
        return Verdict.MOVED, "the target runs it; the daemons clean up alone"
    if outcome == "COMMIT":
        return Verdict.UNKNOWN, "committed, but the target has not confirmed that it runs; the daemons go on trying"
    if outcome == "ABORT":
        return Verdict.UNDONE, "aborted: the rank goes on at the source"
    if not any(step.undo == "Abort" for step in TABLE[: reached + 1]):
        return Verdict.UNDONE, "nothing had been asked of the source yet"
    if outcome == "UNDECIDED":
        return Verdict.UNKNOWN, "the source has not decided; it aborts when the lease runs out"
    return Verdict.UNKNOWN, "the source does not answer; its journal holds the outcome"


def where_after(done: int) -> Where:
    """Where the rank is once `done` steps are done."""
    return TABLE[done - 1].where if done else Where.SOURCE_RUNNING


def diagram(table: Sequence[Step] = TABLE) -> str:
    """The table as text; the README's diagram is this function's output."""
    lines = []
    for step in table:
        if step.action == "Commit":
            lines.append("─" * 12 + " COMMIT: from here on only the target may run " + "─" * 12)
        undo = f"undo: {step.undo}" if step.undo else ""
        lines.append(f"{step.phase:<10} {step.action:<18} {step.at:<6} {step.says:<47} {undo}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    print(diagram())
