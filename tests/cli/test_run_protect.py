"""`migrator run --protect`: who runs the protection of a job, with which options, and what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from migrator.cli import intervals, protection, run
from tests.cli.conftest import Migrator
from tests.cli.fake_keeper import Kept, kept

__all__ = ["kept"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*protection.VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300", 300.0), ("90s", 90.0), ("5m", 300.0), ("2h", 7200.0), ("1.5m", 90.0), ("auto", None)],
)
def test_time_between_snapshots(text: str, seconds: float | None) -> None:
    assert intervals.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "5d", "inf", "5 m", "m", "1e9", "python"])
def test_what_is_no_time_between_snapshots(text: str) -> None:
    with pytest.raises(ValueError, match="write 300, 90s, 5m, 2h or auto"):
        intervals.seconds(text)


@pytest.mark.parametrize(
    ("words", "every", "command"),
    [
        (("--protect", "5m", "--", "cmd"), "5m", ["cmd"]),
        (("--protect", "auto", "cmd", "x"), "auto", ["cmd", "x"]),
        (("--protect", "--", "cmd"), intervals.DEFAULT, ["cmd"]),
        (("--protect", "cmd", "5m"), intervals.DEFAULT, ["cmd", "5m"]),
        (("--protect=300", "cmd"), "300", ["cmd"]),
    ],
)
def test_value_of_protect_may_be_left_out(
    kept: Kept, migrator: Migrator, words: tuple[str, ...], every: str, command: list[str]
) -> None:
    migrator("run", "--job", "night", *words)
    assert kept.asked[0][0] == command
    assert kept.companion is not None
    made = list(kept.companion("night-0-0a0b0c0d"))
    assert made[: made.index("--every")] == [
        *(sys.executable, "-P", "-m", "migrator.cli", "protect", "night", "--user", str(os.getuid()))
    ]
    assert made[made.index("--every") :] == ["--every", every, "--for-keeper", f"{os.getpid()}:0"]


def test_rank_0_and_the_first_rank_of_the_second_node_run_the_protection(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guards() -> list[int]:
        found = []
        for rank in range(10):
            migrator("run", "--protect", "5m", "--job", "night", "--rank", str(rank), "--", "cmd")
            found += [rank] if kept.companion is not None else []
        return found

    assert guards() == [0, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert guards() == [0, 8]


def test_job_is_not_protected_unless_that_is_asked_for(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def every() -> str:
        migrator("run", "--", "cmd")
        return kept.companion("cmd-0-0a0b0c0d")[9] if kept.companion is not None else ""

    assert every() == ""
    monkeypatch.setenv("MIGRATOR_PROTECT", "10m")
    assert every() == "10m"
    assert "MIGRATOR_PROTECT" not in kept.environment, "what the rank starts belongs to its job"
    monkeypatch.setenv("MIGRATOR_PROTECT", "off")
    assert every() == ""


def test_cluster_is_passed_on_to_the_protection(kept: Kept, migrator: Migrator, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.touch()
    migrator("run", "--protect", "5m", "--cluster", str(file), "--", "cmd")
    assert kept.companion is not None
    assert list(kept.companion("cmd-0-0a0b0c0d"))[-2:] == ["--cluster", str(file)]
    missing = migrator("run", "--protect", "5m", "--cluster", str(tmp_path / "none"), "--", "cmd")
    assert missing.code == run.FAILED
    assert "cannot be read" in missing.err


def test_wrong_time_is_refused_before_anything_starts(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = migrator("run", "--protect=5d", "--", "cmd")
    monkeypatch.setenv("MIGRATOR_PROTECT", "often")
    default = migrator("run", "--", "cmd")
    assert (asked.code, default.code, kept.asked) == (run.FAILED, run.FAILED, [])
    assert "write 300, 90s, 5m, 2h or auto" in asked.err
    assert "$MIGRATOR_PROTECT: 'often'" in default.err


def test_launchers_pass_it_on_to_their_workers() -> None:
    wanted = protection.Wanted("5m", ("--lab", "mine"))
    assert protection.wanted(None, None, None, wanted.variables) == wanted
    assert wanted.options == ["--protect", "5m", "--lab", "mine"]
    keeps = protection.Wanted("5m", (), "keep")
    assert protection.wanted(None, None, None, keeps.variables) == keeps
    assert keeps.options == ["--protect", "5m", "--changed-files", "keep"]


def test_what_happens_to_changed_files_is_passed_on_to_the_protection(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*options: str) -> list[str]:
        assert migrator("run", "--protect", "5m", *options, "--", "cmd").code != run.FAILED
        assert kept.companion is not None
        made = list(kept.companion("cmd-0-0a0b0c0d"))
        return made[made.index("--every") + 2 : made.index("--for-keeper")]

    assert asked() == []
    assert asked("--changed-files", "refuse") == ["--changed-files", "refuse"]
    monkeypatch.setenv("MIGRATOR_CHANGED_FILES", "keep")
    assert asked() == ["--changed-files", "keep"]
    assert asked("--changed-files", "restore") == []
    monkeypatch.setenv("MIGRATOR_CHANGED_FILES", "burn")
    assert migrator("run", "--protect", "5m", "--", "cmd").code == run.FAILED
    assert migrator("run", "--protect", "5m", "--changed-files", "burn", "--", "cmd").code == run.FAILED


def test_number_of_copies_is_passed_on_to_the_protection(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*options: str) -> list[str]:
        assert migrator("run", "--protect", "5m", *options, "cmd", "--").code != run.FAILED
        assert kept.asked[-1][0] == ["cmd", "--"]
        assert kept.companion is not None
        made = list(kept.companion("cmd-0-0a0b0c0d"))
        return made[made.index("--every") + 2 : made.index("--for-keeper")]

    assert asked() == [], "as the cluster file says"
    assert asked("--copies", "2") == ["--copies", "2"]
    monkeypatch.setenv("MIGRATOR_COPIES", "3")
    assert asked() == ["--copies", "3"]
    assert asked("--copies", "1") == ["--copies", "1"], "also if the cluster file says more"
    both = protection.Wanted("5m", (), "keep", "2")
    assert both.options == ["--protect", "5m", "--changed-files", "keep", "--copies", "2"]
    assert protection.wanted(None, None, None, both.variables) == both
    refused = migrator("run", "--protect", "5m", "--copies", "0", "--", "cmd")
    assert (refused.code, "--copies: '0' is not a number above 0" in refused.err) == (run.FAILED, True)
    monkeypatch.setenv("MIGRATOR_COPIES", "two")
    assert "$MIGRATOR_COPIES: 'two'" in migrator("run", "--protect", "5m", "--", "cmd").err


def test_copies_without_protection_are_a_warning(kept: Kept, migrator: Migrator) -> None:
    said = migrator("run", "--copies", "2", "--", "cmd")
    assert said.code == 7
    assert "--copies has no effect without --protect" in said.err
    assert kept.companion is None


def test_replayed_output_is_that_of_the_option_or_the_launcher(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replayed(*words: str) -> str:
        assert migrator("run", *words, "--", "cmd").code == 7
        return kept.replayed

    assert replayed() == "suppress"
    assert replayed("--replayed-output", "mark") == "mark"
    monkeypatch.setenv(protection.REPLAYED_VARIABLE, "pass")
    assert replayed() == "pass"
    assert migrator("run", "--replayed-output", "loud", "--", "cmd").code == run.FAILED
