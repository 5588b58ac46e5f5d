"""Tests `migrator run`: what it sets in the environment of a rank, for NCCL and for device memory, and what it says of it."""

from __future__ import annotations

import pytest

from migrator.cli import launchers
from tests.cli.conftest import Migrator
from tests.cli.fake_keeper import Kept, kept

__all__ = ["kept"]


# ---------------------------------------------------------------- NCCL


def test_nccl_presets_do_not_override_the_environment() -> None:
    given = {"NCCL_NVLS_ENABLE": "1", "TRITON_HOME": "/root"}
    made = launchers.rank_environment(given)
    assert made.pop("SNAPSHIM_DEVICE_MEMORY") == launchers.DEVICE_MEMORY_DEFAULT
    assert made == {"NCCL_RAS_ENABLE": "0", **given}


def test_nccl_safe_overrides_the_environment() -> None:
    given = {"NCCL_NVLS_ENABLE": "1", "NCCL_RAS_ENABLE": "1", "TRITON_HOME": "/root"}
    made = launchers.rank_environment(given, nccl_safe=True)
    assert {name: value for name, value in made.items() if name.startswith("NCCL_")} == {
        "NCCL_RAS_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
    }


@pytest.mark.parametrize(
    ("options", "rank", "warned"), [((), "0", True), ((), "1", False), (("--nccl-safe",), "0", False)]
)
def test_ras_that_is_on_is_named_at_the_start_by_one_rank(
    kept: Kept,
    migrator: Migrator,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    rank: str,
    warned: bool,
) -> None:
    monkeypatch.setenv("NCCL_RAS_ENABLE", "1")
    ran = migrator("run", *options, "--rank", rank, "--", "cmd")
    assert kept.environment["NCCL_RAS_ENABLE"] == ("0" if options else "1")
    assert ("NCCL_RAS_ENABLE=1: if the job uses NCCL before 2.28" in ran.err) == warned


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("NCCL_NET_PLUGIN", "ofi", True),
        ("NCCL_NET_PLUGIN", "none", False),
        ("NCCL_GDRCOPY_ENABLE", "1", True),
        ("NCCL_GDRCOPY_ENABLE", "0", False),
    ],
)
def test_setting_that_keeps_rdma_devices_open_is_named_at_the_start(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch, name: str, value: str, warned: bool
) -> None:
    monkeypatch.setenv(name, value)
    ran = migrator("run", "--", "cmd")
    assert kept.environment[name] == value
    assert (f"{name}={value}: RDMA devices that are opened in this way cannot be closed" in ran.err) == warned
    assert "refused" not in migrator("run", "--rank", "1", "--", "cmd").err  # once for a job


@pytest.mark.parametrize(("options", "preset"), [((), "0"), (("--no-shim",), None)])
def test_nccl_presets_are_set_only_with_the_shim(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], preset: str | None
) -> None:
    monkeypatch.delenv("NCCL_RAS_ENABLE", raising=False)
    migrator("run", *options, "--", "cmd")
    assert kept.environment.get("NCCL_RAS_ENABLE") == preset


# ---------------------------------------------------------------- device memory


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ((), None, launchers.DEVICE_MEMORY_DEFAULT),
        ((), "offload", "offload"),
        (("--device-memory", "offload"), None, "offload"),
        (("--device-memory", "driver"), "offload", "driver"),
        (("--no-shim",), None, None),
    ],
)
def test_device_memory_is_chosen_by_option_environment_and_default(
    kept: Kept,
    migrator: Migrator,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    given: str | None,
    expected: str | None,
) -> None:
    monkeypatch.delenv("SNAPSHIM_DEVICE_MEMORY", raising=False)
    if given is not None:
        monkeypatch.setenv("SNAPSHIM_DEVICE_MEMORY", given)
    migrator("run", *options, "--", "cmd")
    assert kept.environment.get("SNAPSHIM_DEVICE_MEMORY") == expected


def test_unknown_device_memory_choice_is_rejected(migrator: Migrator) -> None:
    done = migrator("run", "--device-memory", "magic", "--", "cmd")
    assert done.code == 125
    assert "magic" in done.err


def test_workers_of_a_launcher_get_its_device_memory_choice() -> None:
    made = launchers.launcher_environment({"HOME": "/root"}, "/usr/bin/python", None, True, "offload")
    worker = launchers.rank_environment(launchers.worker_environment(made))
    assert worker["SNAPSHIM_DEVICE_MEMORY"] == "offload"
