"""The documentation says what the code does: every link, command, path, table and name in it is compared with the code."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

import snapshotd.preflight
from migrator.autopilot import policy
from migrator.cli import program, run
from migrator.cluster import Cluster
from migrator.protocol import TABLE, UNDO, diagram
from snapshotd import main as daemon
from snapshotd.api import node_file
from snapshotd.api.errors import BY_CODE, BadConfig
from snapshotd.config import Config
from snapshotd.health.settings import CHECKS, THRESHOLDS, Dcgm, Settings
from snapshotd.preflight import source, target
from snapshotd.runtime import metrics

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
ALL = [*FRONT, *PAGES]

#: What stands in the documentation for a value that the reader fills in.
PLACEHOLDERS = {"R": "1", "NODE": "node-1", "MOVE": "m-0123456789ab", "IP": "10.0.0.1", "NAME": "name"}

_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")


def text_of(page: Path, name: str) -> str:
    """What is between <!-- name --> and <!-- /name -->."""
    return page.read_text().split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]


def block_after(page: Path, name: str) -> str:
    """The fenced block that follows <!-- name -->."""
    found = _FENCE.search(page.read_text().split(f"<!-- {name} -->")[1])
    assert found
    return found[1]


def rows(table: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def spans(page: Path) -> list[str]:
    """The code spans of a page, as one line each; blocks are not searched."""
    return [" ".join(span.split()) for span in _SPAN.findall(_FENCE.sub("", page.read_text()))]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_without_a_warning(site: Path) -> None:
    assert {page.stem for page in PAGES} <= {page.stem for page in site.glob("*.html")}


def test_built_pages_load_nothing_from_another_host(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']((?:https?:)?//[^\"']+)", page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"


@pytest.mark.parametrize("page", FRONT, ids=page_id)
def test_links_of_front_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", ALL, ids=page_id)
def test_named_files_exist(page: Path) -> None:
    top = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier()))
    for span in spans(page):
        if re.fullmatch(rf"(?:{top})/[\w./-]*", span) and not span.startswith("build/"):
            assert (ROOT / span).exists(), f"{page_id(page)} names {span}"


# ---------------------------------------------------------------------- commands


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def block_commands() -> Iterator[tuple[Path, list[str]]]:
    """Every `migrator …` or `snapshotd …` that is a line of a block."""
    for page in ALL:
        for block in _FENCE.findall(page.read_text()):
            for line in block.splitlines():
                words = shlex.split(line.strip().removeprefix("$ "), comments=True) if "'" not in line else []
                if words and Path(words[0]).name in ("migrator", "snapshotd"):
                    yield page, [PLACEHOLDERS.get(word, word) for word in words]


def test_commands_in_blocks_are_accepted_by_the_real_parser() -> None:
    seen = 0
    for page, (name, *words) in block_commands():
        own = words[: words.index("--")] if "--" in words else words
        try:
            if Path(name).name == "snapshotd":
                if "--version" not in own:
                    daemon.parser().parse_args(own)
            elif own[0] == "run":
                run.parser().parse_args(own[1:])
            else:
                parser_of_migrator().parse_args(own)
        except Exception as error:
            raise AssertionError(f"{page_id(page)}: migrator {shlex.join(words)}: {error}") from error
        seen += 1
    assert seen > 20


parser_of_migrator = functools.cache(program.parser)


@pytest.mark.parametrize("page", ALL, ids=page_id)
def test_commands_in_sentences_have_a_verb_and_options_that_exist(page: Path) -> None:
    for span in spans(page):
        name, *words = span.split()
        if name != "migrator":
            continue
        own = words[: words.index("--")] if "--" in words else words
        parser = parser_of_migrator()
        verbs = [word for word in own if not word.startswith("-")]
        if verbs[:1] == ["run"]:
            parser = run.parser()
        else:
            for verb in verbs:
                if verb not in subparsers(parser):
                    break
                parser = subparsers(parser)[verb]
            assert not verbs or verbs[0] in subparsers(parser_of_migrator()), f"{page_id(page)}: {span}"
        for option in (word for word in own if word.startswith("--")):
            assert option in parser._option_string_actions, f"{page_id(page)}: {span}"


def test_make_targets_exist() -> None:
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for page in ALL:
        blocks = [line.split("#")[0] for block in _FENCE.findall(page.read_text()) for line in block.splitlines()]
        for command in (*spans(page), *(line.strip().removeprefix("$ ") for line in blocks)):
            if found := re.fullmatch(r"make ([a-z-]+)\s*", command):
                assert found[1] in targets, f"{page_id(page)} names make {found[1]}"


# ---------------------------------------------------------------------- tables


def test_diagram_is_printed_from_the_table() -> None:
    shown = text_of(ROOT / "docs/how-a-move-works.md", "diagram").strip()
    assert shown == f"```\n{diagram()}\n```", "print it again: python -m migrator.protocol"


def test_steps_named_in_sentences_exist() -> None:
    actions = {step.action for step in (*TABLE, *UNDO)}
    for page in PAGES:
        for name in re.findall(r"(?<!\*)\*([A-Z][A-Za-z]+)\*(?!\*)", page.read_text()):
            assert name in actions, f"{page.name} names the step {name}"


def test_transcript_has_the_phases_of_the_protocol() -> None:
    shown = re.findall(r"^  ([a-z-]+) +[\d.]+ s\b", text_of(ROOT / "README.md", "demo"), re.MULTILINE)
    phases = [step.phase for step in TABLE]
    assert shown == [name for name in dict.fromkeys(phases) if name in shown]
    assert {"preflight", "freeze", "stream", "restore", "commit", "activate", "clean"} <= set(shown)


def test_exit_codes_are_those_of_the_error_classes() -> None:
    table = rows(text_of(ROOT / "docs/troubleshooting.md", "exit codes"))
    assert [(int(exit_code), code) for exit_code, code, *_ in table] == [
        (0, ""),
        *sorted((error.exit_code, error.code) for error in BY_CODE.values()),
    ]


def checks_in_code() -> set[str]:
    listed = re.findall(r"^([a-z][a-z-]+)  +\S", snapshotd.preflight.__doc__ or "", re.MULTILINE)
    found = (source.SOURCE_CHECKS, source.GPU_CHECKS, source.NCCL_CHECKS, target.TARGET_CHECKS, target.GPU_CHECKS)
    return {*listed, *(name for checks in found for name in checks)}


def test_every_check_is_explained() -> None:
    table = rows(text_of(ROOT / "docs/troubleshooting.md", "checks"))
    explained = [name for row in table for name in names(row[0])]
    assert len(explained) == len(set(explained))
    assert not checks_in_code() - set(explained)
    code = "\n".join(path.read_text() for folder in ("snapshotd", "migrator") for path in (ROOT / folder).rglob("*.py"))
    unknown = [name for name in explained if f'"{name}"' not in code]
    assert not unknown, f"no check has this name: {unknown}"


def test_check_names_elsewhere_exist() -> None:
    table = rows(text_of(ROOT / "docs/troubleshooting.md", "checks"))
    explained = {name for row in table for name in names(row[0])}
    for page in (ROOT / "docs/limits.md", ROOT / "docs/operations.md"):
        for span in spans(page):
            if re.fullmatch(r"(gpu|nccl|target)-[a-z-]+", span):
                assert span in {*explained, *CHECKS}, f"{page.name} names {span}"


def test_every_health_check_and_threshold_is_explained() -> None:
    table = rows(text_of(ROOT / "docs/operations.md", "health"))
    assert [name for row in table for name in names(row[0])] == list(CHECKS)
    assert [row[1] for row in table] == list(CHECKS.values())
    shown = dict(re.findall(r"`([a-z_]+)` \((\d+)\)", "\n".join(row[3] for row in table)))
    assert {name: float(value) for name, value in shown.items()} == dict(THRESHOLDS)


def test_every_configuration_key_is_explained() -> None:
    table = rows(text_of(ROOT / "docs/operations.md", "config"))
    keys = {name for row in table for name in names(row[0])}
    with pytest.raises(BadConfig) as caught:
        Config.from_values({**dict.fromkeys(keys, -1), "no_such_key": 1}, "test")
    unknown = [line for line in caught.value.message.splitlines() if "unknown" in line]
    assert len(unknown) == 1, f"the code does not know {unknown}"
    assert "no_such_key" in unknown[0]
    example = (ROOT / "systemd/snapshotd.toml.example").read_text()
    assert set(re.findall(r"^(?:# )?([a-z_]+) = ", example, re.MULTILINE)) <= {
        *keys,
        *("ca", "cert", "key"),
        *Settings.__struct_fields__,
        *Dcgm.__struct_fields__,
        *THRESHOLDS,
    }
    assert set(Config.__annotations__) - {"credentials", "criu_version"} <= keys


def test_every_key_of_the_policy_is_explained() -> None:
    page = ROOT / "docs/autopilot.md"
    explained = {name for row in rows(text_of(page, "policy")) for name in names(row[0])}
    tables = {"rules": policy.Rule, "jobs": policy.Job}
    tables |= {"breaker": policy.Breaker, "spares": policy.Spares, "validation": policy.Validation}
    tables |= {"progress": policy.Progress, "webhook": policy.Webhook, "maintenance": policy.Maintenance}
    keys = {f"{name}.{key}" for name, struct in tables.items() for key in struct.__struct_fields__}
    keys |= set(policy.Policy.__struct_fields__) - {*tables, "origin"}
    assert explained == keys
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        if "[[rules]]" in block or "[[maintenance]]" in block:
            policy.from_values(tomllib.loads(block), "the example")


def test_metrics_are_those_that_are_served() -> None:
    served = set(re.findall(r"^# TYPE (\S+)", generate_latest(metrics.REGISTRY).decode(), re.MULTILINE))
    served = {name for name in served if not name.startswith("process_") and not name.endswith("_created")}
    named = set(re.findall(r"\bsnapshotd_[a-z_]+", (ROOT / "docs/operations.md").read_text()))
    assert {re.sub(r"_(sum|count|bucket)$", "", name) for name in named} == served


def test_ports_are_the_defaults() -> None:
    example = (ROOT / "systemd/snapshotd.toml.example").read_text()
    for page in ALL:
        for port in re.findall(r"\b(\d{4,5})/tcp", page.read_text()):
            assert f':{port}"' in example, f"{page.name} names port {port}"


def test_changelog_has_the_current_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == snapshotd.__version__
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


# ---------------------------------------------------------------------- the quick start


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quick start's own commands make: files of nodes, etc/cluster.toml and its tls/, and the CA in pki/."""
    folder = tmp_path_factory.mktemp("quickstart")
    environment = {
        **os.environ,
        "MIGRATOR_CLUSTER": str(folder / "etc/cluster.toml"),
        "MIGRATOR_PKI": str(folder / "pki"),
        "PYTHONPATH": str(ROOT),
    }
    for line in block_after(ROOT / "docs/quickstart.md", "cluster").splitlines():
        program, *words = line.split()
        assert program == "migrator"
        command = [sys.executable, "-m", "migrator.cli", *words]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
    return folder


