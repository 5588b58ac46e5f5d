"""The protocol of suspending, resuming, snapshotting and rolling back a whole job: what is asked of which daemon, in which
order, and how it is undone.

**Invariant: at most one incarnation of the job runs, and if none runs, whole images of all its ranks exist.** An
incarnation is a set with one copy of every rank. The processes of a job run until Freeze stops them all. They end only if
the outcome of the suspension is COMMIT, and that is recorded only when every rank's node has answered that it has a whole
image. From then on the images are the job. Copies that are restored from them are held, and run only if the outcome of the
resumption is COMMIT, which is recorded only when every target has answered that it holds its copy. The images are dropped
when every target has answered that its copy runs. If one answers instead that its copy died before it ran, the coordinator
takes the resumption back: it overrules its COMMIT with ABORT and has the copies ended that run already (Job.EndRanks). When
all of them have ended, the job is suspended as before, and can be resumed again.

**Participants.** The *driver* (`migrator/jobs/`, part of `migrator job`) asks for the steps in order and decides nothing.
The *coordinator* is the daemon of the node with the lowest rank. It keeps the record of the suspension, and that of every
attempt to resume; each has one write-once outcome. Each rank has a *store*, the daemon that had its process and keeps its
image, and when it is resumed a *target*, the daemon that restores it; both may be the same, and the coordinator too. For
each rank there is a move in the journal of these daemons: one with the role "source" for the suspension, on its store, and
one with the role "target" for each resumption. Both name the coordinator's record, and its outcome is theirs. Otherwise
they are moves like any other, with the same marks (`migrator/protocol.py`), and the same steps serve them.

**Snapshots.** A snapshot is a suspension after which the ranks go on. Each goes on as soon as its own image is complete,
whatever the outcome will be: until the others' images are complete too, their filters drop what it sends, so the cut stays
consistent. Device memory may get into the image after that, from a copy as it was at the cut; a store without it is not
ready, and Source.Send waits for it. Then the image is sent to the rank's *buddies*, one other node or several, which keep
a copy of it each. All of them lie in memory. COMMIT, which needs all images and all copies, says that the snapshot counts.
A rank that is kept in a snapshot is *bound* to its coordinator, which alone may end it, suspend it or take the next snapshot
of it; until then it does not move. When all are bound, the snapshot before is dropped, and not earlier. When most *voters*
know that, the driver reports the snapshot: from then on the job can be rolled back to it whichever node is lost. The voters
are the nodes that keep the images and, if these are few, witnesses, which keep none. The coordinator asks each witness
before it records the voters, and leaves out one that does not answer: a snapshot has one list of voters for ever. The last
snapshot is dropped when no node knows a rank of the job any more.

**Rollback.** Job.Rollback makes the coordinator of the last snapshot record that the incarnation that runs is over. The
record has its outcome from the beginning, and that is the decision: from then on no process of that incarnation may run
anywhere. It is refused until every rank is bound, by this snapshot or an earlier one, while the job is suspended, and if
the job was resumed from a suspension since; after it nothing of that incarnation is stored any more. The coordinator has
every node of the cluster end it (Job.EndRanks). A node records that it is over before it ends the first process, so
copies on their way to it do not run either, and answers only when none is left, bound or not. Home keepers stay; for them
the rank is away. When every node has answered, the record is settled, and the job is suspended: its images are those of
the snapshot, of each rank the image or the copy. It is resumed by the table RESUME, as often as it takes: an attempt in which
an image turns out to be unreadable, or not what its maker has signed, or does not reach its target, is undone, and the next
one uses another copy. The snapshot stays, and a newer one replaces it.

**Another coordinator.** A coordinator that leaves records first that it never rolls the job back again (Job.HandOver). Then
its successor gets the record, and after that all nodes obey the successor, each after asking the former one.

**Nodes that do not answer.** A rank of a job with a snapshot asks its coordinator every few seconds, through its daemon,
whether it may run (Job.MayRun). If the coordinator's machine has been silent for CUT_OFF_S, the daemon ends the rank. So the
coordinator may count a node, whose machine has been silent to it for FENCED_S, as one without processes of that incarnation.
*The assumption is that the daemon of a node that is cut off is alive*, or that the machine is not. A machine that refuses
connections has no daemon, and may have ranks: it is waited for, until its daemon is back or an operator declares the node
dead (`--lost`). When a node comes back, its daemon knows or learns that the incarnation is over before anything of it runs.

**Asking instead of tokens.** The coordinator asks every store or target itself before it records COMMIT, and every store
and target asks the coordinator itself before it acts on an outcome. What the driver says is never believed.

**The cut.** Freeze stops every rank, then drops all packets of its connections, on every node that has ranks of the job. It
is answered by all before the first image is dumped. So no kernel acknowledges a byte after its rank was stopped, except
into a queue that is dumped afterwards; what was sent and not acknowledged is in the sender's queue and is sent again after
the resumption. Nothing is lost and nothing doubled. Both ends of a connection between ranks get their new addresses in the
images (`snapshotd/net/rejoin.py`). A connection to another process of a node with a daemon would be lost, so a job with one
is refused. Connections to hosts without a daemon are reset, as in a move.

**NCCL.** If ranks are in communicators, all of them wait at their gates from Gate.Close on, at the cut of
`migrator/quiesce/cut.py`, and the coordinator has all communicators taken down before the first rank is frozen. So the images
have none. A snapshot's ranks go on behind their gates. When all do, the coordinator has the communicators built again, and
only then opens the gates; an undo does the same. It asks the processes what is down, also after a restart, and its record is
not settled before the gates are open. If a member has ended, what it was in stays down, and the job gets NCCL's errors. A
node opens its gates without the coordinator's word if that has been silent for 15 minutes. Copies of a resumption are behind
the gates of their images, and COMMIT needs their communicators: a target whose copy lacks some answers that it is not ready.

**Keepers.** The home keeper of each rank, which is what the launcher knows, stays. For it the rank is away, as after a move.

**Lease.** Job.Begin starts a lease, which the driver renews; if it expires before an outcome, the coordinator records ABORT.
A store that has no whole image may also abort alone, because the coordinator cannot commit without it. One that has a whole
image, and a target that holds a copy, ask the coordinator and wait as long as it takes.

**If a participant dies**
- *Driver*: before COMMIT the lease expires, and all ranks go on (suspend), or all copies are dropped and the images stay
  (resume). After COMMIT nothing is left for it to do.
- *Coordinator's daemon*: what was recorded stands. Stores and targets wait until it is back. If nothing was recorded, the
  lease begins anew.
- *A store's daemon*, while it freezes or dumps: after its restart that rank is thawed; Commit is refused, so the job goes on.
  With a whole image it asks the coordinator. Between suspension and resumption it has nothing to do but keep the image, on
  a disk. While it sends, the attempt fails.
- *A target's daemon*: before its copy is held, the copy is dropped and the attempt fails. A held copy waits, and the
  restarted daemon asks the coordinator.
- *A node*: before COMMIT of the suspension its rank has ended, as without us. A suspended job survives the reboot of any
  node except the home node of a rank, whose keeper and launcher end with it. After COMMIT of the resumption, a node that
  dies with a held copy has the resumption taken back; one that dies with a copy that runs takes its ranks with it.
- *Home keeper*: before COMMIT of the suspension, Commit is refused and its rank ends. Later the job is not resumed any more:
  preflight asks each home node. `migrator job drop` gives it up, and ends the home keepers that are left. After a rollback a
  rank is resumed without its home keeper: its node may be the one that is lost.
- A coordinator's or store's node that never returns: the images of its ranks are lost, and the job cannot be resumed. After a
  snapshot the loss of as many nodes as there are copies leaves the images of all ranks. If the coordinator's is among them,
  all ranks of the job end when they have been cut off from it. Then most voters agree on another node, or an operator
  declares the lost ones dead: that node makes the record again from the images (Job.Adopt), and all others obey it instead
  (Job.Succeed), after they have asked the former one in vain.
- *During a snapshot*, any of them: the ranks go on, and the snapshot before it is kept.
- *During a rollback*: before the record nothing has happened. After it, the coordinator's daemon continues, also after a
  restart. A driver that dies is replaced by the next `migrator job rollback`.

This file is pure: no I/O, no clock. `snapshotd/moves/job_rules.py` has the daemons' rules. `tests/protocol/test_jobs.py`,
`test_snapshots.py` and `test_rollbacks.py` walk every event with every participant dying, `test_job_gates.py` those of jobs
that are in communicators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Asked(StrEnum):
    COORDINATOR = "coordinator"
    STORES = "stores"  # the nodes with the ranks, then with their images; all at once
    TARGETS = "targets"  # all at once
    BUDDIES = "buddies"  # the nodes that keep copies of a snapshot's images; all at once


@dataclass(frozen=True)
class JobStep:
    """One row of a table. A step of several daemons is done when all of them have answered."""

    phase: str
    call: str  # Service.Method
    asked: Asked
    timeout_s: float
    does: str
    undone_by: tuple[str, ...] = ()  # calls of the table's undo
    only_with_nccl: bool = False  # skipped if no rank of the job is in an NCCL communicator


_COORDINATOR, _STORES, _TARGETS, _BUDDIES = Asked.COORDINATOR, Asked.STORES, Asked.TARGETS, Asked.BUDDIES
_ABORT_SUSPENSION = ("Job.Abort", "Source.Abort")
_ABORT_RESUMPTION = ("Job.Abort", "Target.Discard")
_ATTACH = "Job.Attach"  # by the coordinator, which calls every node with ranks of the job
_PUT_BACK = ("Job.Abort", _ATTACH)
#: How the communicators of a job are taken down before its ranks are frozen.
_QUIESCE = (
    JobStep("quiesce", "Gate.Close", _STORES, 600, "close the gates, let ranks run up to one cut", _PUT_BACK, True),
    JobStep("detach", "Job.Detach", _COORDINATOR, 3600, "destroy all communicators", _PUT_BACK, True),
)

SUSPEND: tuple[JobStep, ...] = (
    # A refusal here is exit code 10: nothing has been changed or paused.
    JobStep("preflight", "Source.Inspect", _STORES, 60, "list what the ranks use; refuse what cannot be restored"),
    JobStep("prepare", "Job.Begin", _COORDINATOR, 30, "journal the suspension, start the lease", ("Job.Abort",)),
    JobStep("prepare", "Source.Begin", _STORES, 600, "reserve room, store closed files", _ABORT_SUSPENSION),
    # The pause begins.
    *_QUIESCE,
    JobStep("freeze", "Source.Freeze", _STORES, 120, "stop, freeze, filter: the cut", _ABORT_SUSPENSION),
    JobStep("store", "Source.Stream", _STORES, 3600, "dump into the store, verify, sync", _ABORT_SUSPENSION),
    JobStep("commit", "Job.Commit", _COORDINATOR, 60, "ask all stores, record COMMIT"),
    JobStep("release", "Source.Release", _STORES, 60, "ask the coordinator, end the frozen processes"),
)

RESUME: tuple[JobStep, ...] = (
    JobStep("preflight", "Source.GetImage", _STORES, 60, "read what the images need"),
    JobStep("preflight", "Target.Examine", _TARGETS, 60, "check that the targets can take them"),
    JobStep("prepare", "Job.Begin", _COORDINATOR, 30, "journal the attempt, start the lease", ("Job.Abort",)),
    JobStep("prepare", "Target.Prepare", _TARGETS, 60, "reserve memory, plan the addresses", _ABORT_RESUMPTION),
    JobStep("send", "Source.Send", _STORES, 3600, "send the images to the targets, signed", _ABORT_RESUMPTION),
    JobStep("restore", "Target.Restore", _TARGETS, 1800, "restore, held, with the new addresses", _ABORT_RESUMPTION),
    JobStep(
        "reattach", _ATTACH, _COORDINATOR, 3600, "build communicators with the held copies", _ABORT_RESUMPTION, True
    ),
    JobStep("commit", "Job.Commit", _COORDINATOR, 60, "ask all targets, record COMMIT"),
    JobStep("activate", "Target.Activate", _TARGETS, 60, "ask the coordinator, journal it, let the copies run"),
)

_ABORT_SNAPSHOT = ("Job.Abort", "Source.Abort", "Target.Discard")

SNAPSHOT: tuple[JobStep, ...] = (
    JobStep("preflight", "Source.Inspect", _STORES, 60, "list what the ranks use; refuse what cannot be restored"),
    JobStep("prepare", "Job.Begin", _COORDINATOR, 30, "journal the snapshot, start the lease", ("Job.Abort",)),
    JobStep("prepare", "Source.Begin", _STORES, 600, "reserve room, store closed files", ("Job.Abort", "Source.Abort")),
    JobStep("prepare", "Target.Prepare", _BUDDIES, 60, "reserve room for the copies", _ABORT_SNAPSHOT),
    # The pause begins.
    *_QUIESCE,
    JobStep("freeze", "Source.Freeze", _STORES, 120, "stop, freeze, filter: the cut", _ABORT_SNAPSHOT),
    JobStep("store", "Source.Stream", _STORES, 3600, "dump into memory; then the rank goes on", _ABORT_SNAPSHOT),
    JobStep("reattach", _ATTACH, _COORDINATOR, 3600, "build communicators again, open gates", _ABORT_SNAPSHOT, True),
    # It has ended.
    JobStep("copy", "Source.Send", _STORES, 3600, "send the images to the buddies, signed", _ABORT_SNAPSHOT),
    JobStep("commit", "Job.Commit", _COORDINATOR, 60, "ask all stores and buddies, record COMMIT"),
    JobStep("keep", "Source.Release", _STORES, 60, "ask the coordinator, keep the image"),
    JobStep("keep", "Target.Activate", _BUDDIES, 60, "ask the coordinator, keep the copy"),
    JobStep("confirm", "Job.GetOutcome", _COORDINATOR, 60, "hear that all ranks are bound, and others know it"),
)

#: How each is undone, in this order: the record first. The others ask for it and act on it; without these calls they would
#: do the same a little later.
UNDO_SUSPEND: tuple[JobStep, ...] = (
    JobStep("undo", "Job.Abort", _COORDINATOR, 60, "record ABORT"),
    JobStep("undo", "Source.Abort", _STORES, 120, "ask the coordinator, thaw the ranks, drop their images"),
    JobStep("undo", _ATTACH, _COORDINATOR, 3600, "build communicators again, open gates", only_with_nccl=True),
)
UNDO_RESUME: tuple[JobStep, ...] = (
    JobStep("undo", "Job.Abort", _COORDINATOR, 60, "record ABORT"),
    JobStep("undo", "Target.Discard", _TARGETS, 120, "ask the coordinator, drop the copies; the images stay"),
)


UNDO_SNAPSHOT: tuple[JobStep, ...] = (
    JobStep("undo", "Job.Abort", _COORDINATOR, 60, "record ABORT"),
    JobStep("undo", "Source.Abort", _STORES, 120, "ask the coordinator, thaw the ranks, drop their images"),
    JobStep("undo", _ATTACH, _COORDINATOR, 3600, "build communicators again, open gates", only_with_nccl=True),
    JobStep("undo", "Target.Discard", _BUDDIES, 120, "ask the coordinator, drop the copies"),
)


class JobVerdict(StrEnum):
    """How a suspension or resumption ended, as the command line reports it."""

    SUSPENDED = "suspended"
    RESUMED = "resumed"
    SNAPSHOTTED = "snapshotted"
    ROLLED_BACK = "rolled back"
    REFUSED = "refused"
    UNDONE = "undone"
    UNKNOWN = "unknown"


def index_of(call: str, table: Sequence[JobStep]) -> int:
    return next(index for index, step in enumerate(table) if step.call == call)


def undo_plan(table: Sequence[JobStep], undo: Sequence[JobStep], reached: int) -> tuple[JobStep, ...]:
    """The steps to ask for if the step with index `reached` failed, at Job.Commit or before. The failed step is undone as
    well, because it may have happened although its answer was lost."""
    if reached > index_of("Job.Commit", table):
        return ()
    needed = {call for step in table[: reached + 1] for call in step.undone_by}
    return tuple(step for step in undo if step.call in needed)


def diagram(table: Sequence[JobStep]) -> str:
    """The table as text. docs/how-a-move-works.md shows this function's output."""
    lines = [_row("PHASE", "CALL", "ASKED OF", "WHAT IT DOES", "UNDONE BY")]
    for step in table:
        if step.call == "Job.Commit":
            lines.append("─" * 24 + " COMMIT " + "─" * 64)
        lines.append(_row(step.phase, step.call, step.asked, step.does, ", ".join(step.undone_by)))
    return "\n".join(lines)


def _row(phase: str, call: str, asked: str, does: str, undo: str) -> str:
    return f"{phase:<9} {call:<15} {asked:<11} {does:<58} {undo}".rstrip()


if __name__ == "__main__":
    print(diagram(SUSPEND), diagram(RESUME), diagram(SNAPSHOT), sep="\n\n")
