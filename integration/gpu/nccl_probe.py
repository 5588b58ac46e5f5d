"""Checks within half a minute whether the shim works with NCCL on this machine.

    integration/gpu/run --exec python3 -m integration.gpu.nccl_probe

A rank of world size 1 runs with the preloaded shim, as under `migrator run` but without daemons, lab and CRIU. The
probe sends the shim the requests of a move, step by step, and prints each result: the first line that is not `ok` names
the part that fails. Nothing is moved. DEVICE=cpu uses the fake NCCL, without torch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from snapshotd.api.errors import SnapshotError
from snapshotd.inprocess import nccl_lines, ncclctl
from snapshotd.proc import tree

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "shim" / "lib" / "libsnapshim.so"
SYMBOLS = ROOT / "shim" / "lib" / "nccl" / "symbols.h"
ON_GPU = os.environ.get("DEVICE", "cuda") != "cpu"
PRESETS = {"NCCL_RAS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
#: The symbols that torch binds first. If they come from the shim, all do.
DECISIVE = ("ncclGetVersion", "ncclCommInitRankConfig", "ncclCommSplit", "ncclAllReduce")
START_S, STEP_S = 45.0, 15.0


class Failed(Exception):
    """A step had an unexpected result, which the message describes."""


def known_symbols() -> list[str]:
    """The symbols that the shim exports, from its own list."""
    return re.findall(r"X\((nccl\w+)", SYMBOLS.read_text())


# ---------------------------------------------------------------- the rank


class _Place(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _owner(name: str) -> str:
    """The library that provides this name in the global scope, where libtorch_cuda looks it up."""
    libc = ctypes.CDLL(None)
    try:
        address = ctypes.cast(getattr(libc, name), ctypes.c_void_p)
    except AttributeError:
        return "none"
    place = _Place()
    libc.dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Place))
    return os.path.basename(place.file.decode()) if libc.dladdr(address, ctypes.byref(place)) else "?"


def be_the_rank() -> None:
    """Prints once which NCCL it found, then does all-reduces until the end file exists, and prints `sum N VALUE` for each."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    mapped = sorted(set(re.findall(r"\S*/libnccl\S*", Path("/proc/self/maps").read_text())))
    needed = sorted(set(re.findall(r"\S*/libtorch_cuda\.so", Path("/proc/self/maps").read_text())))
    about = {
        "torch": torch.__version__,
        "nccl_by_torch": ".".join(map(str, torch.cuda.nccl.version())),
        "libnccl_mapped": mapped,
        "libtorch_cuda": needed,
        "owners": {name: _owner(name) for name in DECISIVE},
    }
    print(f"about {json.dumps(about)}", flush=True)
    for number in range(1, 1 << 30):
        tensor.fill_(number)
        dist.all_reduce(tensor)
        print(f"sum {number} {tensor.sum().item():.0f}", flush=True)
        time.sleep(0.02)
        if os.path.exists(sys.argv[2]):
            break
    dist.destroy_process_group()
    print("DONE", flush=True)


class Rank:
    """The probed process, and its output."""

    def __init__(self, folder: Path, before: Sequence[str] = (), libraries: Sequence[str] = (), **more: str) -> None:
        """`before`: the beginning of the command; `libraries`: folders with libraries; `more`: variables."""
        self.end, self.out = folder / "end", folder / "rank.out"
        environment = {**PRESETS, **os.environ, **more, "LD_PRELOAD": str(SHIM), "NCCL_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "integration.gpu.nccl_probe", "--be-the-rank", str(self.end)]
        if not ON_GPU:
            from integration.nccl_nodes import PROGRAM, library_dir

            libraries = [str(library_dir()), *libraries]
            command = [*PROGRAM, "--meeting", str(folder), "--rank", "0", "--ranks", "1", "--steps", "100000"]
        if libraries:
            inherited = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
            environment["LD_LIBRARY_PATH"] = ":".join([*libraries, *inherited])
        with self.out.open("wb") as file:
            self.started = subprocess.Popen([*before, *command], cwd=ROOT, env=environment, stdout=file, stderr=file)

    def lines(self) -> list[str]:
        """The lines that it printed after each all-reduce."""
        return [line for line in self.text().splitlines() if re.match(r"(sum )?\d+ ", line)]

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def goes_on(self, timeout_s: float) -> str:
        """Waits for five more all-reduces."""
        wanted = len(self.lines()) + 5
        ends = time.monotonic() + timeout_s
        while len(self.lines()) < wanted:
            if self.started.poll() is not None:
                raise Failed(f"the rank has ended with {self.started.returncode}")
            if time.monotonic() > ends:
                raise Failed(f"no five all-reduces in {timeout_s:.0f} s, {len(self.lines())} in all")
            time.sleep(0.01)
        return f"{len(self.lines())} all-reduces"

    def process(self) -> tree.Process:
        return tree.Process.of(self.started.pid)

    def about(self) -> dict[str, Any]:
        found = [line for line in self.text().splitlines() if line.startswith("about ")]
        answer: dict[str, Any] = json.loads(found[0][6:]) if found else {}
        return answer

    def kill(self) -> None:
        if self.started.poll() is None:
            self.started.kill()
            self.started.wait(10)


# ---------------------------------------------------------------- the steps


def which_library(rank: Rank) -> str:
    about = rank.about()
    return ", ".join(f"{name} {value}" for name, value in about.items() if name != "owners") or "the stand-in, no torch"


def which_functions(rank: Rank) -> str:
    owners = rank.about().get("owners", {})
    others = {name: owner for name, owner in owners.items() if owner != SHIM.name}
    if others:
        raise Failed(f"the preloaded shim does not win: {others}")
    return f"all of {', '.join(owners)} are {SHIM.name}'s" if owners else "seen by the communicators, next"


def which_symbols(rank: Rank) -> str:
    answer = json.loads(report(rank).text)
    known = known_symbols()
    found = f"the shim has {len(known)}"
    reader = shutil.which("nm")
    if reader and answer["library"]:
        listed = subprocess.run([reader, "-D", "--defined-only", answer["library"]], capture_output=True, text=True)
        real = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if " T nccl" in line}
        lacks, passes = sorted(set(known) - real), sorted(real - set(known))
        found += f"; {len(lacks)} of them are not in this NCCL: {' '.join(lacks) or '-'}"
        found += f"; {len(passes)} of its own go past the shim: {' '.join(passes) or '-'}"
    return found


