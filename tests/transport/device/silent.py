"""A child that starts, says a word that nobody asked for, and is never ready."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from snapshotd.transport.device.control import Control, serve


def hang(_control: Control, settings: dict[str, Any], _fds: list[int]) -> None:
    print("the disk does not answer", file=sys.stderr, flush=True)
    Path(settings["path"]).touch()
    threading.Event().wait()


if __name__ == "__main__":
    serve(hang)
