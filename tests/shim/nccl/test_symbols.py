"""Tests that the shim exports every NCCL symbol that takes or returns a communicator, registration or user reduction."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.shim.nccl.conftest import REPOSITORY, STAND_IN, Job
from tests.shim.nccl.gates import OPEN

PROGRAMS = REPOSITORY / "tests" / "shim" / "nccl" / "programs"

# Symbols of NCCL 2.32.3 that take no handle of ours: windows are passed on unchanged, the rest take no handle.
NOT_OURS = {
    *("ncclGetErrorString", "ncclResetDebugInit", "ncclResetDebugInitInternal", "ncclSetEncryption"),
    *("ncclGetLsaDevicePointer", "ncclGetLsaMultimemDevicePointer", "ncclGetMultimemDevicePointer"),
    *("ncclGetPeerDevicePointer", "ncclGetCftDeviceLeInfo", "ncclGetMultimemDeviceLeInfo", "ncclGetPeerDeviceLeInfo"),
    *("ncclGinInboxA2ACreateRequirement", "ncclGinOutboxCreateRequirement", "ncclLLA2ACalcSlots"),
    *("ncclLLA2ACreateRequirement", "ncclLsaBarrierCreateRequirement", "ncclParamBind", "ncclParamDumpAll"),
    *("ncclParamGet", "ncclParamGetAllParameterKeys", "ncclParamGetParameter", "ncclParamGetStr"),
    *(f"ncclParamGet{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)),
}
# The newest of each kind, which 2.19 to 2.32 added.
ADDED = {
    *("ncclCommRegister", "ncclCommDeregister", "ncclMemAlloc", "ncclMemFree", "ncclGroupSimulateEnd"),
    *("ncclCommInitRankScalable", "ncclCommShrink", "ncclCommGrow", "ncclCommGetUniqueId", "ncclCommRevoke"),
    *("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats", "ncclCommQueryProperties", "ncclCommWindowRegister"),
    *("ncclCommWindowDeregister", "ncclWinGetUserPtr", "ncclDevCommCreate", "ncclDevCommDestroy", "ncclAlltoAll"),
    *("ncclGather", "ncclScatter", "ncclPutSignal", "ncclSignal", "ncclWaitSignal", "ncclAllReduceConfig"),
    *("ncclBroadcastConfig", "ncclReduceConfig", "ncclAllGatherConfig", "ncclReduceScatterConfig"),
    *("ncclAlltoAllConfig", "ncclGatherConfig", "ncclScatterConfig", "ncclTeamWorld", "ncclTeamLsa", "ncclTeamRail"),
    *("ncclTeamCft", "ncclTeamCftMultimem", "ncclTeamRankToWorld", "ncclTeamRankToLsa"),
    "ncclGinBarrierCreateRequirement",
}


def exported(library: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" [TW] (p?nccl\w+)(?:@\S*)?$", listed, re.MULTILINE))


def test_shim_exports_all_symbols_of_the_stand_in(built: Path) -> None:
    ours = exported(built / "libsnapshim.so")
    assert exported(built / "libnccl.so.2") - NOT_OURS <= ours
    assert ours >= ADDED


def test_profiling_names_are_the_same_functions(built: Path) -> None:
    ours = exported(built / "libsnapshim.so")
    assert {f"p{name}" for name in ours if name.startswith("nccl")} == {n for n in ours if n.startswith("pnccl")}


@pytest.mark.skipif(not (found := sorted(Path("/").glob("usr/lib/*/libnccl.so.2"))), reason="no NCCL is installed")
def test_shim_exports_all_symbols_of_the_installed_library(built: Path) -> None:
    names = {name.removeprefix("p") for name in exported(found[0])}
    assert names - NOT_OURS <= exported(built / "libsnapshim.so")


def test_a_symbol_that_an_older_nccl_lacks_is_reported_and_all_else_works(built_2_18: Path, tmp_path: Path) -> None:
    job = Job(built_2_18, tmp_path)
    try:
        job.start("jobs.asks_too_much", 2)
        job.all_right()
    finally:
        job.kill()


def test_an_older_nccl_is_rebuilt_as_well(built_2_18: Path, tmp_path: Path) -> None:
    job = Job(built_2_18, tmp_path)
    try:
        job.start("jobs.plain", 2)
        job.reach(1)
        gates = job.gates()
        gates.to_the_cut()
        reports = gates.reports()
        assert reports[0]["version"] == 21805
        gates.detach(gates.live(reports))
        gates.attach(reports, gates.live(reports))
        gates.all(OPEN)
        job.reach(max(job.steps()) + 2)
        job.stop()
    finally:
        job.kill()


def test_the_benchmark_runs(built: Path, tmp_path: Path) -> None:
    """Checks only that it produces results; `make bench` reports them."""
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{STAND_IN}")
    empty, bench = tmp_path / "libnccl.so.2", tmp_path / "bench"
    subprocess.run(
        ["cc", *flags, "-fPIC", "-shared", "-Wl,-soname,libnccl.so.2", "-o", empty, PROGRAMS / "empty.c"], check=True
    )
    linked = ("-Wl,--no-as-needed", built / "libsnapshim.so", empty, "-ldl", f"-Wl,-rpath,{tmp_path}")
    subprocess.run(["cc", *flags, "-o", bench, PROGRAMS / "bench.c", *linked], check=True)
    said = subprocess.run([bench, "1000"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"direct [\d.]+ shim [\d.]+ group [\d.]+\n", said)