def report(rank: Rank) -> ncclctl.Report:
    return ncclctl.read(rank.process())


def which_communicators(rank: Rank) -> str:
    found = report(rank)
    answer = json.loads(found.text)
    if not found.comms:
        raise Failed(f"the shim knows of no communicator: torch's calls go past it. {found.text}")
    if refusals := found.refusals():
        raise Failed(f"it would be refused: {refusals}")
    comms = [
        f"{comm['id']} {comm['kind']} {comm['state']} {comm['collectives']} collectives" for comm in answer["comms"]
    ]
    return f"version {answer['version']}, {answer['library']}, {found.threads} threads of NCCL; {'; '.join(comms)}"


def close(rank: Rank) -> str:
    ncclctl.close(rank.process())
    time.sleep(0.2)
    before = len(rank.lines())
    time.sleep(0.3)
    if not report(rank).gate_closed or len(rank.lines()) > before:
        raise Failed(f"it goes on behind its closed gate: {report(rank).text}")
    return f"held: {json.loads(report(rank).text)['held']}"


def detach(rank: Rank) -> str:
    ncclctl.detach(rank.process(), [comm.id for comm in report(rank).comms], STEP_S)
    found = report(rank)
    if found.threads or any(comm.real for comm in found.comms):
        raise Failed(f"something is left: {found.text}")
    return "no thread of NCCL is left"


def fresh(rank: Rank) -> str:
    ncclctl.load_fresh(rank.process(), STEP_S)
    return f"instance {report(rank).instance}"


def attach(rank: Rank) -> str:
    process = rank.process()
    comms = sorted(comm.id for comm in report(rank).comms)
    lines = [nccl_lines.attach_line(comm, ncclctl.new_id(process, STEP_S), untried=False) for comm in comms]
    ncclctl.attach(process, lines, STEP_S)
    return ", ".join(f"{comm.id} {comm.state}" for comm in report(rank).comms)


def open_gate(rank: Rank) -> str:
    ncclctl.open_gate(rank.process())
    return rank.goes_on(STEP_S)


def ending(rank: Rank) -> str:
    if not ON_GPU:
        return "the stand-in's rank is killed"
    rank.end.touch()
    if code := rank.started.wait(STEP_S):
        raise Failed(f"it ended with {code}")
    return "communicators destroyed by the application"


STEPS: dict[str, Callable[[Rank], str]] = {
    "the rank runs": lambda rank: rank.goes_on(START_S),
    "library": which_library,
    "functions": which_functions,
    "communicators": which_communicators,
    "symbols": which_symbols,
    "close the gate": close,
    "take down": detach,
    "fresh copy": fresh,
    "build again, with an all-reduce": attach,
    "open the gate": open_gate,
    "again: close": close,
    "again: take down": detach,
    "again: fresh copy": fresh,
    "again: build": attach,
    "again: open": open_gate,
    "end": ending,
}


def probe(start: Callable[[Path], Rank], steps: Mapping[str, Callable[[Rank], str]]) -> int:
    """Starts the rank, does the steps one after the other, and prints each result. Ends at the first that fails."""
    if not SHIM.exists():
        print(f"{SHIM} is not built: make -C shim")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        rank = start(Path(folder))
        try:
            for name, step in steps.items():
                began = time.monotonic()
                try:
                    found = step(rank)
                except (Failed, SnapshotError, subprocess.TimeoutExpired, ProcessLookupError) as error:
                    print(f"FAILED {name}: {error}\n--- the rank's last lines\n{rank.text()[-3000:]}", flush=True)
                    return 1
                print(f"ok     {name} ({time.monotonic() - began:.2f} s): {found}", flush=True)
        finally:
            rank.kill()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--be-the-rank", metavar="FILE", help="run as the rank, until FILE exists")
    if parser.parse_args().be_the_rank:
        be_the_rank()
    else:
        sys.exit(probe(Rank, STEPS))
