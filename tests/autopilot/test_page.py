"""What the page shows, and that news arrive."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from migrator.autopilot.model import MoveState, NodeState, Severity
from migrator.autopilot.page import view
from migrator.autopilot.page.app import FILES, SCRIPTS
from migrator.autopilot.page.feed import KEPT
from migrator.autopilot.policy import Spares
from migrator.autopilot.store import Store
from migrator.results import Event
from tests.autopilot import worlds
from tests.autopilot.pages import news, served, small
from tests.autopilot.test_engine import until

HOSTILE = "<img src=x onerror=alert(1)></script>"


async def test_state_has_nodes_ranks_gpus_alarms_and_spares(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        answer = await page.get("/api/state")
        node, spare = answer.json["nodes"]
        assert (node["name"], node["state"], node["gpus"], spare["gpus"]) == ("node-1", "healthy", "!#", "--")
        assert node["ranks"] == [{"job": "train", "rank": 3, "user_id": 1000, "gpus": [1], "moving": False}]
        assert node["alarms"][0]["severity"] == "critical"
        assert answer.json["spares"] == [{"node": "spare-1", "gpus_free": 2, "unusable": ""}]
        again = await page.get("/api/state", If_None_Match=answer.headers["etag"])
        assert (again.status, again.body) == (304, b"")


def test_every_change_of_a_node_is_shown() -> None:
    """What is kept of a node is made again when anything changes that is shown of it."""
    world, kept = small(), view.Nodes()
    node, (rank,), (alarm,) = world.nodes["node-1"], world.ranks, world.alarms
    busy = replace(node.gpus[0], free=not node.gpus[0].free)
    nodes = [
        replace(node, state=NodeState.TAINTED),
        replace(node, reason="a cable"),
        replace(node, since_unix_s=5.0),
        replace(node, seen=False),
        replace(node, reachable=False),
        replace(node, labels={"spare": "dedicated"}),
        replace(node, gpus=(node.gpus[1], busy)),
    ]
    ranks = [
        replace(rank, **change)
        for change in ({"job": "x"}, {"rank": 9}, {"user_id": 5}, {"moving": "m-1"}, {"gpus": ()})
    ]
    alarms = [
        replace(alarm, **change) for change in ({"check": "x"}, {"severity": Severity.NOTICE}, {"text": "it burns"})
    ]
    changed = [replace(world, nodes={**world.nodes, "node-1": one}) for one in nodes]
    changed += [replace(world, ranks=(one,)) for one in ranks] + [replace(world, ranks=(rank, rank))]
    changed += [replace(world, alarms=(one,)) for one in alarms] + [replace(world, alarms=())]
    shown = set()
    for one in (world, *changed, world):
        again = msgspec.json.encode(view.state(one, {}, Spares(), view.Phases(), kept)["nodes"])
        assert again == msgspec.json.encode(view.state(one, {}, Spares(), view.Phases())["nodes"])
        shown.add(again)
    assert len(shown) == len(
        changed
    )  # with the first one, and a node that is not seen looks like one that does not answer


async def test_running_move_is_shown_with_its_phase_and_rate(tmp_path: Path) -> None:
    world = small()
    move = worlds.move(world.ranks[0], "spare-1", MoveState.INTENDED)
    async with served(tmp_path, replace(world, moves=(move,))) as page:
        page.phases.note(move.id, Event("phase-start", "stream", 0.0, 0, 0, ""))
        page.phases.note(move.id, Event("bytes", "stream", 0.1, 5_000, 20_000, ""))
        (shown,) = (await page.get("/api/state")).json["moves"]
        assert (shown["phase"], shown["bytes"], shown["bytes_expected"]) == ("stream", 5_000, 20_000)
        assert (shown["source"], shown["target"], shown["reason"]) == ("node-1", "spare-1", "a reason")
        assert shown["bytes_per_s"] > 0


async def test_moves_that_ended_lately_are_shown_with_reason_and_outcome(tmp_path: Path) -> None:
    world = small()
    early = worlds.move(world.ranks[0], "spare-1", MoveState.UNDONE, 60, id="m-1", result="it broke")
    late = worlds.move(world.ranks[0], "spare-2", MoveState.MOVED, 10, id="m-2", pause_s=1.25)
    async with served(tmp_path, replace(world, moves=(early, late))) as page:
        shown = (await page.get("/api/state")).json["recent"]
        facts = [(one["target"], one["state"], one["reason"], one["result"], one["pause_s"]) for one in shown]
        assert facts == [
            ("spare-2", "moved", "a reason", "", 1.25),
            ("spare-1", "undone", "a reason", "it broke", 0.0),
        ]


async def test_headline_of_the_report_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("migrator.autopilot.page.tally.CHUNK", 3)
    world = small()
    async with served(tmp_path, world) as page:
        assert (await page.get("/api/state")).json["report"]["percent"] is None
        for number, (result, state) in enumerate((("", MoveState.MOVED), ("it failed", MoveState.UNDONE))):
            rank = replace(world.ranks[0], uid=f"rank-{number}")
            move = worlds.move(
                rank, "spare-1", MoveState.INTENDED, id=f"m-{number}", job_gpus=8, cause_class="hardware"
            )
            await page.store.intend(move)
            await page.store.finish(move.id, state, result, pause_s=2.0)

        async def headline() -> Any:
            shown = (await page.get("/api/state")).json["report"]
            return shown if shown["complete"] and shown["all"] == 2 else None

        found = await until("the report", headline)
        assert found["classes"] == {"hardware": {"all": 2, "resolved": 1, "percent": 50.0}}
        assert (found["all"], found["resolved"], found["percent"], found["gpu_seconds"]) == (2, 1, 50.0, 32.0)


async def test_timeline_comes_in_pages_with_the_newest_first(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        assert (await page.get("/api/timeline")).json == {"records": [], "more": False, "last": 0}
        for number in range(1, 151):
            await page.store.note("signal", f"record {number}", node="node-1")
        first = (await page.get("/api/timeline")).json
        assert [one["id"] for one in first["records"]] == list(range(150, 50, -1))
        assert first["more"]
        second = (await page.get("/api/timeline?before=51")).json
        assert [one["id"] for one in second["records"]] == list(range(50, 0, -1))
        assert not second["more"]
        assert len((await page.get("/api/timeline?before=-1%27")).json["records"]) == 100


async def test_thousand_nodes_fit_into_one_small_answer(tmp_path: Path) -> None:
    names = [f"node-{number:04}" for number in range(1024)]
    parts = [worlds.node(name, 8) for name in names]
    ranks = [worlds.rank(8 * at + gpu, name, gpus=(gpu,)) for at, name in enumerate(names) for gpu in range(8)]
    async with served(tmp_path, worlds.world(*parts, *ranks)) as page:
        packed = await page.get("/api/state", Accept_Encoding="gzip")
        body = gzip.decompress(packed.body)
        assert len(packed.body) < 150_000
        assert len(body) < 1_500_000
        nodes = json.loads(body)["nodes"]
        assert (len(nodes), sum(len(node["ranks"]) for node in nodes)) == (1024, 8192)


async def test_hostile_names_stay_data(tmp_path: Path) -> None:
    """They are JSON that no browser takes for HTML; the script has no way to put HTML into the document."""
    rank = worlds.rank(0, "node-1", job=HOSTILE)
    world = worlds.world(worlds.node("node-1", reason=HOSTILE), rank, worlds.alarm("node-1", text=HOSTILE))
    async with served(tmp_path, world) as page:
        await page.store.note("signal", f"{HOSTILE}\n\nevent: state\ndata: forged", node="node-1")
        for path in ("/api/state", "/api/timeline"):
            answer = await page.get(path)
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await page.get("/api/state")).json["nodes"][0]["ranks"][0]["job"] == HOSTILE
        async with news(page) as stream:
            found = await asyncio.to_thread(stream.until, "records", lambda data: bool(data["records"]))
            assert found["records"][0]["text"].endswith("data: forged")
        scripts = [(await page.get(f"/{name}")).body.decode() for name in SCRIPTS]
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "srcdoc", "DOMParser"):
            assert all(sink not in script for script in scripts)


async def test_page_loads_nothing_from_elsewhere_and_no_inline_code(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        answer = await page.get("/")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy
        text = answer.body.decode()
        for path in FILES:
            assert "//" not in (await page.get(path)).body.decode().replace("// ", "").replace("/* ", ""), path
        assert "<style" not in text
        assert not re.search(r"\s(on\w+|style)\s*=", text)
        assert re.findall(r"<script[^>]*>(.*?)</script>", text) == [""]
        for landmark in ("<main>", "<header>", '<html lang="en">', "<h1>", 'aria-live="polite"', '<label for="token">'):
            assert landmark in text
        missing = await page.get("/nothing")
        assert (missing.status, missing.headers["x-frame-options"]) == (404, "DENY")


# ---------------------------------------------------------------------- news


async def test_new_record_and_new_state_arrive(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        await page.store.note("start", "began")
        async with news(page, "/api/news?after=1") as stream:
            first = await asyncio.to_thread(stream.until, "state", lambda data: True)
            await page.store.set_node("node-1", NodeState.TAINTED, "a reason")

            def both() -> tuple[Any, Any]:
                """In either order: the world may be looked at just after the change, the records just before."""
                found: dict[str, Any] = {}
                for name, data in stream:
                    found[name] = data
                    if len(found) == 2:
                        break
                return found["records"], found["state"]

            news_, changed = await asyncio.to_thread(both)
            assert [(one["id"], one["kind"], one["by"]) for one in news_["records"]] == [(2, "state", "autopilot")]
            assert not news_["skipped"]
            assert changed != first


async def test_record_of_another_process_arrives(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page, news(page) as stream, Store.open(page.store.folder) as other:
        await other.set_node("node-1", NodeState.TAINTED, "by a verb", "bob")
        found = await asyncio.to_thread(stream.until, "records", lambda data: True)
        assert found["records"][0]["by"] == "bob"


async def test_viewer_who_missed_too_much_is_told(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as page:
        for number in range(KEPT + 5):
            await page.store.note("signal", f"record {number}")
        async with news(page, Last_Event_ID="3") as stream:
            found = await asyncio.to_thread(stream.until, "records", lambda data: True)
            assert (found["skipped"], len(found["records"])) == (True, KEPT)
        async with news(page, Last_Event_ID=str(KEPT + 3)) as stream:
            found = await asyncio.to_thread(stream.until, "records", lambda data: True)
            assert (found["skipped"], len(found["records"])) == (False, 2)
