"""The protocol of a move: what is asked of which daemon, in which order, and how each step is undone.

**Invariant: at most one copy of a rank ever runs.** The source's copy runs until Freeze stops it. From then on it may run
again only if the outcome of the move is ABORT. The target's copy is restored "held" and may run only if the outcome is
COMMIT. The outcome is one write-once record in the source daemon's journal. It is on disk before either copy may run. What
can overrule it is listed below, and keeps the invariant. "Runs" means the job's own code: in a held copy only threads of the
CUDA driver, the shim and NCCL run, to refill device memory and to build communicators.

**Participants.** The *driver* (`migrator/driver/`, part of `migrator move`) asks for the steps of TABLE in order and decides
nothing. The *source* daemon has the rank and writes the outcome. The *target* daemon receives the rank. *Peers* are the
daemons of nodes with a process that the rank has a TCP connection to; the source can be one of them. The nodes of the *job*
are those that have ranks of the same job; they take part only if the rank is in an NCCL communicator. Every daemon journals
its part before it acts. Every step is idempotent by (move, step), so it can be asked for again if an answer was lost.

**Terms.** The *shim* is the library that `migrator run` loads into a rank. A *gate* is where it stops a rank, at an NCCL
call; the *cut* is the call at which each rank of the job stops, so that none waits for a call that another has not made.
*Members* are the ranks of a communicator. A *held* copy is a restored process whose own code does not run yet. *Stripes* are
files in host memory into which the shim copies device memory with several threads, and the *device channel* carries them.

**Data.** Host memory leaves in Stream, some of it already in PrepareDevice if the operator asks for it, and becomes a
process in Restore. Device memory leaves the GPU in Freeze: what the rank has allocated through the shim goes into stripe
files, which are sent to the target while they are written, and the CUDA driver's checkpoint takes the rest into host memory,
which Stream then sends. The source decides in PrepareDevice: if stripes are not possible (no room for them, or the rank was
started with `--device-memory driver`), the rest is everything. Before that, the threads of the rank are stopped and the
GPU's work is drained, so nothing changes meanwhile. Device memory arrives on the target's GPU in Restore; if the move is
undone, Abort brings it back to the source's GPU from the same place. Open files are part of the image. Files of the source
node that the rank made and has closed leave in PrepareDevice, what changed since in Stream; they are made on the target in
Restore.

**Pause.** The rank stands still from Freeze to Activate. In an NCCL job every rank waits at its gate from Quiesce to Open.
Processes on peers are stopped for about a millisecond in Repoint, and again if an undo points their sockets back. Packets
between the rank and its peers are filtered from Freeze to Settle, so that no kernel answers a stale connection with RST: on
the source from Freeze on, on the peers from Hold on (a source that reboots loses its filter), on the target from Restore on.
Settle drops the filters of the peers, Activate or Discard that of the target, Release or Abort that of the source.

**Lease.** Begin starts a lease, counted by the source alone on its own clock (CLOCK_BOOTTIME). The driver renews it with
Source.Renew throughout the move. If it expires before an outcome is recorded, the source records ABORT, also in answer to a
late Commit. No other participant decides by a time-out: target, peers and job nodes ask the source, and wait as long as it
takes. The default lease is 30 seconds. (An exception: a gate opens after 4 minutes without the source if the target has no
copy, and after 15 minutes without source and target, so that the job fails with an NCCL error instead of hanging. Another: a
target to which nothing is being sent drops a move after 10 minutes without its source, which cannot commit it without a
receipt. And a peer that was not re-pointed yet lets its connections go after 15 minutes without source and target.)

**Nonce, receipt, token.** In Prepare the target makes up a random nonce for the move. The driver passes it to the source,
the peers and the job's nodes, inside mutual TLS. The *receipt* that Restore returns is an HMAC with that nonce: it proves to
the source that the target holds a whole copy, and Commit is refused without it. A *token* is the HMAC over the outcome: it
proves that the source has recorded COMMIT or ABORT. Any holder can pass a token on. Activate requires the token of COMMIT,
Discard that of ABORT, Settle and Open either. The driver passes the token of COMMIT on to Settle and Open only after
Activate; a peer or gate that learns of COMMIT by asking waits until the target says that it runs the rank. The nonce is a
shared secret: it guards against mistakes and strangers, not against a participant that forges a token.

**What overrules a recorded COMMIT.** Two things, both recorded beside it:
- The target's journal says that its copy died, or was dropped, before it ever ran. Then the source takes the rank back and
  thaws its own copy, which it keeps until the target reports the rank running, and everything goes back as after ABORT. This
  is safe because the target journals "activated" before the copy's first instruction, and from then on never gives that
  answer; peers and gates act on COMMIT only once the target runs the rank.
- An operator declares the target permanently down (`migrator recover --target-is-dead`): the source's copy goes on from
  the freeze, also if the target's copy had been activated. What that one did since is lost. Once Release has dropped the
  source's copy there is none to go on, and the rank has ended. Likewise `--source-is-dead` lets a target with a held copy
  run it without any record of the source. Both are refused while the node that is declared dead answers, whether its
  daemon runs or not. A source whose daemon was only down learns from the target that it was declared dead, and records
  COMMIT. A false declaration about a node that no other node can reach, but that still runs its copy, is the one way to
  get two copies.

**If a participant dies**
- *Driver*, before COMMIT: the lease expires, the source records ABORT and thaws the rank. After COMMIT: the source hands the
  token to the target itself. In both cases target, peers and gates learn the outcome by asking, and nothing is left to do.
- *Source daemon*: the rank stays as it is, running or frozen in its cgroup. The restarted daemon reads its journal. A freeze
  or dump that was interrupted is aborted; anything later continues. Until then target, peers and gates wait. Once the image
  was streamed, the restarted daemon records ABORT only when the target has answered that it does not run its copy.
- *Source node*, or the frozen copy itself: that copy can never run again. The source daemon, after a reboot if need be, asks
  the target. If that holds a whole copy, the source has communicators built with it and records COMMIT, whatever the lease
  says; if it has none, ABORT, and the rank has ended. A source node that never returns needs `--source-is-dead`. Peers that
  have filtered their connections re-point them after such a COMMIT by themselves.
- *A node with another member of the rank's communicators*: the move is undone, and the undo waits for that node behind closed
  gates. If it never returns, `migrator recover MOVE --member-is-dead NODE` has the source give the communicators up: it
  journals that, all gates open, and the job gets NCCL's errors. A node that was only cut off learns it by asking.
- *Target daemon*: a held copy stays stopped. The restarted daemon asks the source, and neither runs nor drops the copy until
  it has an answer.
- *Target node*, or the held copy: before COMMIT the move is aborted, after COMMIT the rank is taken back (above), once the
  target's daemon can say so or the operator does. A copy that was activated is the rank: if it dies, the rank has ended.
- *Peer daemon*: a failed SuspendTimeouts, Hold or Repoint aborts the move. Later, the restarted daemon asks the source how
  the move ended. It delays nothing but its own connections. A peer believes COMMIT only once the target runs the rank.
- *A node of the job*: a failed Quiesce, Detach or Attach aborts the move, and the source has the communicators built again as
  part of ABORT. A gate opens after COMMIT once the target runs the rank, after ABORT once that rebuilding is done.
- *Home keeper* (the process that the launcher knows as the rank): before COMMIT the outcome is ABORT, after it COMMIT stands.
  Either way the rank is killed wherever it is, because a launcher that lost the rank may start it anew.

This file is pure: no I/O, no clock. `snapshotd/moves/rules.py` has the daemons' rules for unfinished moves. `tests/protocol/`
walks every prefix of the table with every participant dying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from snapshotd.api.errors import Where


class Asked(StrEnum):
    """The daemons that the driver asks for a step."""

    SOURCE = "source"
    TARGET = "target"
    PEERS = "peers"  # all at once
    JOB = "job"  # every node that has ranks of the job, all at once


#: The gRPC service that serves each of them.
SERVICE = {Asked.SOURCE: "Source", Asked.TARGET: "Target", Asked.PEERS: "Peer", Asked.JOB: "Gate"}


@dataclass(frozen=True)
class Step:
    """One row of the table."""

    phase: str  # as progress and results name it; several steps can share one
    action: str  # name of the step, and of its RPC unless `rounds_of` is set
    asked: Asked
    where: Where  # where the rank is when the step is done
    timeout_s: float
    does: str
    undone_by: tuple[str, ...] = ()  # actions of UNDO; empty: there is nothing to undo
    only_with_nccl: bool = False  # skipped if the rank is in no NCCL communicator
    rounds_of: tuple[str, ...] = ()  # the step is rounds of these RPCs, until every rank is where it has to be
    beside_next: bool = False  # asked for while the next step is done; that one ends when both are
    fans_out: tuple[str, ...] = ()  # the asked daemon itself calls these RPCs on every node with a member

    @property
    def calls(self) -> tuple[str, ...]:
        """The RPCs that the driver calls."""
        return tuple(f"{SERVICE[self.asked]}.{call}" for call in self.rounds_of or (self.action,))

    @property
    def asked_text(self) -> str:
        """For the diagram."""
        return f"{self.asked} → members" if self.fans_out else f"{self.asked}, rounds" if self.rounds_of else self.asked


_RUNNING, _FROZEN = Where.SOURCE_RUNNING, Where.SOURCE_FROZEN
_HELD, _MOVED = Where.TARGET_HELD, Where.TARGET_RUNNING

TABLE: tuple[Step, ...] = (
    # Preflight: questions only. A refusal here is exit code 10, and nothing has been changed or paused.
    Step("preflight", "Inspect", Asked.SOURCE, _RUNNING, 60, "list what the rank uses; refuse what cannot move"),
    Step("preflight", "Examine", Asked.TARGET, _RUNNING, 60, "check that the target can take it"),
    Step("preflight", "InspectConnections", Asked.PEERS, _RUNNING, 60, "check the peers' sockets"),
    # Prepare: everything slow that can be done while the job runs.
    Step("prepare", "Prepare", Asked.TARGET, _RUNNING, 30, "reserve memory and GPUs, make the nonce", ("Discard",)),
    Step("prepare", "Begin", Asked.SOURCE, _RUNNING, 30, "journal the move, start the lease", ("Abort",)),
    Step(
        *("prepare", "PrepareDevice", Asked.SOURCE, _RUNNING, 600),
        does="send closed files and memory; create stripes, channel",
        undone_by=("Abort",),
    ),
    Step(
        *("prepare", "SuspendTimeouts", Asked.PEERS, _RUNNING, 30),
        does="switch off TCP time-outs towards the rank",
        undone_by=("Settle",),
    ),
    # The pause begins.
    Step(
        *("quiesce", "Quiesce", Asked.JOB, _RUNNING, 600),
        does="close the gates, let ranks run up to one cut",
        undone_by=("Open",),
        only_with_nccl=True,
        rounds_of=("Close", "SetTargets"),
    ),
    Step(
        *("detach", "Detach", Asked.SOURCE, _RUNNING, 3600),
        does="destroy the rank's communicators",
        undone_by=("Abort", "Open"),
        only_with_nccl=True,
        fans_out=("Report", "Detach"),
    ),
    Step(
        *("freeze", "Freeze", Asked.SOURCE, _FROZEN, 900),
        does="copy device memory off the GPU; stop, freeze, filter",
        undone_by=("Abort",),
    ),
    Step(
        *("stream", "Hold", Asked.PEERS, _FROZEN, 30),
        does="filter the peers' sockets too (while Stream runs)",
        undone_by=("Settle",),
        beside_next=True,
    ),
    Step("stream", "Stream", Asked.SOURCE, _FROZEN, 3600, "dump with CRIU, send while it is written", ("Abort",)),
    Step(
        *("restore", "Restore", Asked.TARGET, _FROZEN, 1800),
        does="restore, held; refill device memory; give the receipt",
        undone_by=("Discard",),
    ),
    Step(
        *("reattach", "Attach", Asked.SOURCE, _FROZEN, 3600),
        does="build communicators anew with the held copy",
        undone_by=("Abort", "Open"),
        only_with_nccl=True,
        fans_out=("NewId", "Attach", "GiveUp"),
    ),
    Step(
        *("re-point", "Repoint", Asked.PEERS, _FROZEN, 60),
        does="point the peers' sockets at the target, filtered",
        undone_by=("Settle",),
    ),
    # The outcome. Everything above can be undone; everything below is only finished, unless COMMIT is overruled (see above).
    Step("commit", "Commit", Asked.SOURCE, _HELD, 30, "take the receipt, record COMMIT, give the token"),
    Step("activate", "Activate", Asked.TARGET, _MOVED, 60, "take the token, journal it, let the copy run"),
    Step("open", "Open", Asked.JOB, _MOVED, 60, "open the gates", only_with_nccl=True),
    Step("settle", "Settle", Asked.PEERS, _MOVED, 60, "drop the filters, restore the time-outs"),
    Step("clean", "Release", Asked.SOURCE, _MOVED, 60, "ask the target, then drop the frozen copy"),
)

#: How a move is undone, in this order. ABORT comes first: the target may drop its copy, and peers and gates may go back, only
#: once the record says that the source's copy goes on. Until Settle, filters drop what the thawed rank and its peers send,
#: and TCP repeats it. As part of Abort the source has detached communicators built again, which takes longest. Only after
#: that do gates open.
UNDO: tuple[Step, ...] = (
    Step("undo", "Abort", Asked.SOURCE, _RUNNING, 3600, "record ABORT, thaw the rank, rebuild its communicators"),
    Step(
        "undo", "Settle", Asked.PEERS, _RUNNING, 60, "point the sockets back, drop the filters, restore the time-outs"
    ),
    Step("undo", "Open", Asked.JOB, _RUNNING, 60, "open the gates", only_with_nccl=True),
    Step("undo", "Discard", Asked.TARGET, _RUNNING, 60, "drop the copy, the images and the reservations"),
)


def index_of(action: str) -> int:
    return next(index for index, step in enumerate(TABLE) if step.action == action)


#: Index of the first step that changes anything. A refusal up to and including it is "refused" (exit code 10): nothing was
#: paused. A later one is "undone" (exit code 11).
PREPARE = index_of("Prepare")
COMMIT = index_of("Commit")
ACTIVATE = index_of("Activate")


def undo_plan(reached: int) -> tuple[Step, ...]:
    """The steps of UNDO to ask for if the step with index `reached` failed, at COMMIT or before.

    The failed step is undone as well, because it may have happened although its answer was lost. Abort answers with the
    outcome that stands: if that is COMMIT, nothing is undone, and the daemons finish the move. Abort of a move that the
    source has never begun is recorded too, so that a delayed Begin is refused. The target of such a move asks the source. If
    Prepare itself failed, there is no ABORT to prove to the target: it asks the source, which does not know the move, and
    drops it by itself.
    """
    if reached > COMMIT:
        return ()
    needed = {action for step in TABLE[: reached + 1] for action in step.undone_by}
    return tuple(step for step in UNDO if step.action in needed)


class Verdict(StrEnum):
    """How a move ended, as the command line reports it."""

    MOVED = "moved"
    REFUSED = "refused"
    UNDONE = "undone"
    UNKNOWN = "unknown"


def decide(reached: int, outcome: str | None) -> tuple[Verdict, str]:
    """The verdict, and the reason, if the driver stops at step `reached`; `outcome` is what the source answered last.

    `outcome` is "COMMIT", "ABORT" (also once COMMIT was overruled), "UNDECIDED" (the source has recorded nothing yet) or None
    (no answer). A refusal up to PREPARE, and a rank that has ended, are reported without this function.
    """
    if outcome == "COMMIT" and reached > ACTIVATE:
        return Verdict.MOVED, "the rank runs on the target; the daemons finish cleaning up"
    if outcome == "COMMIT":
        return (
            Verdict.UNKNOWN,
            "committed, but the target has not confirmed that the rank runs; the daemons keep trying",
        )
    if outcome == "ABORT":
        return Verdict.UNDONE, "aborted: the rank continues on the source"
    if reached < index_of("Begin"):
        return Verdict.UNDONE, "the source had not begun the move"
    if outcome == "UNDECIDED":
        return Verdict.UNKNOWN, "the source has not decided; it aborts when the lease expires"
    return Verdict.UNKNOWN, "the source does not answer; its journal has the outcome"


def diagram(table: Sequence[Step] = TABLE) -> str:
    """The table as text. The README shows this function's output."""
    lines = [_row("PHASE", "STEP", "ASKED OF", "WHAT IT DOES", "UNDONE BY")]
    for step in table:
        if step.action == "Commit":
            lines.append("─" * 30 + " COMMIT: from here on only the target may run " + "─" * 30)
        does = f"[NCCL] {step.does}" if step.only_with_nccl else step.does
        lines.append(_row(step.phase, step.action, step.asked_text, does, ", ".join(step.undone_by)))
    lines.append("[NCCL] only if the rank is in an NCCL communicator; members: all nodes with a rank in one of them")
    return "\n".join(lines)


def _row(phase: str, action: str, asked: str, does: str, undo: str) -> str:
    return f"{phase:<9} {action:<18} {asked:<16} {does:<53} {undo}".rstrip()


if __name__ == "__main__":
    print(diagram())
