"""Keeps files in the node's own /tmp and /dev/shm that it does not have open, and checks them in every step.

Some are written anew, as in a cache that grows: one in every step, so that it is always newer than what was sent ahead, and
one every 40 steps, so that it is sent ahead and may be changed before the freeze.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "workloads"))

from steps import say, steps, wrong


def looks(path: Path) -> list[object]:
    found = path.lstat()
    if path.is_symlink():
        return ["link", os.readlink(path)]
    if path.is_dir():
        return ["directory", found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, sorted(os.listdir(path))]
    content = path.read_bytes()
    return ["file", found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, len(content), hash(content)]


def make(top: Path) -> list[Path]:
    (top / "deep" / "deeper").mkdir(parents=True)
    (top / "empty").mkdir(mode=0o750)
    (top / "deep" / "deeper" / "small").write_text("small")
    (top / "large").write_bytes(bytes(range(256)) * 20_000)
    (top / "nothing").touch(mode=0o604)
    (top / "link").symlink_to("deep/deeper/small")
    (top / "private").mkdir()
    (top / "private" / "read-only").write_text("mine")
    (top / "private" / "read-only").chmod(0o400)
    os.utime(top / "deep" / "deeper" / "small", ns=(10**18 + 7, 10**18 + 9))
    (top / "private").chmod(0o500)
    return [path for path in sorted(top.rglob("*")) if path.name not in CHANGING]


CHANGING = {"newest": 1, "newer": 40}
tops = [Path(tempfile.mkdtemp(dir=where)) for where in ("/tmp", "/dev/shm")]
paths = [path for top in tops for path in make(top)]
before = {str(path): looks(path) for path in paths}
for step in steps():
    for top in tops:
        for name, period in CHANGING.items():
            path, last = top / name, (step - 1) // period * period
            if step and json.loads(path.read_text()) != last:
                wrong(f"{path} is of another step than {last}: {path.read_text()}")
            if step % period == 0:
                path.write_text(json.dumps(step))
    for path in paths:
        if not os.path.lexists(path):
            wrong(f"{path} is gone")
        elif looks(path) != before[str(path)]:
            wrong(f"{path}: {looks(path)}, before {before[str(path)]}")
    say(step)
