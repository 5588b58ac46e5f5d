"""The page in a real browser, served by a real autopilot process with fake daemons.

Screenshots are left in build/page, for people to look at.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from migrator.autopilot.page import access
from migrator.autopilot.store import Store
from migrator.autopilot.suspension import SuspendedRank, Suspension
from snapshotd.api import snapshotd_pb2 as pb
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.pages import autopilot
from tests.autopilot.test_progress import PERIOD_MS, counting
from tests.cli.conftest import a_rank

HOSTILE = "<img src=x onerror=alert(1)></script>"
LONG = "a-job-with-a-name-that-has-no-place-for-a-line-break-" * 4
SHOTS = Path(__file__).parents[2] / "build" / "page"
NARROW = (390, 844)
POLICY = """
[[rules]]
name = "gpus"
checks = ["gpu-*"]
action = "move"
[[rules]]
name = "links"
checks = ["net-*"]
action = "drain"
approval = true
[breaker]
nodes_percent = 80
"""
NOTHING_WRONG: dict[str, list[str]] = {"faint": [], "nameless": [], "twice": []}
#: The least contrast of text with what is behind it, and controls without a name, on the page as it is drawn.
EXAMINE = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colour = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (front, back) => [0, 1, 2].map((at) => front[at] * front[3] + back[at] * (1 - front[3]));
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) layers.unshift(colour(getComputedStyle(one).backgroundColor));
    return layers.reduce((back, front) => over(front, back), [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((one) => (one / 255 <= 0.03928 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("dialog, .unseen, .skip, noscript")) continue;
    const style = getComputedStyle(element);
    const back = behind(element);
    const text = over(colour(element.closest("svg") ? style.fill : style.color), back);
    const [low, high] = [light(text), light(back)].sort((one, other) => one - other);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) faint.push(`${element.className} ${element.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  const labelled = (one) => [...(one.labels || [])].some((label) => label.textContent.trim());
  const controls = [...document.querySelectorAll("button, a[href], input, select, [role=img]")];
  const nameless = controls.filter((one) => one.checkVisibility()
    && !(one.getAttribute("aria-label") || one.textContent.trim() || labelled(one)));
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  return { faint, nameless: nameless.map((one) => one.outerHTML), twice: ids.filter((id, at) => ids.indexOf(id) !== at) };
}"""

expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None and not request.config.getoption("--whole"):
        pytest.skip("no chromium is installed (apt-get install chromium): make test-all")
    with sync_playwright() as playwright, closing(playwright.chromium.launch(executable_path=program)) as started:
        yield started


@pytest.fixture
def url(pilots: PilotCluster, tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "policy.toml"
    file.write_text(POLICY)
    with autopilot(file) as found:
        yield found


@dataclass
class Seen:
    """What a browser complains about, and every address that it asks."""

    complaints: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)


@contextmanager
def opened(
    browser: Browser, url: str, size: tuple[int, int] = (1440, 900), scheme: str = "light", refused: int = 0
) -> Iterator[Page]:
    """The page in a fresh profile. At the end nothing must have gone wrong in it, and no other host been asked.

    `refused` is the number of requests that the server must refuse for the lack of a token; the browser reports them too.
    """
    assert scheme in ("light", "dark")
    seen = Seen()
    width, height = size
    with closing(
        browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
        )
    ) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("console", lambda said: seen.complaints.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: seen.complaints.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: seen.asked.add(request.url))
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("live")
        yield page
    unauthorized = [one for one in seen.complaints if "401 (Unauthorized)" in one]
    assert (len(unauthorized), seen.complaints) == (refused, unauthorized)
    assert {one for one in seen.asked if not one.startswith((url, "data:"))} == set()


