"""Carries output, input, signals and the exit status between the guest keeper on the rank's node and the home keeper.

The daemons forward these frames, and may lose any of them when they exit. Invariant: each byte and each signal is
applied exactly once, in order. For that, each carries an absolute offset (or id) and stays with its sender until it is
acknowledged, and both sides agree on the offsets (`sync`) after every interruption and whenever one of them makes no
progress, whatever the others do: a signal may be lost while output flows.

    guest -> home   sync {in, sig, run, from, replay}  sender's position: input taken, last signal taken; after a rollback
                                                 also which one, where its output begins, and what to do with output that
                                                 is printed again
    home -> guest   sync {out, shut, win, in, sig, run}  sender's position: output received per channel, input and signals
                                                 that it has no longer, and the last rollback that it knows; then what
                                                 guest lacks
    home -> guest   resync {}                    send sync again: something is missing
    guest -> home   out {c, o} + bytes           home -> guest   ack {c, o}     written to the real stdout
    home -> guest   in {o, eof} + bytes          guest -> home   inack {o}      written to the rank's stdin
    home -> guest   sig {n, id}                  guest -> home   sigack {id}
    home -> guest   win {rows, cols}, shut {c}   the terminal's new size; this channel has no reader any more
    guest -> home   exit {status} + report       home -> guest   exitack {}     after all output was acknowledged
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shim.keeper.frames import Frame
from shim.keeper.loop import Loop
from shim.keeper.printed import Printed
from shim.keeper.stdio import Stdio
from shim.keeper.tail import Tail

OUT_WINDOW_BYTES = 1 << 20
IN_WINDOW_BYTES = 1 << 18
CHUNK_BYTES = 1 << 16
STALL_S = 2.0
#: What is done with output that a rank prints again after a rollback.
SUPPRESS, MARK, PASS = REPLAYED = ("suppress", "mark", "pass")
BEGIN_MARK = "the job was rolled back: output is repeated from here on"
END_MARK = "the repeated output ends here"
#: An interruption that lasts longer is not the restart of a daemon: the rank continues without its readers.
CUT_OFF_S = 2.0

Send = Callable[..., bool]  # (type, fields, payload) -> whether it was queued; False: no connection, or too much queued


class GuestEnd:
    """The rank's side: sends output, receives input and signals."""

    def __init__(self, loop: Loop, stdio: Stdio, send: Send, deliver: Callable[[int], None]) -> None:
        self._loop = loop
        self._stdio = stdio
        self._send = send
        self._deliver = deliver
        self._sent = {name: tail.base for name, tail in stdio.tails.items()}
        self._begins = dict(self._sent)
        self.run = ""  # after a rollback: its record
        self.replayed = ""  # and what is done with output that is printed again; empty: as the home keeper was told
        self._acked_in = stdio.in_offset
        self._is_synced = False
        self._synced_s = time.monotonic()  # when it was last in sync
        self._exit_sent = False
        self.is_open = False  # after activation
        self.last_signal_id = 0
        self.exit_status: int | None = None
        self.report = b""  # the rank's error file for its launcher
        self.exit_acked = False
        self.typed: Callable[[bytes], None] = lambda data: None  # is told what the rank gets to read

    def open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._synced_s = time.monotonic()
            self._loop.after(STALL_S, lambda: self._check_progress({}))
        self.sync()

    def sync(self) -> None:
        self.lost()
        if self.is_open:
            position: dict[str, Any] = {"in": self._stdio.in_offset, "sig": self.last_signal_id}
            if self.run:
                position |= {"run": self.run, "from": self._begins, "replay": self.replayed}
            self._send("sync", position)

    def lost(self) -> None:
        """The connection to the home keeper is down; `sync` follows when it is up again."""
        if self._is_synced:
            self._synced_s = time.monotonic()
        self._is_synced = False

    def is_cut_off(self) -> bool:
        """Whether the home keeper has been out of reach for too long to wait for it."""
        return not self._is_synced and time.monotonic() - self._synced_s > CUT_OFF_S

    @property
    def is_settled(self) -> bool:
        return all(len(tail) == 0 for tail in self._stdio.tails.values())

    def pump(self) -> None:
        """Sends what may be sent now."""
        if not self._is_synced:
            return
        for name, tail in self._stdio.tails.items():
            offset = max(self._sent[name], tail.base)
            while offset - tail.base < OUT_WINDOW_BYTES and (data := tail.read(offset, CHUNK_BYTES)):
                if not self._send("out", {"c": name, "o": offset}, data):
                    break
                offset += len(data)
            self._sent[name] = offset
        written = self._stdio.in_written
        if written != self._acked_in and not self._stdio.is_handed_over and self._send("inack", {"o": written}):
            self._acked_in = written
        if self.exit_status is not None and self.is_settled and not self._exit_sent:
            self._exit_sent = self._send("exit", {"status": self.exit_status}, self.report)

    def receive(self, frame: Frame) -> None:
        """Handles a frame from the home keeper. Raises KeyError, TypeError or ValueError if it is invalid.

        After a rollback the first frames may be for the copy that was ended: they waited for a connection. Their offsets
        are those of another stream."""
        fields = frame.header
        match frame.type:
            case "sync" if self.run and fields.get("run", self.run) != self.run:
                pass  # as above; the answer to this keeper's own sync follows. Older home keepers do not name the run.
            case "ack" | "in" | "sig" if not self._is_synced:
                pass  # as above, or sent again after the answer
            case "sync":
                for name, offset in dict(fields["out"]).items():
                    if name in self._sent:
                        self._sent[name] = max(int(offset), self._stdio.tails[name].base)
                for name in fields["shut"]:
                    self._stdio.shut(str(name))
                self._resize(fields.get("win"))
                self._skip(int(fields.get("in", 0)), int(fields.get("sig", 0)))
                self._is_synced, self._exit_sent = True, False
                self._acked_in = -1  # sent again: the last one may be lost
            case "resync":
                self.sync()
            case "ack":
                self._stdio.tails[str(fields["c"])].release(int(fields["o"]))
            case "shut":
                self._stdio.shut(str(fields["c"]))
            case "in":
                self._take_input(int(fields["o"]), bool(fields["eof"]), frame.payload)
            case "sig":
                self._take_signal(int(fields["n"]), int(fields["id"]))
            case "win":
                self._resize([fields["rows"], fields["cols"]])
            case "exitack":
                self.exit_acked = self.exit_status is not None

    def _take_input(self, offset: int, ended: bool, data: bytes) -> None:
        if self._stdio.is_handed_over:
            return  # it belongs to the next keeper; the home keeper still has it
        if offset > self._stdio.in_offset:
            self.sync()
            return
        fresh = data[self._stdio.in_offset - offset :]
        if fresh:
            self.typed(fresh)
            self._stdio.feed(fresh)
        if ended and offset + len(data) >= self._stdio.in_offset:
            self._stdio.end_input()

    def _skip(self, in_offset: int, signal_id: int) -> None:
        """After a rollback: the former incarnation has had input and signals that the home keeper no longer has."""
        if not self._stdio.is_handed_over:
            self._stdio.in_offset = max(self._stdio.in_offset, in_offset)
            self.last_signal_id = max(self.last_signal_id, signal_id)

    def _take_signal(self, number: int, signal_id: int) -> None:
        if self._stdio.is_handed_over:
            return
        if signal_id == self.last_signal_id + 1:
            self.last_signal_id = signal_id
            self._deliver(number)
        elif signal_id > self.last_signal_id:
            self.sync()
            return
        self._send("sigack", {"id": self.last_signal_id})

    def _resize(self, size: Any) -> None:
        if size and not self._stdio.is_handed_over:
            self._stdio.resize(int(size[0]), int(size[1]))

    def _check_progress(self, before: dict[str, int]) -> None:
        """`before`: what was unacknowledged some time ago."""
        now = {name: tail.base for name, tail in self._stdio.tails.items() if len(tail)}
        if self.exit_status is not None and not self.exit_acked:
            now["exit"] = self.exit_status
        if not self._is_synced:
            now["sync"] = 0
        if before.items() & now.items():
            self.sync()
        self._loop.after(STALL_S, lambda: self._check_progress(now))


