"""The state of a rank's stdio as one keeper hands it to the next: checked on the source, and again on the target.

The home keeper is a process of the rank's user, so the state may be anything. Invariant: what passes has the fields below and
no others, each with its type and range; a field that the schema does not know is dropped. It says nothing about the user of
the rank: that comes from the kernel (snapshotd/proc/credentials.py). shim/keeper/stdio.py writes and reads this format.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

#: The most that a keeper of each role may send. Unread input takes a pipe (1 MiB at most) and the keeper's own queue.
#: Output that waits for the home node travels only from a guest keeper (MAX_HANDED_OVER_BYTES in shim/keeper/stdio.py).
#: Both are longer by a third in base64.
MAX_STATE_BYTES = {"home": 4 << 20, "guest": 48 << 20}

_Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Word = Annotated[int, Meta(ge=0, lt=1 << 16)]
_Flags = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Sign = Annotated[int, Meta(ge=0, lt=256)]
_Signal = Annotated[int, Meta(ge=1, le=64)]


class ChannelState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pipe or terminal of the rank."""

    name: Annotated[str, Meta(pattern=r"^[0-2]\Z")]
    kind: Literal["pipe", "pty"]
    fds: Annotated[list[Annotated[int, Meta(ge=0, le=2)]], Meta(min_length=1, max_length=3)]
    has_input: bool = msgspec.field(name="in")
    has_output: bool = msgspec.field(name="out")
    key: Annotated[str, Meta(pattern=r"^(pipe:\[[0-9]{1,20}\]|tty\[[0-9a-f]{1,16}:[0-9a-f]{1,16}\])\Z")]
    was_shut: bool = msgspec.field(name="shut", default=False)
    size: tuple[_Word, _Word] = (0, 0)
    modes: tuple[_Flags, _Flags, _Flags, _Flags, _Flags, _Flags, Annotated[list[_Sign], Meta(max_length=64)]] | None = (
        None
    )
    offset: _Offset | None = msgspec.field(name="o", default=None)
    tail: bytes | None = None  # base64 in JSON

    def __post_init__(self) -> None:
        if self.has_output and (self.offset is None or self.tail is None):
            raise ValueError(f"channel {self.name} has output, but no offset of it")
        if self.key.startswith("tty") != (self.kind == "pty"):
            raise ValueError(f"channel {self.name} is a {self.kind}, and its key is {self.key}")


class InputState(msgspec.Struct, frozen=True, kw_only=True):
    offset: _Offset = msgspec.field(name="o")
    unread: bytes
    has_ended: bool = msgspec.field(name="eof")


class SignalState(msgspec.Struct, frozen=True):
    last: _Offset
    queued: Annotated[list[_Signal], Meta(max_length=4096)]


class StdioState(msgspec.Struct, frozen=True, kw_only=True):
    channels: Annotated[list[ChannelState], Meta(max_length=3)]
    input: InputState = msgspec.field(name="in")
    signals: SignalState
    report_path: Annotated[str, Meta(max_length=4096, pattern=r"^(/[^\x00]*)?\Z")] = ""
    run: Annotated[str, Meta(pattern=r"^[a-z0-9-]{0,64}\Z")] = ""  # after a rollback, as in shim/keeper/relay.py
    replayed: Literal["", "suppress", "mark", "pass"] = ""

    def __post_init__(self) -> None:
        numbers = [fd for channel in self.channels for fd in channel.fds]
        names = [channel.name for channel in self.channels]
        if len(set(numbers)) != len(numbers) or len(set(names)) != len(names):
            raise ValueError("two channels of the rank's stdio have the same name or descriptor")

    def to_json(self) -> dict[str, Any]:
        """As the journal and the next keeper have it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


_decoder = msgspec.json.Decoder(StdioState)


def decode(content: bytes) -> StdioState:
    """The state in a keeper's answer. Raises ValueError. Blocking: it may have many megabytes."""
    try:
        return _decoder.decode(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
