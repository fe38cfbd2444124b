"""The page for whoever may ask: by a token, at a rate; on a phone, by keyboard, by ear, without motion."""

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from playwright.sync_api import Browser, Page, expect

from ddm_ray.serve.http.authentication.bearer import TOKENS, BearerTokens
from ddm_ray.serve.http.guard import Guard, Limits
from tests.conftest import wait_for
from tests.serve.http.browser import Site, tab
from tests.serve.http.test_browser_page import (
    USUAL,
    WATCH,
    browser,
    done,
    opened,
    page,
    paint,
    picture,
    seen,
    served,
    site,
    standing_still,
)
from tests.serve.http.test_http_app import Served

pytestmark = pytest.mark.contract

__all__ = ["browser", "opened", "page", "served", "site"]

TOKEN = "t" * 32


@pytest.fixture
def guarded(site: Site, served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The same site, for those who have a token."""
    monkeypatch.setenv(TOKENS, TOKEN)
    before, site.app = site.app, Guard(served.app, BearerTokens.read(None))
    yield site
    site.app = before


def test_a_token_is_asked_for_and_kept_in_this_tab(browser: Browser, guarded: Site) -> None:
    with tab(browser, guarded.url) as opened:
        page, token = opened.page, opened.page.get_by_label("Token")
        expect(token).to_be_focused()
        expect(page.get_by_role("button", name="Paint")).to_be_hidden()
        assert "0" not in page.locator("#class").inner_text()
        token.fill("wrong")
        page.keyboard.press("Enter")
        expect(token).to_have_accessible_description(re.compile("send one of this server's tokens: Authorization: Bea"))
        token.fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.get_by_label("Class")).to_be_focused()
        expect(token).to_be_hidden()
        paint(page, seed="2")
        done(page)
        kept = "[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
        assert page.evaluate(kept) == [[TOKEN], [], ""]
        page.reload()
        expect(page.get_by_label("Class")).to_be_visible()
        page.evaluate("sessionStorage.clear()")
        paint(page)
        expect(token).to_be_focused()


def test_who_asks_too_often_waits_as_long_as_the_server_says(browser: Browser, site: Site, served: Served) -> None:
    now = 0.0
    before, site.app = site.app, Guard(served.app, limits=Limits(per_minute=1), clock=lambda: now)
    try:
        with tab(browser, site.url) as opened:
            page, note = opened.page, opened.page.locator(".note")
            page.clock.install()
            paint(page, ("full",), steps="2")
            done(page)
            paint(page)
            expect(note).to_have_text("1 requests a minute are allowed; next try in 60 s")
            expect(page.get_by_role("status")).to_contain_text("The next try is in 60 s.")
            page.clock.run_for(10_000)
            expect(note).to_have_text("1 requests a minute are allowed; next try in 50 s")
            now = 60.0
            page.clock.run_for(50_000)
            assert done(page) == "Done: 1 image of 0."
            expect(note).to_be_hidden()
            assert len(opened.asked) == 3
    finally:
        site.app = before


def test_a_phone_is_wide_enough(browser: Browser, site: Site, served: Served) -> None:
    """Nothing is cut off at 360 pixels, nor behind a scroll to the side; who paints can stop wherever they look."""
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "device_scale_factor": 2}
    with tab(browser, site.url, **phone) as opened:
        page = opened.page

        def require_narrow() -> None:
            assert page.evaluate("document.documentElement.scrollWidth") == 360
            rights = "[...document.querySelectorAll('body *')].map((each) => each.getBoundingClientRect().right)"
            assert max(page.evaluate(rights)) <= 360

        paint(page, ("full",), others="nucleus-" + "9" * 60)
        expect(page.locator("[aria-invalid]")).to_be_focused()
        require_narrow()
        with standing_still(served, 30):
            paint(page, tuple(USUAL), others="", **{"class": "5"}, seed="4")
            expect(page.locator("figure img").first).to_be_in_viewport()
            expect(page.get_by_role("button", name="Stop")).to_be_in_viewport()
            expect(page.get_by_role("status")).to_be_in_viewport()
        done(page)
        require_narrow()
        top = "document.querySelector('#seen').getBoundingClientRect().top"
        wait_for(lambda: abs(page.evaluate(top)) < 1, 60, lambda: str(page.evaluate(top)))
        picture(page, "page-phone.png")
        small = "[...document.querySelectorAll('button, select, input:not([type=checkbox], [type=range]), .choice')]"
        heights = page.evaluate(f"{small}.map((each) => each.getBoundingClientRect().height).filter(Boolean)")
        assert min(heights) >= 44


def test_the_keyboard_alone_does_it_all(page: Page) -> None:
    """Tab reaches everything in the order in which it is read, and shows where it is; Enter paints, Escape stops."""
    expect(page.get_by_label("Class")).to_be_visible()
    names = []

    def tab_to(name: str) -> None:
        while not names or names[-1] != name:
            page.keyboard.press("Tab")
            focused = page.locator(":focus")
            label = "each => each.labels?.[0]?.innerText ?? each.innerText"
            names.append(focused.evaluate(label).strip())
            assert focused.evaluate("each => getComputedStyle(each).outlineStyle") == "solid", names[-1]
            assert len(names) < 30, names

    tab_to("Class")
    page.keyboard.press("3")
    tab_to("top-2")
    page.keyboard.press("Space")
    tab_to("Steps")
    page.keyboard.press("Control+A")
    page.keyboard.type("4")
    page.keyboard.press("Enter")
    assert done(page) == "Done: 2 images of 3."
    tab_to("Look back to step")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#moment-text")).to_have_text("3 of 4")
    order = ["Class", *USUAL, "Others, with commas between them", "Steps", "Guidance scale", "Seed", "New"]
    assert names == [*order, "Images of each", "Paint", "Look back to step"]


def test_it_can_be_heard(page: Page) -> None:
    """Every control and picture has a name, headings have their order, and the status tells how it goes."""
    expect(page.get_by_role("button", name="Paint")).to_be_visible()
    page.evaluate(WATCH, "#status")
    paint(page, ("once", "full"))
    done(page)
    texts = seen(page)
    assert texts == ["Painting 2 images of 0.", "1 of 2 images done.", "2 of 2 images done.", "Done: 2 images of 0."]
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    controls = {"textbox", "combobox", "spinbutton", "checkbox", "slider", "button", "image", "group", "region"}
    named = [(each["role"]["value"], each["name"]["value"]) for each in tree if not each["ignored"] and "name" in each]
    assert controls <= {role for role, _ in named}
    assert not [each for each in named if each[0] in controls and not each[1]]
    snapshot = page.locator("body").aria_snapshot()
    levels = [int(level) for level in re.findall(r"heading .*\[level=(\d)\]", snapshot)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in pairwise(levels))
    assert re.search(r'img "Experts over \d+ steps: expert \d', snapshot) and 'img "0, once, seed 1"' in snapshot
    assert 'status: "Done: 2 images of 0."' in snapshot


def test_who_wants_no_motion_sees_few_images_on_their_way(browser: Browser, site: Site) -> None:
    with tab(browser, site.url, reduced_motion="reduce") as opened:
        paint(opened.page, ("once",), steps="20")
        done(opened.page)
        assert [body["partial_images"] for body in opened.asked] == [3]
        moving = "getComputedStyle(document.querySelector('button')).transitionDuration"
        assert opened.page.evaluate(moving) == "0s"
        assert opened.page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
