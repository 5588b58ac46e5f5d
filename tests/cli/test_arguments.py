"""Tests the command line's syntax: help for every verb, one form for all errors, rejection of malformed values."""

from __future__ import annotations

import pytest

from migrator.cli import arguments, program
from snapshotd.api.errors import BY_CODE, BadConfig, NotFound, Usage
from tests.cli.conftest import Migrator
from tests.cli.fake_daemon import FakeCluster
from tests.repository.test_docs import subparsers

VERBS = (
    ("run",),
    ("ps",),
    ("nodes",),
    ("check",),
    ("move",),
    ("job",),
    ("job", "suspend"),
    ("job", "resume"),
    ("job", "list"),
    ("job", "drop"),
    ("job", "snapshot"),
    ("job", "rollback"),
    ("status",),
    ("history",),
    ("recover",),
    ("lab",),
    ("lab", "up"),
    ("lab", "down"),
    ("lab", "run"),
    ("lab", "exec"),
    ("pki",),
    ("pki", "init"),
    ("pki", "node"),
    ("pki", "operator"),
)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_without_the_exit_codes(migrator: Migrator, verb: tuple[str, ...]) -> None:
    ran = migrator(*verb, "--help")
    assert ran.code == 0
    assert f"usage: migrator {' '.join(verb)}" in ran.out
    assert ("exit codes:" in ran.out) == (verb == ("run",)), "listed once, by `migrator --help`"
    assert "--json" in ran.out


def test_help_names_every_verb_and_every_exit_code(migrator: Migrator) -> None:
    ran = migrator("--help")
    assert ran.code == 0
    for verb, *_ in VERBS:
        assert f"\n    {verb} " in ran.out
    for error in BY_CODE.values():
        assert f"{error.exit_code:>3}  {error.code} " in ran.out


@pytest.mark.parametrize("names", program.MODULES.values(), ids=" ".join)
def test_a_verb_is_found_without_loading_the_others(names: tuple[str, ...]) -> None:
    assert set(subparsers(program.parser(names[-1]))) == {"run", *names}


def test_exit_codes_are_one_to_one_with_error_codes() -> None:
    assert len({error.exit_code for error in BY_CODE.values()}) == len(BY_CODE)
    assert len(arguments.exit_codes().splitlines()) == len(BY_CODE) + 2


WRONG = {
    "no verb": (),
    "unknown verb": ("fly",),
    "unknown option": ("ps", "--fast"),
    "no abbreviations": ("ps", "--al"),
    "no rank": ("move", "--to", "node-1"),
    "no node": ("move", "--rank", "1"),
    "negative rank": ("move", "--rank", "-1", "--to", "node-1"),
    "rank is no number": ("move", "--rank", "one", "--to", "node-1"),
    "rank in foreign digits": ("move", "--rank", "٣", "--to", "node-1"),
    "absurd rank": ("move", "--rank", "9" * 30, "--to", "node-1"),
    "node is a path": ("move", "--rank", "1", "--to", "../../etc/passwd"),
    "node is empty": ("move", "--rank", "1", "--to", ""),
    "node has an escape": ("check", "--rank", "1", "--to", "a\x1b[2J"),
    "job is a path": ("move", "--rank", "1", "--to", "node-1", "--job", "/tmp/x"),
    "job is absurdly long": ("ps", "--job", "x" * 500),
    "timeout zero": ("move", "--rank", "1", "--to", "node-1", "--timeout", "0"),
    "timeout negative": ("move", "--rank", "1", "--to", "node-1", "--timeout", "-3"),
    "timeout is no number": ("move", "--rank", "1", "--to", "node-1", "--timeout", "soon"),
    "timeout infinite": ("move", "--rank", "1", "--to", "node-1", "--timeout", "inf"),
    "move id is a path": ("status", "../m-0123456789ab"),
    "move id too short": ("recover", "m-0123"),
    "limit zero": ("history", "--limit", "0"),
    "a command where none belongs": ("ps", "--", "true"),
    "dead node without a move": ("recover", "--source-is-dead", "--yes"),
    "both dead": ("recover", "m-0123456789ab", "--source-is-dead", "--target-is-dead", "--yes"),
    "dead member without a move": ("recover", "--member-is-dead", "node-2", "--yes"),
    "dead and abort": ("recover", "m-0123456789ab", "--source-is-dead", "--abort", "--yes"),
    "lab is a path": ("lab", "down", "--lab", "../x"),
    "node of a lab is a path": ("lab", "exec", "a/b", "--", "true"),
    "lab without a verb": ("lab",),
    "node to add is a path": ("cluster", "add", "../x", "10.0.0.1"),
    "node to add has no address": ("cluster", "add", "node-9"),
    "address of a node is a name": ("cluster", "add", "node-9", "here"),
    "address of a node is any address": ("cluster", "add", "node-9", "0.0.0.0"),
    "port of a node is absurd": ("cluster", "add", "node-9", "10.0.0.1:70000"),
    "ssh destination is an option": ("cluster", "add", "node-9", "10.0.0.1", "--ssh", "-oProxyCommand=x"),
    "further address is a name": ("cluster", "add", "node-9", "10.0.0.1", "--address", "x"),
    "days are negative": ("cluster", "rotate", "--within", "-1"),
    "cluster without a verb": ("cluster",),
    "pki name is a path": ("pki", "operator", "../x", "--dir", "/nonexistent"),
}