def shoot(page: Page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def test_a_rank_that_moves_by_itself_is_seen_without_a_reload(pilots: PilotCluster, browser: Browser, url: str) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1", job=HOSTILE))
    with opened(browser, url) as page:
        page.evaluate("window.sameDocument = true")
        tile = page.locator("#map button", has_text="node-1")
        expect(tile).to_have_accessible_name("node-1, healthy, 1 rank")
        expect(page.locator("#jobs strong")).to_have_text(HOSTILE)
        expect(page.locator("#spares li")).to_contain_text(["spare-1", "spare-2"])
        expect(page.locator("#spares .badge")).to_have_text(["usable", "usable"])
        expect(page.locator("#recent")).to_have_text("No move has ended lately.")

        pilots["node-1"].raise_alarm()
        move = page.locator("#recent li", has_text="node-1 → spare-1")
        expect(move).to_contain_text(f"rank 0 of {HOSTILE}")
        expect(move.locator(".badge")).to_have_text("moved")
        expect(move.locator(".why").first).to_contain_text("gpu-ecc")  # the reason
        expect(tile).to_have_accessible_name("node-1, tainted, no ranks, 1 alarm")
        expect(page.locator("#map button", has_text="spare-1")).to_have_accessible_name(
            "spare-1, healthy, spare, 1 rank"
        )
        for kind in ("Signal", "Node state", "Move begins", "Move ended"):
            expect(page.locator("#timeline .kind").filter(has_text=kind).first).to_be_visible()
        page.get_by_role("button", name="Moves", exact=True).click()
        expect(page.locator("#timeline .record:visible .kind")).to_have_text(["Move ended", "Move begins"])

        tile.click()
        expect(page.locator("#node")).to_contain_text("gpu-ecc on host: it fails")
        expect(page.locator("#node .badge.critical")).to_have_text("critical")
        expect(page.locator("#node button")).to_have_count(0)  # without a login
        assert page.locator("img").count() == 0
        assert page.evaluate("window.sameDocument") is True
        shoot(page, "moved")


def log_in(pilots: PilotCluster, page: Page) -> None:
    token = (pilots.path.parent / "state" / access.FILE).read_text().split()[1]
    page.locator("#open-login").press("Enter")
    page.keyboard.type(token)
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_have_text("Logged in as operator.")


def test_a_rank_is_moved_in_the_view_of_its_job(pilots: PilotCluster, browser: Browser, url: str) -> None:
    """With the keyboard, from the list of jobs; then with the mouse, by the address of the job."""
    began = int(time.time() * 1000 / PERIOD_MS)
    for member, name in enumerate(("node-1", "node-2", "node-3")):
        pilots[name].ranks.append(a_rank(name, rank=member, uid=f"train-{member}"))
        pilots[name].progress = counting(f"train-{member}", member, began, slow=member == 1)
    with opened(browser, url) as page:
        log_in(pilots, page)
        job = page.get_by_role("link", name="train", exact=True)
        expect(job.first).to_be_visible()
        job.first.focus()
        page.keyboard.press("Enter")
        heading = page.get_by_role("heading", name="train", exact=True)
        expect(heading).to_be_focused()
        expect(page.locator("#overview")).to_be_hidden()
        expect(page.locator("#ranks tr")).to_have_count(3)
        curve = page.locator("#pace .curve")
        expect(curve.first).to_be_attached()  # a flat curve has no height, so it would count as hidden
        assert int(curve.first.get_attribute("data-points") or 0) >= 1
        assert page.locator("#pace svg").get_attribute("aria-label").startswith("Collectives per second")  # type: ignore[union-attr]
        expect(page.locator("#pace-text")).to_contain_text("No period of steps is recognised")
        expect(page.locator("#stragglers")).to_contain_text("% of the time lost")

        page.get_by_role("button", name="Move rank 0 away from node-1").press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("The whole job pauses while it is moved.")
        expect(page.get_by_label("Move it to")).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Tab")
        page.keyboard.type("noisy fan")
        page.keyboard.press("Enter")
        expect(page.locator("#message")).to_contain_text(
            "rank 0 of train is being moved from node-1 to spare-2 (order 1)"
        )
        row = page.locator("#ranks tr", has_text="spare-2")
        expect(row.locator("td").nth(2)).to_have_text("node-1")  # where it was started
        expect(page.locator("#job-moves")).to_contain_text("rank 0: node-1 → spare-2")
        expect(page.locator("#job-timeline")).to_contain_text(
            "operator (page) ordered to move rank 0 of train on node-1"
        )
        shoot(page, "job")
        page.get_by_role("link", name="All nodes and jobs").press("Enter")
        expect(page.locator("#overview")).to_be_visible()
        expect(page.locator("#jobs a")).to_be_focused()

        page.goto(f"{url}#job/{a_rank('node-1').user_id}/train")
        page.get_by_role("button", name="Move rank 1 away from node-2").click()
        page.get_by_role("button", name="Yes, move rank 1 of train").click()
        expect(page.locator("#ranks tr", has_text="spare-1")).to_be_visible()
    assert pilots.places() == {"train-0": "spare-2", "train-1": "spare-1", "train-2": "node-3"}


def test_an_operator_drains_a_node_with_the_keyboard_and_approves_a_proposal(
    pilots: PilotCluster, browser: Browser, url: str
) -> None:
    pilots["node-2"].ranks.append(a_rank("node-2"))
    pilots["node-1"].ranks.append(a_rank("node-1", job="eval"))
    token = (pilots.path.parent / "state" / access.FILE).read_text().split()[1]
    with opened(browser, url, refused=1) as page:
        page.locator("#open-login").press("Enter")
        page.keyboard.type(token[:-1])
        page.keyboard.press("Enter")
        expect(page.locator("#message")).to_contain_text("Not logged in")
        page.locator("#open-login").press("Enter")
        page.keyboard.type(token)
        page.keyboard.press("Enter")
        expect(page.locator("#message")).to_have_text("Logged in as operator.")
        page.locator("#map button").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="drain node-2").press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Its ranks are moved to spares")
        shoot(page, "confirm")
        page.keyboard.press("Escape")
        expect(page.locator("#node .badge").first).to_have_text("healthy")
        page.get_by_role("button", name="drain node-2").press("Enter")
        page.keyboard.type("a fan")
        page.keyboard.press("Enter")
        expect(page.locator("#message")).to_have_text("node-2 is being drained (order 1)")
        expect(page.locator("#node .badge").first).to_have_text("drained")
        expect(page.locator("#timeline")).to_contain_text("operator (page) ordered to drain node-2: a fan")

        expect(page.locator("#proposals-section")).to_be_hidden()
        pilots["node-1"].raise_alarm("net-link")
        page.get_by_role("button", name="approve proposal 1: drain node-1").click()
        expect(dialog).to_contain_text("net-link on host: it fails")
        shoot(page, "proposal")
        dialog.get_by_role("button", name="Yes, approve proposal 1").click()
        expect(page.locator("#message")).to_contain_text("proposal 1 is approved")
        expect(page.locator("#proposals")).to_contain_text("approved by operator (page)")
        expect(page.locator("#map button", has_text="node-1")).to_have_accessible_name(
            "node-1, drained, no ranks, 1 alarm"
        )
        expect(page.locator("#proposals button")).to_have_accessible_name("reject proposal 1: drain node-1")
        page.locator("#logout").click()
        expect(page.locator("#proposals button")).to_have_count(0)  # without a login
    assert set(pilots.places().values()) == {"spare-1"}


