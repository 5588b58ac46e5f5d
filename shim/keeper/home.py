"""The home keeper: the process that the launcher knows as the rank, on whichever node the rank runs.

Invariants: to the launcher the keeper looks like the rank: it has the rank's output, reaction to signals and exit
status. Daemons may restart. The rank never waits for one, except before it starts. If the keeper ends, the rank ends.
The exit of the local process is the rank's exit only while the rank is here and no move holds it. During a move, the
outcome of the move decides. If the job has snapshots, a failure of the rank is held back for a while: the job may be
rolled back, and then the rank has not ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shim.keeper import frames, report, signals
from shim.keeper.child import Child
from shim.keeper.front import Front
from shim.keeper.holdback import HoldBack
from shim.keeper.library import Library
from shim.keeper.link import BYE_S, Link
from shim.keeper.loop import Loop, Wish
from shim.keeper.relay import HomeEnd
from shim.keeper.stdio import Stdio, TooMuchToHandOver
from shim.keeper.tail import Tail

if TYPE_CHECKING:
    from shim.keeper.companion import Companion

CANNOT_REGISTER = 125
DAEMON_WAIT_S = 10.0


class HomeKeeper:
    def __init__(
        self,
        argv: Sequence[str],
        job: str,
        rank: int,
        keeper_sock: str,
        environment: Mapping[str, str],
        alone: bool = False,
        preload: Library | None = None,
        allow_unprotected: bool = False,
    ) -> None:
        self.final_status = CANNOT_REGISTER << 8
        self._identity = {
            "role": "home",
            "protocol": frames.PROTOCOL,
            "job": job,
            "alone": alone,
            "rank": rank,
            "relay_key": os.urandom(16).hex(),
            "command": " ".join(argv)[:2000],
            "cwd": str(Path.cwd()),
            "started_unix_s": time.time(),
            "library": {"build": preload.build, "abi": preload.abi} if preload is not None else None,
            "allow_unprotected": allow_unprotected,
        }
        self._report_path = report.path_in(environment)
        self._uid = ""
        self._node: dict[str, Any] = {"home_node": "", "home_endpoint": ""}
        self._moves = 0
        self._held_move = ""
        self._away_node = ""
        self._away_move = ""
        self._queued: list[int] = []
        self._local_status: int | None = None
        self._end_status: int | None = None  # the rank's wait status, from whichever node it ended on
        self._is_telling = False
        self._failure = HoldBack(lambda: self.loop, self._tell_failure, self._pass_on)
        self.companion: Companion | None = None

        ignored = signals.ignored_by_launcher()
        mask = {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
        self._front = Front(self._shut)
        self.loop = Loop()
        self.loop.catch([*signals.to_forward(ignored), signal.SIGCHLD], self._on_signal)
        for number in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._child = Child(argv, environment, self._front.channels, ignored, mask)
        self._stdio = Stdio(self.loop, self._front.channels)
        self._stdio.give_rank_ends()
        self._relay = HomeEnd(self.loop, self._stdio.tails, Tail(), lambda *frame: self._link.relay(*frame))
        self._link = Link(self.loop, keeper_sock, self._hello, self._on_frame, self._on_link_lost)
        self.loop.before(self._work)
        self.loop.add(self._wishes)
        self._link.connect()
        if not self._link.is_connected:
            say(f"waiting for snapshotd at {keeper_sock} ({self._link.trouble})")
        self.loop.after(DAEMON_WAIT_S, self._give_up_waiting)
        if self._front.keyboard.terminal is not None:
            self.loop.after(1.0, self._look_at_foreground)

    def set_replayed(self, how: str) -> None:
        """What is done with output that the rank prints again after a rollback."""
        self._relay.replayed, self._relay.say = how, self._say_in_order

    def _say_in_order(self, text: str) -> None:
        """Says it on stderr, after what the rank has written there."""
        found = [one.name for one in self._front.channels if one.has_output and 2 in one.fds]
        if found:
            self._stdio.tails[found[0]].append(f"migrator run: {text}\n".encode())
        else:
            say(text)

    # ---- the daemon

    def _hello(self) -> dict[str, Any]:
        return {
            **self._identity,
            **self._node,
            "uid": self._uid,
            "pid": self._child.pid,
            "moves": self._moves,
            "held_move": self._held_move,
            "away_node": self._away_node,
            "stdio": self._stdio.describe(),
            "exited": None if self._away_node else self._local_status,
            "finished": self._end_status is not None,
        }

    def _on_frame(self, frame: frames.Frame) -> None:
        fields = frame.header
        move = str(fields.get("move", ""))
        match frame.type:
            case "welcome":
                self._welcomed(fields)
            case "refused" if not self._uid:
                say(f"snapshotd refuses this rank: {fields.get('message')}")
                self._stop_unregistered()
            case "refused":
                self._link.close_and_retry()
            case "hold" if self._end_status is None and not self._away_node:
                self._held_move, self._stdio.is_held = move, True
                self._link.send("held", {"move": move})
            case "drain" if self._held_move == move:
                self._hand_over(move)
            case "resume":
                self._resume(move)
            case "away":
                self._go_away(move, str(fields.get("node", "")))
            case "protect":
                self._failure.is_on = True
            case "say":
                say(str(fields.get("text", "")))
            case "kill":
                self._kill()
            case "bye" if self._is_telling:
                self.loop.leave()
            case kind if kind in frames.RELAY_TYPES:
                self._on_relay(frame)

    def _welcomed(self, fields: dict[str, Any]) -> None:
        self._link.welcomed()
        if not self._uid:
            self._uid = str(fields.get("uid", ""))
            if fields.get("warning"):
                say(f"warning: {fields['warning']}")
            self._node = {"home_node": str(fields.get("node", "")), "home_endpoint": str(fields.get("endpoint", ""))}
            self._front.enter_terminal()
            self._child.go()
            if self.companion is not None:
                self.companion.start(self._uid)
        else:
            self._relay.again()
        if self._is_telling:
            self._link.send("exited", {"status": self._end_status})
        self._failure.tell_again()

    def _on_link_lost(self) -> None:
        self._relay.lost()
        if self._is_telling:
            self.loop.leave()  # no daemon is there to take the report, and the launcher waits

    def _give_up_waiting(self) -> None:
        if not self._uid:
            say(
                f"no snapshotd answers on this node ({self._link.trouble or 'connected, but no answer'}); "
                "start it (systemctl start snapshotd), or run the command without `migrator run`"
            )
            self._stop_unregistered()

    def _stop_unregistered(self) -> None:
        signals.deliver(self._child.pid, signal.SIGKILL)
        self.final_status = CANNOT_REGISTER << 8
        self.loop.leave()

    # ---- a move

    def _hand_over(self, move: str) -> None:
        try:
            state = self._stdio.hand_over(tails_too=False)
        except (TooMuchToHandOver, OSError) as error:
            self._link.send("stdio", {"move": move, "error": str(error)})
            return
        state["signals"] = {"last": 0, "queued": []}
        state["report_path"] = self._report_path
        self._link.send_state(move, state)

    def _resume(self, move: str) -> None:
        is_late = bool(self._held_move) and self._held_move != move  # it belongs to an older move
        if not self._away_node and not is_late:
            self._held_move = ""
            self._stdio.let_go()
            queued, self._queued = self._queued, []
            for number in queued:
                self._forward(number)
            self._resize()
            if self._local_status is not None and not self._failure.holds(self._local_status):
                self._ended(self._local_status)
        self._link.send("resumed", {"move": move})

    def _go_away(self, move: str, node: str) -> None:
        self._failure.forget()
        if not self._away_node:
            self._stdio.pull_all()
            self._stdio.close()
            self._held_move = ""
        if move != self._away_move:
            self._moves += 1
        self._away_node, self._away_move = node, move
        self._link.send("gone", {"move": move})
        self._resize()
        self._relay.open()
        queued, self._queued = self._queued, []
        for number in queued:
            self._relay.signal(number)

    def _on_relay(self, frame: frames.Frame) -> None:
        try:
            self._relay.receive(frame)
        except (KeyError, TypeError, ValueError, AttributeError):
            self._relay.again()  # damaged, or from a guest keeper of another version: agree on the offsets again
        if self._relay.exit_status is not None:
            if self._relay.report and self._report_path and self._end_status is None:
                report.put(self._report_path, self._relay.report)
            self._ended(self._relay.exit_status)

    def _kill(self) -> None:
        """Ends the rank as if it were killed, because it cannot continue on any node."""
        if self._away_node:
            self._ended(int(signal.SIGKILL))
            return
        self._held_move = ""
        if self._local_status is None:
            signals.deliver(self._child.pid, signal.SIGKILL)
        else:
            self._ended(self._local_status)

    # ---- signals

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGWINCH and self._front.has_terminal:
            self._resize()
        else:
            self._forward(number)
            if number == signal.SIGTSTP:
                self._front.stop_with_shell()
            elif number == signal.SIGCONT:
                self._front.enter_terminal()

    def _forward(self, number: int) -> None:
        self._failure.asked_to_end(number)
        if self._held_move:
            self._queued.append(number)
        elif self._away_node:
            self._relay.signal(number)
        elif self._local_status is None:
            signals.deliver(self._child.pid, number)

    def _resize(self) -> None:
        if self._front.has_terminal and not self._held_move:
            rows, columns = self._front.window_size()
            self._relay.resize(rows, columns)
            if not self._away_node:
                self._stdio.resize(rows, columns)

    def _look_at_foreground(self) -> None:
        """Polls for the foreground, because a shell's `fg` sends no signal to a job that was not stopped."""
        if self._uid and self._end_status is None:
            self._front.enter_terminal()
        self.loop.after(1.0, self._look_at_foreground)

    # ---- the end

    def leave_terminal(self) -> None:
        self._front.leave_terminal()

    def _reap(self) -> None:
        if self._local_status is not None:
            return
        pid, status = os.waitpid(self._child.pid, os.WNOHANG)
        if pid == 0:
            return
        self._local_status = status
        self._stdio.rank_ended()
        if self._away_node:
            return
        if self._held_move:
            self._link.send("died", {"move": self._held_move, "status": status})
        elif not self._failure.holds(status):
            self._ended(status)

    def _tell_failure(self, status: int) -> None:
        self._link.send("failed", {"status": status})

    def _pass_on(self, status: int) -> None:
        """The job was not rolled back: the failure is the rank's end."""
        if not self._away_node:
            self._ended(status)

    def _ended(self, status: int) -> None:
        if self._end_status is None:
            self._end_status = status
            self.loop.after(0.1, self._look_at_end)

    def _look_at_end(self) -> None:
        """Wakes the loop regularly until the rank's last output has arrived."""
        if not self._is_telling:
            self.loop.after(0.1, self._look_at_end)

    def _tell_end(self) -> None:
        assert self._end_status is not None
        self._is_telling = True
        self.final_status = self._end_status
        if not self._uid or not self._link.is_welcome:
            self.loop.leave()
            return
        self._link.send("exited", {"status": self._end_status})
        self.loop.after(BYE_S, self.loop.leave)

    # ---- bytes

    def _work(self) -> None:
        self._front.discard_unwanted(self._stdio.tails)
        self._relay.pump()
        is_ending = self._end_status is not None and not self._is_telling
        is_read = bool(self._away_node) or self._stdio.is_all_read
        if is_ending and is_read and all(len(tail) == 0 for tail in self._stdio.tails.values()):
            self._tell_end()

    def _wishes(self) -> Iterable[Wish]:
        yield from self._front.wishes(self._stdio.tails)
        if self._wants_keys():
            yield Wish(self._front.keyboard.fd, on_readable=self._type)

    def _shut(self, name: str) -> None:
        self._stdio.shut(name)
        self._relay.shut(name)

    def _wants_keys(self) -> bool:
        if not self._uid or self._end_status is not None or not self._front.keyboard.may_read():
            return False
        if self._away_node:
            return not self._relay.keyboard.is_full
        return self._stdio.wants_input

    def _type(self) -> None:
        data = self._front.keyboard.read()
        if self._front.has_terminal:
            self._failure.typed(data)
        keyboard = self._relay.keyboard
        keyboard.append(data)
        self._relay.keyboard_ended = not self._front.keyboard.is_open
        if not self._away_node:
            keyboard.release(keyboard.end)
            self._stdio.feed(data)
            if self._relay.keyboard_ended:
                self._stdio.end_input()


def say(text: str) -> None:
    os.write(2, f"migrator run: {text}\n".encode())
