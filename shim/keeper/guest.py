"""The guest keeper: pid 1 of the namespace into which a rank is restored, as long as the rank is on this node.

The daemon starts it as `python -m shim.keeper.guest` with its parameters as JSON on stdin. It creates the stdio
channels and starts `criu swrk` with the rank's ends of them. The daemon communicates with criu. Invariants: the rank
gets no input and no signal before `activated`. Its output and exit status stay here until the home keeper has
acknowledged them, however long the daemons or the home keeper are unreachable. When the guest keeper ends, so does
every process of the rank on this node. It starts as root, because criu and the namespaces need that, and becomes the
rank's user once the daemon has welcomed it: everything that the user's home keeper sends is handled as that user.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from shim.keeper import frames, namespaces, report, signals
from shim.keeper.channels import PTY
from shim.keeper.holdback import HoldBack
from shim.keeper.link import BYE_S, Link
from shim.keeper.loop import Loop
from shim.keeper.privileges import Identity
from shim.keeper.relay import GuestEnd
from shim.keeper.spool import Spool
from shim.keeper.stdio import Stdio, TooMuchToHandOver

FIRST_INHERITED_FD = 10
_REMEMBERED_ENDS = 1024
#: Longer than the daemon waits for its guest keeper.
WELCOME_S = 30.0


def main() -> int:
    text = sys.stdin.read()
    if not text:  # it was started in advance, and is not needed
        return 0
    orders = json.loads(text)
    if os.fork() != 0:  # the daemon's child exits at once, so that the keeper is not a child of the daemon
        return 0
    _be_no_exception()
    os.setsid()
    os.chdir("/")
    if not namespaces.fork_into_fresh_namespaces():
        return 0
    _forget_daemons_stdio()
    GuestKeeper(orders).loop.run()
    return 0


def _be_no_exception() -> None:
    """The daemon is spared when memory runs out. Its ranks must not be, and they inherit the keeper's adjustment."""
    path = Path("/proc/self/oom_score_adj")
    if int(path.read_text()) < 0:
        path.write_text("0")


