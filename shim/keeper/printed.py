"""Remembers what a channel of the rank has printed, so that a rank which comes back from a snapshot does not print it again.

Invariant: offsets are those of the stream of the copy that runs now. A line is left out only if it was printed before, from
the snapshot on and in the same order. Lines that are new are printed (libraries print some when they are initialised again),
and lines that do not come again are skipped. After too many new lines in a row the program does something else, and all that
follows is printed. If nothing is to be left out, it is known all the same how long the output repeats what was printed.
"""

from __future__ import annotations

MOST_BYTES = 1 << 20
#: So much of what was printed is looked at to find a line again.
AHEAD_LINES, AHEAD_BYTES = 64, 16 << 10
#: So many new lines in a row: what was printed does not come again.
NEW_LINES = 64
#: A shorter line, such as a separator, is the same as another one by chance.
LEAST_BYTES = 8
_ENDS = (b"\n", b"\r")


class Printed:
    def __init__(self, base: int = 0) -> None:
        self._base = base  # of the bytes that are remembered
        self._data = bytearray()
        self._expected = b""  # what was printed before, and is left out if it comes again …
        self._at = 0  # … from here on
        self._held = b""  # the begun line, not printed because a line that is expected begins like it
        self._is_shown = False  # … or printed, because none does
        self._new_lines = 0  # in a row
        self._leaves_out = True
        self._began = self._until = 0  # offsets between which the output repeats what was printed

    @property
    def end(self) -> int:
        """The offset of the next byte."""
        return self._base + len(self._data)

    @property
    def is_behind(self) -> bool:
        """Whether what was printed before may still be repeated."""
        return self.end < self._until

    @property
    def is_repeating(self) -> bool:
        """Whether the last line was printed before, and others may follow."""
        return self._began < self.end < self._until and not self._new_lines

    def add(self, data: bytes) -> None:
        self._data += data
        if (beyond := len(self._data) - MOST_BYTES) > 0:
            del self._data[:beyond]
            self._base += beyond

    def rewind(self, offset: int, *, leave_out: bool = True) -> None:
        """The rank has come back from a snapshot, and its stream continues from here. What is not remembered any more is
        printed again. It may come back again before it has reached the end of what was printed the first time. `leave_out`
        false: all is printed again."""
        printed = bytes(self._data[: len(self._data) - len(self._held)]) + self._expected[self._at :]
        self._leaves_out, self._began, self._until = leave_out, offset, self._base + len(printed)
        self._held, self._is_shown, self._new_lines, self._at = b"", False, 0, 0
        if self._base <= offset <= self._until:
            self._expected = printed[offset - self._base :]
            self._data = bytearray(printed[: offset - self._base])
        else:
            self._expected, self._base = b"", offset
            self._data.clear()

    def take(self, data: bytes) -> bytes:
        """The next bytes of the stream. Returns what is to be printed of them."""
        self.add(data)
        if not self._expected:
            return data
        fresh = b"".join(self._take_piece(piece) for piece in data.splitlines(keepends=True))
        return fresh if self._leaves_out else data

    def rest(self) -> bytes:
        """The program has ended: what is to be printed of a line that was only begun."""
        held, self._held = self._held, b""
        return held if self._leaves_out else b""

    def _take_piece(self, piece: bytes) -> bytes:
        """A line, or a part of one. Returns what of it was not printed before."""
        ends = piece.endswith(_ENDS)
        if self._is_shown:
            self._is_shown = not ends
            return piece
        line, self._held = self._held + piece, b""
        skipped, found = self._find(line)
        if found and line.startswith(found):  # all of it, or the last line, which was begun before and is continued
            self._consume(skipped, len(found))
            return line[len(found) :]
        if found:
            self._held = line
            return b""
        self._is_shown = not ends
        self._new_lines += 1
        self._until += len(line)
        if self._new_lines > NEW_LINES:
            self._forget()
        return line

    def _find(self, line: bytes) -> tuple[int, bytes]:
        """The line that was printed before and begins like this one, or is the beginning of it if it is the last; and how
        many bytes before it do not come again. Only a line that is the next one, or the only one like it, counts."""
        if not self._expected:
            return 0, b""
        ends = line.endswith(_ENDS)
        if self._expected.startswith(line, self._at):  # of any length
            return 0, self._expected[self._at : self._at + len(line) + (not ends)]
        if len(line) > len(self._expected) - self._at and line.startswith(rest := self._expected[self._at :]):
            return 0, rest
        begins, matches = 0, list[tuple[int, bytes]]()
        for number, other in enumerate(self._ahead()):
            if number == 0 and line.startswith(other) and not other.endswith(_ENDS):
                return 0, other  # the last one: only as the next one, because it may be very short
            if other.startswith(line):
                matches.append((begins, other))
            begins += len(other)
        if not matches or (ends and (len(matches) > 1 or len(line.strip()) < LEAST_BYTES)):
            return 0, b""
        return matches[0]

    def _ahead(self) -> list[bytes]:
        """The next lines that are expected."""
        return self._expected[self._at : self._at + AHEAD_BYTES].splitlines(keepends=True)[:AHEAD_LINES]

    def _consume(self, skipped: int, count: int) -> None:
        self._at += skipped + count
        self._until -= skipped
        self._new_lines = 0
        if self._at >= len(self._expected):
            self._forget()

    def _forget(self) -> None:
        self._expected, self._at, self._until = b"", 0, 0
