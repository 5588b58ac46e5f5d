"""The rank's standard streams on this node: the part that home and guest keepers share.

Invariants: output and input are addressed by their offset from the first byte of the rank's whole run, on all nodes. A
byte of output stays in its `Tail` until it is acknowledged. `hand_over` returns everything that the next keeper needs;
after it, no input is accepted until `let_go`. So no byte is duplicated or lost.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from shim.keeper import terminal
from shim.keeper.channels import PTY, Channel
from shim.keeper.loop import Loop, Wish
from shim.keeper.tail import Tail

if TYPE_CHECKING:
    from shim.keeper.privileges import Identity
    from shim.keeper.spool import Spool

#: Limit of the unacknowledged output that a move's messages carry.
MAX_HANDED_OVER_BYTES = 32 << 20
MAX_PENDING_INPUT_BYTES = 1 << 18
#: With more unacknowledged output than this the rank waits for its readers; slightly more than the relay's window.
MAX_UNACKNOWLEDGED_BYTES = 2 << 20
QUIET_S = 2.0
LINGER_S = 10.0
_REST_S = 0.2


class TooMuchToHandOver(Exception):
    """More output waits for the home node than a move can carry. The rank stays on its node."""


class Stdio:
    def __init__(self, loop: Loop, channels: list[Channel], spool: Spool | None = None) -> None:
        self.channels = channels
        self.tails = {channel.name: Tail(0, spool) for channel in channels if channel.has_output}
        self.in_offset = 0  # of the next byte of input to accept
        self.in_ended = False
        self.is_held = False  # nothing is written to the rank
        self.is_handed_over = False  # and no input is accepted
        self._last_output_s = time.monotonic()
        self.may_spool: Callable[[], bool] = lambda: True  # whether the readers are unreachable and not just slow
        self._ended_s = 0.0
        self._pending = bytearray()
        self._taken_back = b""
        self._ended: set[str] = set()
        self._resting: set[str] = set()
        self._rank_lives = True
        self._loop = loop
        loop.add(self._wishes)

    @classmethod
    def of_state(cls, loop: Loop, state: dict[str, Any], identity: Identity, spool: Spool | None) -> Stdio:
        """Recreates, on new channels of this node and held, the stdio that another keeper handed over."""
        channels = [Channel.again(described, identity.user_id, identity.group_id) for described in state["channels"]]
        stdio = cls(loop, channels, spool)
        for described in state["channels"]:
            if described["out"]:
                tail = stdio.tails[described["name"]]
                tail.base = int(described["o"])
                tail.append(base64.b64decode(described["tail"]))
        given = state["in"]
        stdio.in_offset, stdio.in_ended = int(given["o"]), bool(given["eof"])
        stdio._taken_back = base64.b64decode(given["unread"])
        stdio.is_held = True
        return stdio

    # ---- input

    @property
    def input_channel(self) -> Channel | None:
        return next((channel for channel in self.channels if channel.has_input), None)

    @property
    def wants_input(self) -> bool:
        return not self.is_held and self.input_channel is not None and len(self._pending) < MAX_PENDING_INPUT_BYTES

    @property
    def in_written(self) -> int:
        """The offset up to which input was written to the rank."""
        return self.in_offset - len(self._pending)

    def feed(self, data: bytes) -> None:
        self.in_offset += len(data)
        self._pending += data
        self._push()

    def end_input(self) -> None:
        self.in_ended = True
        self._push()

    def _push(self) -> None:
        channel = self.input_channel
        if channel is None or self.is_held:
            return
        while self._pending and (count := channel.write(bytes(self._pending[:65536]))):
            del self._pending[:count]
        if self.in_ended and not self._pending:
            channel.end_input()

    # ---- output

    def _pull(self, channel: Channel) -> None:
        data = channel.read() if channel.read_fd >= 0 else None
        if data:
            self._last_output_s = time.monotonic()
            if not channel.was_shut:
                self.tails[channel.name].append(data)
        elif data is None:
            if channel.kind == PTY and self._rank_lives:
                # No process has it open now, but the rank can open /dev/tty again.
                self._resting.add(channel.name)
                self._loop.after(_REST_S, partial(self._resting.discard, channel.name))
            else:
                self._ended.add(channel.name)

    def pull_all(self) -> None:
        """Reads everything that is in the pipes now, regardless of how much output is unacknowledged."""
        for channel in self.channels:
            if channel.has_output and channel.read_fd >= 0:
                before = -1
                while self.tails[channel.name].end != before and not channel.was_shut:
                    before = self.tails[channel.name].end
                    self._pull(channel)

    def give_rank_ends(self) -> None:
        for channel in self.channels:
            channel.give_rank_end()

    def rank_ended(self) -> None:
        self._rank_lives = False
        self._ended_s = time.monotonic()
        self._resting.clear()

    @property
    def output_ended(self) -> bool:
        """Whether no process can write any more: the rank and its children have closed every output."""
        return all(
            channel.name in self._ended or channel.read_fd < 0 for channel in self.channels if channel.has_output
        )

    @property
    def is_all_read(self) -> bool:
        """After the rank's exit: whether its output is complete, or the keeper has waited long enough for the rest.

        A background process that keeps a pipe open loses its reader after two seconds without output, or ten in all, as
        under any launcher that waits for the process alone."""
        now_s = time.monotonic()
        quiet_s = now_s - max(self._ended_s, self._last_output_s)
        return self.output_ended or quiet_s > QUIET_S or now_s - self._ended_s > LINGER_S

    def shut(self, name: str) -> None:
        for channel in self.channels:
            if channel.name == name and channel.has_output:
                channel.shut()

    def resize(self, rows: int, columns: int) -> None:
        for channel in self.channels:
            if channel.kind == PTY:
                channel.resize(rows, columns)

    # ---- moving on

    def describe(self) -> dict[str, Any]:
        return {"channels": [channel.describe() for channel in self.channels]}

    def hand_over(self, *, tails_too: bool) -> dict[str, Any]:
        """Returns the state for the next keeper. The rank must be frozen. `tails_too`: unacknowledged output moves with
        the rank (guest keeper); otherwise it stays with the home keeper, which delivers it. Idempotent."""
        self.pull_all()
        waiting_bytes = sum(len(tail) for tail in self.tails.values()) if tails_too else 0
        if waiting_bytes > MAX_HANDED_OVER_BYTES:
            raise TooMuchToHandOver(
                f"{waiting_bytes >> 20} MiB of output wait for the rank's home node, "
                f"{MAX_HANDED_OVER_BYTES >> 20} MiB at most can travel with a move"
            )
        self.is_held = self.is_handed_over = True
        channel = self.input_channel
        if channel is not None:
            self._taken_back += channel.take_back_input()
        described = []
        for channel in self.channels:
            entry = channel.describe()
            if channel.has_output:
                tail = self.tails[channel.name]
                entry["o"] = tail.base if tails_too else tail.end
                entry["tail"] = base64.b64encode(_whole(tail) if tails_too else b"").decode()
            described.append(entry)
        unread = base64.b64encode(self._taken_back + self._pending).decode()
        return {
            "channels": described,
            "in": {"o": self.in_offset, "unread": unread, "eof": self.in_ended},
        }

    def let_go(self) -> None:
        """Lets the rank read again: first the input that was taken back, then what has arrived since."""
        self.is_held = self.is_handed_over = False
        channel, again = self.input_channel, self._taken_back
        self._taken_back = b""
        if channel is not None and channel.kind == PTY and again:
            count = terminal.put_back_input(channel.read_fd, again)
            again = again[count:]
        self._pending[:0] = again
        self._push()

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def _has_room(self, tail: Tail) -> bool:
        """A slow reader blocks the rank, as a pipe would; an unreachable one does not."""
        return not tail.is_full and (len(tail) < MAX_UNACKNOWLEDGED_BYTES or self.may_spool())

    def _wishes(self) -> Iterable[Wish]:
        for channel in self.channels:
            silent = channel.read_fd < 0 or channel.name in self._ended or channel.name in self._resting
            if not silent and self._has_room(self.tails[channel.name]):
                yield Wish(channel.read_fd, on_readable=partial(self._pull, channel))
            if channel.has_input and self._pending and not self.is_held and channel.write_fd >= 0:
                yield Wish(channel.write_fd, on_writable=self._push)


def _whole(tail: Tail) -> bytes:
    found = bytearray()
    while piece := tail.read(tail.base + len(found), 1 << 20):
        found += piece
    return bytes(found)
