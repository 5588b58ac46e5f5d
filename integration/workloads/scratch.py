# ruff: noqa: SIM115 - a file that stays open is the point
"""Writes its steps to a file that stays open. When the file --do appears, it does what is written there to its own file,
once, and ends with status 3, as a program that cleans up after an error. At the end it prints the digest of what it has
written.

`delete`, `rename`, `replace`, `shorten`, `link PATH` to replace it by a link, or `remove` for the whole directory."""

import argparse
import hashlib
import os
import shutil
import sys

from steps import say, steps

parser = argparse.ArgumentParser()
parser.add_argument("--file", required=True)
parser.add_argument("--bytes", type=int, default=0, help="of the file, before the first step")
parser.add_argument("--do", required=True)
options, _ = parser.parse_known_args()
os.makedirs(os.path.dirname(options.file), exist_ok=True)
own = open(options.file, "w+b", buffering=0)
own.write(b"." * options.bytes)


def act() -> None:
    with open(options.do) as file:
        what = file.read()
    if not what:  # it is being written
        return
    os.unlink(options.do)
    name = options.file
    what, _, path = what.partition(" ")
    match what:
        case "delete":
            os.unlink(name)
        case "rename":
            os.rename(name, f"{name}.done")
        case "replace":
            os.unlink(name)
            with open(name, "w") as other:
                other.write("another file\n")
        case "shorten":
            own.truncate(3)
        case "link":
            os.unlink(name)
            os.symlink(path, name)
        case "remove":
            shutil.rmtree(os.path.dirname(name))
    sys.exit(3)


state = b""
for step in steps():
    state = hashlib.sha256(state).digest()
    own.write(f"{step} {state.hex()}\n".encode())
    say(step, state.hex()[:16])
    if os.path.exists(options.do):
        act()
own.seek(0)
print("content", hashlib.sha256(own.read()).hexdigest(), flush=True)
