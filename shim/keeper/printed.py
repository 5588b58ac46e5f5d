"""Remembers what a channel of the rank has printed, so that a rank which comes back from a snapshot does not print it again.

Invariant: offsets are those of the stream of the copy that runs now. Output is left out only as long as it is identical to
what was printed from the same offset on. From the first line that differs everything is printed. If nothing is to be left
out, it is known all the same how long the output repeats what was printed before.
"""

from __future__ import annotations

MOST_BYTES = 1 << 20


class Printed:
    def __init__(self, base: int = 0) -> None:
        self._base = base  # of the bytes that are remembered
        self._data = bytearray()
        self._expected = b""  # what was printed before, and is left out if it comes again
        self._leaves_out = True
        self._began = self._until = 0  # offsets between which the output repeats what was printed

    @property
    def end(self) -> int:
        """The offset of the next byte."""
        return self._base + len(self._data)

    @property
    def is_behind(self) -> bool:
        """Whether what was printed before is still to be repeated."""
        return self.end < self._until

    @property
    def is_repeating(self) -> bool:
        """The same, once the first of it was repeated: a channel may never be used again."""
        return self._began < self.end < self._until

    def add(self, data: bytes) -> None:
        self._data += data
        if (beyond := len(self._data) - MOST_BYTES) > 0:
            del self._data[:beyond]
            self._base += beyond

    def rewind(self, offset: int, *, leave_out: bool = True) -> None:
        """The rank has come back from a snapshot, and its stream continues from here. What is not remembered any more is
        printed again. It may come back again before it has reached the end of what was printed the first time. `leave_out`
        false: all is printed again."""
        self._leaves_out, self._began, self._until = leave_out, offset, self.end + len(self._expected)
        if self._base <= offset <= self.end + len(self._expected):
            printed = bytes(self._data) + self._expected
            self._expected = printed[offset - self._base :]
            self._data = bytearray(printed[: offset - self._base])
        else:
            self._expected, self._base = b"", offset
            self._data.clear()

    def take(self, data: bytes) -> bytes:
        """The next bytes of the stream. Returns what is to be printed of them."""
        fresh = self._without_known(data)
        return fresh if self._leaves_out else data

    def _without_known(self, data: bytes) -> bytes:
        expected, known = self._expected, 0
        most = min(len(expected), len(data))
        if data[:most] == expected[:most]:
            known = most
            self._expected = expected[most:]
            self.add(data)
            return data[known:]
        while known < most and data[known] == expected[known]:
            known += 1
        if expected:
            self._until = 0
        self._expected = b""
        begun = self._data[-1024:] + data[:known]  # a line that differs is printed whole
        line = len(begun) - (begun.rfind(b"\n") + 1)
        self.add(data)
        return bytes(begun[len(begun) - line :]) + data[known:]
