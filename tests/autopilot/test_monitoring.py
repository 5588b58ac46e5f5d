"""Alert rules, runbooks and the dashboard fit the metrics that the autopilot serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import AboutRank
from migrator.autopilot.metrics import Metrics
from migrator.autopilot.policy import Policy
from tests.autopilot.worlds import alarm, node, rank, world

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs/monitoring/migrator.rules.yml"
DASHBOARD = ROOT / "docs/monitoring/migrator-dashboard.json"
RUNBOOKS = ROOT / "docs/runbooks.md"
CASES = Path(__file__).with_name("rules_test.yml")


def served() -> dict[str, set[str]]:
    """The labels of every metric of the autopilot itself, from the text that is served."""
    metrics, stuck = Metrics(Policy()), rank(0, "node-1")
    metrics.round(world(node("node-1"), alarm("node-1"), stuck), [AboutRank(stuck, RankDecision.ALERT, "")], {})
    families = text_string_to_metric_families(metrics.text().decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.name: set(sample.labels)
        for sample in samples
        if sample.name.startswith("migrator_") and not sample.name.endswith("_created")
    }


def alerts() -> dict[str, str]:
    """The text of each alert rule, by its name."""
    _, *parts = RULES.read_text().split("- alert: ")
    return {part.split()[0]: part for part in parts}


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = [found[1] for text in alerts().values() if (found := re.search(r"expr: (.*)", text))]
    assert len(asked) == len(alerts())
    return [*shown, *asked, *re.findall(r"- series: (.*)", CASES.read_text())]


def test_every_metric_and_label_of_rules_and_dashboard_is_served() -> None:
    known = served()
    for query in queries():
        used = re.findall(r"(migrator_\w+)(?:\{([^}]*)\})?", query)
        assert used, query
        for name, selector in used:
            assert name in known, f"{query}: {name} is not served"
            labels = set(re.findall(r"(\w+)\s*(?:!=|=~|!~|=)", selector))
            assert labels <= known[name] | {"instance", "job"}, query
        for by in re.findall(r"by \(([^)]*)\)", query):
            labels = {label.strip() for label in by.split(",")} - {"instance", "job"}
            assert labels <= {label for name, _ in used for label in known[name]}, query


def test_the_table_of_metrics_is_what_is_served() -> None:
    page = (ROOT / "docs/autopilot.md").read_text()
    table = page.split("<!-- metrics -->")[1].split("<!-- /metrics -->")[0]
    rows = re.findall(r"^\| `(migrator_\w+)(?:\{([\w,]*)\})?` \|", table, re.MULTILINE)
    expected = {
        re.sub(r"_bucket$", "", name): labels - {"le"}
        for name, labels in served().items()
        if not name.endswith(("_sum", "_count"))
    }
    assert {name: set(labels.split(",")) - {""} for name, labels in rows} == expected


def test_every_alert_links_to_its_own_runbook() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOKS.read_text(), re.MULTILINE | re.DOTALL))
    assert set(alerts()) == set(sections)
    for name, text in alerts().items():
        links = re.findall(r"runbook_url: (\S+)", text)
        assert links == [f"docs/runbooks.md#{name.lower()}"]  # as mkdocs and GitHub make anchors
        assert (ROOT / links[0].partition("#")[0]).exists()
        assert "severity: " in text
        for part in ("**What happened.**", "**The ranks**", "**What to do.**"):
            assert part in sections[name], f"{name} has no {part}"
        assert f"alertname: {name}" in CASES.read_text()


def promtool(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=100)


def test_rules_alert_when_they_should(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if shutil.which("promtool") is None and not request.config.getoption("--whole"):
        pytest.skip("promtool is not installed (apt-get install prometheus): make test-all")
    shutil.copy(RULES, tmp_path)
    shutil.copy(CASES, tmp_path)
    checked = promtool("check", "rules", RULES.name, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", CASES.name, cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    for rule, broken in (
        ("> 120", "> 9000"),
        ("leader) == 0", "leader) == 9"),
        ("free == 0", "free == 9"),
        ("[15m]) > 0", "[15m]) > 9"),
        ("for: 10m", "for: 1h"),
    ):
        assert rule in RULES.read_text()
        (tmp_path / RULES.name).write_text(RULES.read_text().replace(rule, broken))
        assert promtool("test", "rules", CASES.name, cwd=tmp_path).returncode != 0, f"{broken} is not noticed"