@pytest.fixture
def suspended(pilots: PilotCluster) -> pb.JobRecord:
    """The record of a job that was suspended by an earlier autopilot, and has room nowhere."""
    rank = SuspendedRank("low-0-00000001", 0, "spare-1", "spare-1", (), memory_bytes=1 << 50)
    one = Suspension("m-000000000001", "low", 0, (rank,), "spare-1", "gpt-3-00000001", "suspended to make room", 1.0)

    async def record() -> None:
        async with Store.open(pilots.path.parent / "state") as store:
            await store.intend_suspension(one)

    with ThreadPoolExecutor(1) as other:  # the browser has a loop in this one
        other.submit(asyncio.run, record()).result()
    known = pb.JobRecord(record=one.id, job="low", outcome=pb.COMMIT)
    pilots["spare-1"].jobs.append(known)
    return known


def test_a_suspended_job_stays_in_the_list(
    pilots: PilotCluster, suspended: pb.JobRecord, browser: Browser, url: str
) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1", job="gpt"))
    with opened(browser, url) as page:
        jobs = page.locator("#jobs li")
        expect(jobs).to_have_count(2)
        expect(jobs.first.locator(".badge")).to_have_text("suspended")
        expect(jobs.first).to_contain_text("suspended to make room")
        assert page.evaluate(EXAMINE) == NOTHING_WRONG
        shoot(page, "suspended")
        jobs.first.locator("a").click()
        expect(page.locator("#job-about")).to_contain_text("suspended to make room, since")
        page.locator("#job-view .back").click()
        suspended.ended_by = "an operator"
        expect(jobs).to_have_count(1)
        expect(jobs).to_contain_text("gpt")


def test_it_fits_a_telephone_in_light_and_dark(pilots: PilotCluster, browser: Browser, url: str) -> None:
    pilots["node-1"].ranks += [a_rank("node-1", job=LONG), a_rank("node-1", 1, job=HOSTILE)]
    pilots["node-3"].raise_alarm("net-link")
    colours = set()
    for scheme in ("light", "dark"):
        with opened(browser, url, NARROW, scheme) as page:
            expect(page.locator("#jobs")).to_contain_text(LONG)
            node = page.locator("#map button", has_text="node-1")
            node.click()
            expect(page.locator("#node .ranks li").first).to_be_in_viewport()
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= NARROW[0], f"{scheme}: the page is {width} px wide"
            colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate(EXAMINE) == NOTHING_WRONG
            shoot(page, f"telephone-{scheme}")
            page.locator("#jobs a", has_text=LONG).click()
            expect(page.locator("#ranks tr")).to_have_count(1)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= NARROW[0], f"{scheme}: the view of a job is {width} px wide"
            assert page.evaluate(EXAMINE) == NOTHING_WRONG
            shoot(page, f"telephone-job-{scheme}")
    assert len(colours) == 2
