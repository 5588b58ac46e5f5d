"""Imports every module of the daemon: `python -m snapshotd.selfcheck.import_all`. Prints how many, or what is missing.

In a process of its own: modules of children must not be loaded into the daemon.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import shim.keeper
import snapshotd

#: Imported by the daemon when they are needed, and not parts of it.
FOREIGN = ("pycriu.rpc_pb2", "grpc", "cryptography.x509", "pynvml", "pyroute2", "elftools.elf.elffile")


def main() -> int:
    problems, count = [], 0
    names = [
        module.name
        for package in (snapshotd, shim.keeper)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    for name in (*FOREIGN, *names):
        try:
            importlib.import_module(name)
            count += 1
        except Exception as error:  # noqa: BLE001 - any failure to import is what is looked for
            problems.append(f"{name}: {type(error).__name__}: {error}")
    print("\n".join(dict.fromkeys(problems)) or f"{count} modules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