def test_commands_of_the_quick_start_make_a_cluster_and_a_file_for_each_node(made: Path) -> None:
    assert list(Cluster.read(made / "etc/cluster.toml").nodes) == ["node-1", "node-2", "spare-1"]
    for name in ("node-1", "node-2", "spare-1"):
        assert node_file.read(made / f"{name}.join").node == name
    joined = block_after(ROOT / "docs/quickstart.md", "join").splitlines()
    assert joined[0] == "snapshotd join node-1.join"


def test_commands_of_the_front_page_are_those_of_the_quick_start() -> None:
    """integration/systemd runs the quick start's, so the front page must not have others."""
    section = (ROOT / "README.md").read_text().split("## Install it")[1]
    shown = _FENCE.findall(section)[0].splitlines()
    tested = [block_after(ROOT / "docs/quickstart.md", name) for name in ("install", "cluster", "join")]
    for line in shown:
        assert line.split("  ")[0].strip() in "".join(tested).splitlines(), line
    assert len(shown) == 5


def test_configuration_for_another_ca_is_accepted(made: Path, tmp_path: Path) -> None:
    text = block_after(ROOT / "docs/operations.md", "snapshotd.toml")
    for place, file in (("ca.crt", "ca.crt"), ("node.crt", "nodes/node-1.crt"), ("node.key", "nodes/node-1.key")):
        assert f"/etc/snapshotd/tls/{place}" in text
        text = text.replace(f"/etc/snapshotd/tls/{place}", str(made / "pki" / file))
    path = tmp_path / "snapshotd.toml"
    # /run is not everywhere in memory, and the user that systemd-sysusers creates does not exist here.
    path.write_text(f'run_dir = "/dev/shm/snapshotd-quickstart"\nnetwork_user = "nobody"\n{text}')
    config = Config.load(path)
    assert (config.node, config.listen) == ("node-1", "10.0.0.1:7070")


def test_cluster_file_for_another_ca_is_accepted(made: Path) -> None:
    path = made / "etc/by-hand.toml"
    path.write_text(block_after(ROOT / "docs/operations.md", "cluster.toml"))
    assert list(Cluster.read(path).nodes) == ["node-1", "node-2", "spare-1"]