@pytest.mark.parametrize("argv", WRONG.values(), ids=WRONG.keys())
def test_invalid_arguments_are_reported_as_a_usage_error(
    cluster: FakeCluster, migrator: Migrator, argv: tuple[str, ...]
) -> None:
    ran = migrator(*argv)
    assert ran.code == Usage.exit_code
    assert ran.out == ""
    first, *rest = ran.err.splitlines()
    assert first.startswith("migrator: ")
    assert rest[-1].startswith("  remedy: ")
    assert rest[-2] == "  the rank is: not touched"
    assert "\x1b" not in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("argv", WRONG.values(), ids=WRONG.keys())
def test_invalid_arguments_are_reported_as_a_usage_error_in_json(
    cluster: FakeCluster, migrator: Migrator, argv: tuple[str, ...]
) -> None:
    ran = migrator("--json", *argv)
    assert ran.code == Usage.exit_code
    assert ran.json["error"] == "usage"
    assert set(ran.json) == {"error", "message", "remedy", "where"}
    assert ran.err == ""


def test_global_options_are_accepted_before_and_after_the_verb(
    cluster: FakeCluster, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MIGRATOR_CLUSTER")
    path = str(cluster.path)
    for argv in (
        ("--cluster", path, "--json", "ps"),
        ("ps", "--json", "--cluster", path),
        ("--json", "ps", f"--cluster={path}"),
    ):
        ran = migrator(*argv)
        assert (ran.code, ran.json) == (0, {"ranks": [], "unreachable": []})


def test_cluster_and_lab_option_together_are_a_usage_error(cluster: FakeCluster, migrator: Migrator) -> None:
    assert migrator("ps", "--cluster", str(cluster.path), "--lab", "x").code == Usage.exit_code


def test_missing_cluster_file_is_reported_as_not_found(migrator: Migrator) -> None:
    ran = migrator("ps", "--cluster", "/nonexistent/cluster.toml")
    assert ran.code == NotFound.exit_code
    assert "/nonexistent/cluster.toml" in ran.err


def test_invalid_cluster_file_is_reported_with_all_its_errors(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster.path.write_text("nodes = 3\nspeed = 'fast'\n")
    ran = migrator("nodes", "--json")
    assert ran.code == BadConfig.exit_code
    assert "speed" in ran.json["message"]
    assert "nodes" in ran.json["message"]


def test_unexpected_exception_prints_a_traceback_only_with_migrator_debug(
    cluster: FakeCluster, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("migrator.cli.ps.visible", lambda *_, **__: broken(None))
    ran = migrator("ps")
    assert ran.code == 1
    assert ran.err.startswith(
        "migrator: ZeroDivisionError: oops\n  the rank is: not touched\n  remedy: this is a defect"
    )
    assert "Traceback" not in ran.err
    monkeypatch.setenv("MIGRATOR_DEBUG", "1")
    assert "Traceback" in migrator("ps").err
