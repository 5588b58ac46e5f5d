"""The page in a real browser, served by a real autopilot process with fake daemons.

Screenshots are left in build/page, for people to look at.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from migrator.autopilot.page import access
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.pages import autopilot
from tests.cli.conftest import a_rank

HOSTILE = "<img src=x onerror=alert(1)></script>"
LONG = "a-job-with-a-name-that-has-no-place-for-a-line-break-" * 4
SHOTS = Path(__file__).parents[2] / "build" / "page"
NARROW = (390, 844)

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
    file.write_text('[[rules]]\nname = "gpus"\nchecks = ["gpu-*"]\naction = "move"\n[breaker]\nnodes_percent = 80\n')
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


def test_an_operator_drains_a_node_with_the_keyboard(pilots: PilotCluster, browser: Browser, url: str) -> None:
    pilots["node-2"].ranks.append(a_rank("node-2"))
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
    assert set(pilots.places().values()) == {"spare-1"}


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
            shoot(page, f"telephone-{scheme}")
    assert len(colours) == 2