class HomeEnd:
    """The launcher's side: receives output, sends input and signals. `keyboard`: unacknowledged input from stdin."""

    def __init__(self, loop: Loop, tails: dict[str, Tail], keyboard: Tail, send: Send) -> None:
        self._loop = loop
        self._tails = tails
        self._send = send
        self._acked = {name: tail.base for name, tail in tails.items()}
        self._printed = {name: Printed(tail.base) for name, tail in tails.items()}
        for name, tail in tails.items():
            tail.watch = self._printed[name].add
        self._run = ""
        self.replayed = (
            SUPPRESS  # what is done with output that is printed again, unless the guest keeper says otherwise
        )
        self.say: Callable[[str], None] = lambda text: None  # tells the launcher's user
        self._marks = self._is_marked = False  # repeated output is to be marked; the last mark was a beginning
        self._signals: list[tuple[int, int]] = []  # (id, number), not acknowledged
        self._last_signal_id = 0
        self._in_sent = keyboard.base
        self._end_sent = False
        self._waiting_sync: Frame | None = None
        self._is_synced = False
        self._shut: set[str] = set()
        self.keyboard = keyboard
        self.keyboard_ended = False
        self.is_open = False  # the rank is away
        self.size: tuple[int, int] | None = None
        self.exit_status: int | None = None
        self.report = b""

    def open(self) -> None:
        """The rank is now on another node. The guest keeper's `sync` may have arrived before the move's outcome."""
        if not self.is_open:
            self.is_open = True
            for tail in self._tails.values():
                tail.watch = None
            self._in_sent = self.keyboard.base
            self._loop.after(STALL_S, lambda: self._check_progress({}))
        waiting, self._waiting_sync = self._waiting_sync, None
        if waiting is not None:
            self.receive(waiting)
        else:
            self._send("resync")

    def lost(self) -> None:
        self._is_synced = False

    def again(self) -> None:
        """The link to our daemon is back. Frames that were in transit may be lost."""
        self._is_synced = False
        if self.is_open:
            self._send("resync")

    def signal(self, number: int) -> None:
        self._last_signal_id += 1
        self._signals.append((self._last_signal_id, number))
        if self._is_synced:
            self._send("sig", {"n": number, "id": self._last_signal_id})

    def resize(self, rows: int, columns: int) -> None:
        self.size = (rows, columns)
        if self._is_synced:
            self._send("win", {"rows": rows, "cols": columns})

    def shut(self, name: str) -> None:
        self._shut.add(name)
        if self._is_synced:
            self._send("shut", {"c": name})

    def pump(self) -> None:
        if not self._is_synced:
            return
        for name, tail in self._tails.items():
            if (written := self._written(name, tail)) > self._acked[name] and self._send(
                "ack", {"c": name, "o": written}
            ):
                self._acked[name] = written
        self._in_sent = max(self._in_sent, self.keyboard.base)
        while self._in_sent - self.keyboard.base < IN_WINDOW_BYTES and (
            data := self.keyboard.read(self._in_sent, CHUNK_BYTES)
        ):
            if not self._send("in", {"o": self._in_sent, "eof": False}, data):
                return
            self._in_sent += len(data)
        if self.keyboard_ended and not self._end_sent and self._in_sent == self.keyboard.end:
            self._end_sent = self._send("in", {"o": self._in_sent, "eof": True})

    def receive(self, frame: Frame) -> None:
        """Handles a frame from the guest keeper. Raises KeyError, TypeError or ValueError if it is invalid."""
        fields = frame.header
        if not self.is_open:
            if frame.type == "sync":
                self._waiting_sync = frame
            return
        match frame.type:
            case "sync":
                self._rewind(str(fields.get("run", "")), dict(fields.get("from", {})), str(fields.get("replay", "")))
                self._answer_sync(int(fields["in"]), int(fields["sig"]))
            case "out":
                self._take_output(str(fields["c"]), int(fields["o"]), frame.payload)
            case "inack":
                self.keyboard.release(int(fields["o"]))
            case "sigack":
                self._forget_signals(int(fields["id"]))
            case "exit":
                status = int(fields["status"])
                if not 0 <= status <= 0xFFFF:
                    raise ValueError(f"impossible wait status {status}")
                for name, printed in self._printed.items():
                    self._tails[name].append(printed.rest())
                self.exit_status, self.report = status, frame.payload
                self._send("exitack")

    def _answer_sync(self, in_offset: int, signal_id: int) -> None:
        if in_offset > self.keyboard.end:
            raise ValueError(f"the guest has input up to {in_offset}, which cannot be")
        in_offset = max(in_offset, self.keyboard.base)  # less after a rollback: what was released is not repeated
        # Not released: what the guest has taken counts against its window until the rank's stdin has it.
        self._in_sent, self._end_sent = in_offset, False
        self._forget_signals(signal_id)
        received = {name: printed.end for name, printed in self._printed.items()}
        position = {
            "out": received,
            "shut": sorted(self._shut),
            "win": list(self.size) if self.size else None,
            "in": self.keyboard.base,
            "sig": self._signals[0][0] - 1 if self._signals else self._last_signal_id,
            "run": self._run,
        }
        self._send("sync", position)
        for name, tail in self._tails.items():
            self._acked[name] = self._written(name, tail)
            self._send("ack", {"c": name, "o": self._acked[name]})
        for known, number in self._signals:
            self._send("sig", {"n": number, "id": known})
        self._is_synced = True

    def _take_output(self, name: str, offset: int, data: bytes) -> None:
        printed = self._printed[name]
        if offset > printed.end:
            self._send("resync")
            return
        if fresh := data[printed.end - offset :]:
            shown = printed.take(fresh)
            is_repeating = any(one.is_repeating for one in self._printed.values())
            if self._marks and is_repeating and not self._is_marked:
                self._mark(BEGIN_MARK)
            self._tails[name].append(shown)
            if self._is_marked and not is_repeating:
                self._mark(END_MARK)

    def _mark(self, text: str) -> None:
        self._is_marked = text == BEGIN_MARK
        self.say(text)

    def _written(self, name: str, tail: Tail) -> int:
        """Up to where the guest's output has been written to the real stdout, or left out."""
        return max(0, self._printed[name].end - len(tail))

    def _rewind(self, run: str, begins: dict[str, Any], replayed: str) -> None:
        """The guest keeper is that of a rank which was rolled back: its output begins anew, at the snapshot."""
        if run and run != self._run:
            self._run = run
            how = replayed if replayed in REPLAYED else self.replayed
            for name, offset in begins.items():
                if name in self._printed:
                    self._printed[name].rewind(int(offset), leave_out=how == SUPPRESS)
                    self._acked[name] = 0
            self._marks = how == MARK and any(one.is_behind for one in self._printed.values())
            if self._marks:
                self._mark(BEGIN_MARK)

    def _forget_signals(self, last_id: int) -> None:
        self._signals = [(known, number) for known, number in self._signals if known > last_id]

    def _check_progress(self, before: dict[str, int]) -> None:
        """`before`: what was unacknowledged some time ago."""
        now = {"signal": self._signals[0][0]} if self._signals else {}
        if len(self.keyboard):
            now["input"] = self.keyboard.base
        if not self._is_synced:
            now["sync"] = 0
        if before.items() & now.items():
            self._send("resync")
        self._loop.after(STALL_S, lambda: self._check_progress(now))
