"""A child that starts, writes to stderr, and never becomes ready."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from snapshotd.transport.device.control_socket import Control, serve


def hang(_control: Control, settings: dict[str, Any], _fds: list[int]) -> None:
    print("the disk does not answer", file=sys.stderr, flush=True)
    Path(settings["path"]).touch()
    threading.Event().wait()


if __name__ == "__main__":
    serve(hang)