def _forget_daemons_stdio() -> None:
    """Replaces stdin and stdout, which a dump would include; stderr stays, for the daemon's log."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)


class GuestKeeper:
    def __init__(self, orders: dict[str, Any]) -> None:
        self._orders = orders
        self._move = str(orders["move"])
        self._held_move = self._move  # until `activated`
        self._is_activated = False
        self._is_gone = False  # the rank is on another node: the keeper only waits for the exit of the local copy
        self._pid = 0
        self._ends: dict[int, int] = {}
        self._status: int | None = None
        self._is_telling = False
        self._was_welcomed = False
        self._queued: list[int] = []
        self.loop = Loop()
        self.loop.catch([signal.SIGCHLD], self._on_child)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        self._failure = HoldBack(lambda: self.loop, self._tell_failure, lambda status: None)
        state = orders["stdio"]
        self._identity = Identity(orders["identity"])
        self._stdio = Stdio.of_state(self.loop, state, self._identity, Spool.of_orders(orders["spool"]))
        self._relay = GuestEnd(self.loop, self._stdio, self._send_relay, self._deliver)
        self._stdio.may_spool = self._relay.is_cut_off
        by = (
            orders if orders.get("run") else state
        )  # the keeper before this one may not have reached the home keeper since
        self._relay.run, self._relay.replayed = str(by.get("run", "")), str(by.get("replayed", ""))
        if any(channel.kind == PTY for channel in self._stdio.channels):
            self._relay.typed = self._failure.typed
        handed = state.get("signals", {})
        self._relay.last_signal_id = int(handed.get("last", 0))
        self._queued += [int(number) for number in handed.get("queued", [])]
        self._inherit = [
            {"key": str(described["key"]), "fd": FIRST_INHERITED_FD + index}
            for index, described in enumerate(state["channels"])
        ]
        self._report_path = str(state.get("report_path", ""))
        report.make_room(self._report_path, self._identity)
        self._criu_pid = self._start_criu(orders["criu"], int(orders["criu_fd"]), str(orders["cgroup_procs"]))
        self._link = Link(self.loop, str(orders["keeper_sock"]), self._hello, self._on_frame, self._relay.lost)
        self.loop.before(self._work)
        self._link.connect()

    def _start_criu(self, criu: dict[str, Any], criu_fd: int, cgroup_procs: str) -> int:
        """`criu` has the program's argv, the descriptors that this names, and the program's environment."""
        namespaces.number_next_process_high()
        pid = os.fork()
        if pid != 0:
            for fd in (criu_fd, *criu["fds"]):
                os.close(fd)
            return pid
        try:
            if cgroup_procs:
                Path(cgroup_procs).write_text("0")
            _exec_criu(criu, criu_fd, [channel.rank_fd for channel in self._stdio.channels])
        except OSError as error:
            print(f"guest keeper: cannot start criu: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)

    # ---- the daemon

    def _hello(self) -> dict[str, Any]:
        orders = self._orders
        return {
            "role": "guest",
            "protocol": frames.PROTOCOL,
            **{key: orders[key] for key in ("uid", "job", "rank", "relay_key", "home_node", "home_endpoint")},
            **{key: orders.get(key) for key in ("command", "cwd")},
            "moves": orders.get("moves", 0),
            "started_unix_s": orders.get("started_unix_s", 0.0),
            "move": self._move,
            "pid": self._pid,
            "activated": self._is_activated,
            "held_move": self._held_move,
            "inherit": self._inherit,
            "stdio": self._stdio.describe(),
            "exited": self._status,
            "finished": self._status is not None
            and self._is_activated
            and not self._held_move
            and not self._failure.is_holding,
        }

    def _on_frame(self, frame: frames.Frame) -> None:
        fields = frame.header
        move = str(fields.get("move", ""))
        match frame.type:
            case "welcome":
                self._was_welcomed = True
                self._identity.assume_alone()
                self._link.welcomed()
                self._failure.tell_again()
                self._relay.sync()
            case "refused":
                if fields.get("final") is True and not self._is_activated:
                    self.loop.leave()  # its move has ended; an activated copy is the rank, whatever the daemon has lost
                self._link.close_and_retry()
            case "restored":
                self._restored(int(fields["pid"]))
            case "activated":
                if not self._is_activated:
                    self._is_activated = True
                    self._let_go()
                self._link.send("active", {"move": move})
            case "hold" if self._is_activated and self._status is None:
                self._held_move, self._stdio.is_held = move, True
                self._link.send("held", {"move": move})
            case "drain" if self._held_move == move and self._is_activated:
                self._hand_over(move)
            case "resume":
                if self._is_activated and not self._is_gone and self._held_move == move:
                    self._let_go()
                    if self._status is not None:
                        self._failure.holds(self._status)
                self._link.send("resumed", {"move": move})
            case "away":
                self._is_gone = True
                self._link.send("gone", {"move": move})
            case "relay":
                self._relay.sync() if fields.get("up") is True else self._relay.lost()
            case "protect":
                self._failure.is_on = True
            case "kill":
                self.loop.leave()  # when pid 1 exits, the kernel kills every process of the namespace
            case "bye" if self._is_telling:
                self.loop.leave()
            case kind if kind in frames.RELAY_TYPES and not self._is_gone:
                self._on_relay(frame)

    def _restored(self, pid: int) -> None:
        self._pid = pid
        self._stdio.give_rank_ends()
        self._link.send("ready", {"pid": pid})
        if pid in self._ends:
            self._rank_ended(self._ends[pid])

    def _hand_over(self, move: str) -> None:
        try:
            state = self._stdio.hand_over(tails_too=True)
        except (TooMuchToHandOver, OSError) as error:
            self._link.send("stdio", {"move": move, "error": str(error)})
            return
        state["report_path"] = self._report_path
        state["signals"] = {"last": self._relay.last_signal_id, "queued": self._queued}
        state |= {"run": self._relay.run, "replayed": self._relay.replayed}
        self._link.send_state(move, state)

    def _let_go(self) -> None:
        self._held_move = ""
        self._stdio.let_go()
        queued, self._queued = self._queued, []
        for number in queued:
            self._deliver(number)
        self._relay.open()

    # ---- the home keeper

    def _send_relay(self, *frame: Any) -> bool:
        return not self._is_gone and self._link.relay(*frame)

    def _on_relay(self, frame: frames.Frame) -> None:
        try:
            self._relay.receive(frame)
        except (KeyError, TypeError, ValueError, AttributeError):
            self._relay.sync()  # damaged, or from a home keeper of another version: agree on the offsets again
        if self._relay.exit_acked and not self._is_telling:
            self._is_telling = True
            self._link.send("exited", {"status": self._status})
            self.loop.after(BYE_S, self.loop.leave)

    def _deliver(self, number: int) -> None:
        self._failure.asked_to_end(number)
        if self._held_move:
            self._queued.append(number)
        elif self._status is None and self._pid:
            signals.deliver(self._pid, number)

    # ---- processes

    def _on_child(self, _number: int) -> None:
        """Reaps the rank, criu, and the orphans of the rank's process tree, which are children of pid 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._criu_pid:
                self.loop.after(WELCOME_S, self._leave_unwelcome)
            if pid == self._pid:
                self._rank_ended(status)
            elif self._pid == 0 and pid != self._criu_pid and len(self._ends) < _REMEMBERED_ENDS:
                self._ends[pid] = status  # it may turn out to have been the rank

    def _leave_unwelcome(self) -> None:
        """Criu has ended, and this daemon never answered, which has given the keeper up by now: it was killed meanwhile."""
        if not self._was_welcomed:
            self.loop.leave()

    def _rank_ended(self, status: int) -> None:
        self._status = status
        self._stdio.rank_ended()
        if not self._is_gone:
            self._relay.report = report.collect(self._report_path, self._identity)
        if self._held_move and not self._is_gone:
            self._link.send("died", {"move": self._held_move, "status": status})
        elif self._is_activated and not self._is_gone:
            self._failure.holds(status)
        self.loop.after(0.1, self._look_at_end)

    def _tell_failure(self, status: int) -> None:
        self._link.send("failed", {"status": status})

    def _look_at_end(self) -> None:
        """Reports the exit status after the last output."""
        if not self._stdio.is_all_read or self._held_move or self._failure.is_holding:
            self.loop.after(0.1, self._look_at_end)
        else:
            self._relay.exit_status = self._status

    def _work(self) -> None:
        if self._is_gone and self._status is not None and self._link.is_flushed:
            self.loop.leave()  # the local copy has exited: nothing is left to wait for
        ended = self._status is not None and not self._held_move and not self._failure.is_holding
        if ended and self._stdio.output_ended:
            self._relay.exit_status = self._status
        self._relay.pump()


def _exec_criu(criu: dict[str, Any], criu_fd: int, ends: list[int]) -> NoReturn:
    """Executes criu with these descriptors only: 0, 1, 2, its socket, the program's own, and the rank's ends from
    FIRST_INHERITED_FD on."""
    import fcntl

    talk_fd = fcntl.fcntl(criu_fd, fcntl.F_DUPFD, 200)
    for index, end in enumerate(ends):
        os.dup2(end, FIRST_INHERITED_FD + index, inheritable=True)
    kept = [*range(FIRST_INHERITED_FD, FIRST_INHERITED_FD + len(ends)), talk_fd, *criu["fds"]]
    last = 2
    for fd in [*sorted(kept), (1 << 31) - 1]:
        os.closerange(last + 1, fd)
        last = fd
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    os.execve(criu["argv"][0], [*criu["argv"], "swrk", str(talk_fd)], criu["environment"])


if __name__ == "__main__":
    sys.exit(main())
