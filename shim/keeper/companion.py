"""A program that runs beside a rank for as long as its home keeper does, such as the protection of the rank's job.

Invariant: it has its own session, so Ctrl-C in the keeper's terminal does not reach it, and it never keeps the keeper from
ending. If it fails, it is started again, less and less often. If it ends with exit status 0, it has nothing left to do.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from shim.keeper.loop import Loop

LOOK_S = 1.0
AGAIN_S, AT_MOST_S = 5.0, 300.0

#: The command line, from the uid of the rank.
Argv = Callable[[str], Sequence[str]]


class Companion:
    def __init__(self, argv: Argv, loop: Callable[[], Loop], say: Callable[[str], None]) -> None:
        self._argv, self._loop, self._say = argv, loop, say
        self._process: subprocess.Popen[bytes] | None = None
        self._again_s = AGAIN_S
        self._is_over = False
        self._uid = ""

    def start(self, uid: str) -> None:
        self._uid = uid
        self._start()

    def _start(self) -> None:
        if self._is_over:
            return
        argv = list(self._argv(self._uid))
        try:
            # Its output goes where the keeper's own messages go.
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        except OSError as error:
            self._say(f"cannot start {argv[0]}: {error}")
            self._later()
            return
        self._loop().after(LOOK_S, self._look)

    def _look(self) -> None:
        status = self._process.poll() if self._process is not None else None
        if status is None:
            self._loop().after(LOOK_S, self._look)
        elif status != 0 and not self._is_over:
            self._say(
                f"the protection of the job ended with status {status}; it is started again in {self._again_s:.0f} s"
            )
            self._later()

    def _later(self) -> None:
        self._loop().after(self._again_s, self._start)
        self._again_s = min(2 * self._again_s, AT_MOST_S)

    def end(self) -> None:
        """The rank has ended."""
        self._is_over = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
