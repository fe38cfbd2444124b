"""The page at `/` in a real browser, over the real application: what is seen, heard, typed, refused and stopped.

With DDM_SCREENSHOTS=docs the tests are of the demo's run, runs/digits, and its pictures are written there.
"""

import asyncio
import io
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from ddm_ray.core.condition import Text
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_models
from ddm_ray.sampling.trace import HUES
from ddm_ray.serve.engine.local_runner import LocalRunner
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.serve.http.guard import Guard
from tests.conftest import ROOT, wait_for
from tests.random_run import make_run
from tests.serve.conftest import pixels
from tests.serve.http.browser import Site, Tab, chromium, serving, tab
from tests.serve.http.test_http_app import Served, live
from tests.text_run import make_text_run

pytestmark = pytest.mark.contract

PICTURES = os.environ.get("DDM_SCREENSHOTS")
USUAL = ["once", "top-1", "top-2", "full"]
PNG = "data:image/png;base64,"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(tiny_run: Run) -> Iterator[Served]:
    made = Served(Run.open(str(ROOT / "runs/digits")) if PICTURES else tiny_run)
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def site(served: Served) -> Iterator[Site]:
    with serving(Guard(served.app)) as site:
        yield site


@pytest.fixture
def opened(browser: Browser, site: Site) -> Iterator[Tab]:
    with tab(browser, site.url, device_scale_factor=2 if PICTURES else 1) as opened:
        yield opened


@pytest.fixture
def page(opened: Tab) -> Page:
    return opened.page


def test_experts_are_called_by_the_numbers_of_their_clusters(browser: Browser, tmp_path: Path) -> None:
    made = Served(make_run(str(tmp_path / "run"), settings=("partition.numbers=[1, 4]",), num_rows=60))
    try:
        with serving(Guard(made.app)) as site, tab(browser, site.url) as opened:
            expect(opened.page.locator("#legend li")).to_have_text(["expert 1", "expert 4"])
            paint(opened.page, ("top-1",), steps="2")
            shown = opened.page.locator(".shares li")
            expect(shown.first).to_have_text(re.compile("expert [14]"))
    finally:
        made.engine.close()


def test_who_joined_and_who_left_is_said_with_the_next_image(browser: Browser, tmp_path: Path) -> None:
    before = make_run(str(tmp_path / "before"), num_rows=60)
    settings = ("partition.numbers=[1, 4, 5]", "partition.num_clusters=3")
    after = make_run(str(tmp_path / "after"), settings=settings, num_rows=60)
    made, newer = Served(before), live(load_models(after), Versions(after), after.config.sample)
    try:
        with serving(Guard(made.app)) as site, tab(browser, site.url) as opened:
            legend = opened.page.locator("#legend li")
            paint(opened.page, ("full",), steps="2")
            expect(legend).to_have_text(["expert 0", "expert 1"])
            colour = legend.nth(1).locator(".dot").get_attribute("style")
            made.mixture.replace(newer.version, newer._now.sampler, newer.engine, newer.defaults)
            paint(opened.page, ("full",), steps="2")
            expect(legend).to_have_text(["expert 1", "expert 4", "expert 5"])
            expect(opened.page.locator("#changed")).to_have_text("expert 4 joined, expert 5 joined, expert 0 left.")
            assert legend.nth(0).locator(".dot").get_attribute("style") == colour
            shown = " ".join(opened.page.locator(".shares li").all_text_contents())
            assert {*re.findall("expert ([0-9])", shown)} <= {"1", "4", "5"}
            assert opened.page.locator("#steps").input_value() == "2"
            health = site.get("healthz")
            assert health["experts"] == ["expert-001", "expert-004", "expert-005"]
            assert health["weights"].keys() == {*health["experts"], "router"}
            assert site.get("v1/models")["data"][0]["experts"] == health["experts"]
    finally:
        newer.engine.close()
        made.engine.close()


def paint(page: Page, strategies: tuple[str, ...] = (), **fields: str) -> None:
    """Fill in the form, and send it off. `fields` by the ids of their inputs."""
    expect(page.get_by_role("button", name="Paint")).to_be_visible()
    if strategies:
        for box in page.get_by_role("checkbox").all():
            box.set_checked(box.get_attribute("value") in strategies)
    for name, value in fields.items():
        if name == "class":
            page.get_by_label("Class").select_option(value)
        else:
            page.locator(f"#{name}").fill(value)
    page.get_by_role("button", name="Paint").click()


def done(page: Page) -> str:
    """The text of the status once all is painted."""
    expect(page.get_by_role("status")).to_contain_text("Done")
    return page.get_by_role("status").inner_text()


def picture(page: Page, name: str) -> None:
    """A screenshot, in few enough colours to be a small file."""
    if PICTURES:
        screen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        screen.quantize(256, dither=Image.Dither.NONE).save(f"{PICTURES}/{name}", optimize=True)


WATCH = """selector => {
  const note = () => document.querySelectorAll(selector).forEach((each) => seen.push(each.src ?? each.textContent));
  const all = {subtree: true, childList: true, characterData: true, attributes: true};
  window.seen = [];
  new MutationObserver(note).observe(document.body, all);
}"""


def seen(page: Page) -> list[str]:
    """Values of what WATCH looks at, one after the other."""
    values = [value for value in page.evaluate("window.seen") if value]
    return [value for number, value in enumerate(values) if number == 0 or value != values[number - 1]]


def test_an_image_forms_and_is_the_apis_own(page: Page, site: Site) -> None:
    asked = {"class_label": 7, "seed": 5, "strategy": "full", "steps": 10, "guidance_scale": 2.0}
    expect(page.get_by_role("button", name="Paint")).to_be_visible()
    page.evaluate(WATCH, "figure img")
    paint(page, ("full",), **{"class": "7"}, seed="5", steps="10", guidance="2")
    assert done(page) == "Done: 1 image of 7."
    frames = [source.removeprefix(PNG) for source in seen(page)]
    assert len(set(frames)) == 10
    assert frames[-1] == site.generate(**asked)["data"][0]["b64_json"]
    image, slider = page.get_by_role("img", name="7, full, seed 5"), page.get_by_label("Look back to step")
    expect(slider).to_have_value("10")
    slider.fill("3")
    expect(image).to_have_attribute("src", PNG + frames[2])
    expect(image).to_have_attribute("alt", "7, full, seed 5, after 3 steps")
    expect(page.locator(".later")).to_have_attribute("x", "3")
    slider.press("End")
    expect(image).to_have_attribute("src", PNG + frames[-1])


DRAWN = """(svg, [steps, samples]) => Array.from({length: steps}, (_, step) => {
  const counts = {};
  for (let n = 0; n < samples; n++) {
    const point = new DOMPoint(step + .5, (n + .5) / samples);
    const path = [...svg.querySelectorAll("path")].find((each) => each.isPointInFill(point));
    const color = path?.getAttribute("fill");
    counts[color] = (counts[color] ?? 0) + 1 / samples;
  }
  return counts;
})"""


def drawn(strip: Locator, steps: int, num_experts: int) -> np.ndarray:
    """Weights (S, K) as a strip shows them: by the share of each expert's colour in each step's column."""
    columns = strip.evaluate(DRAWN, [steps, 50])
    assert {color for column in columns for color in column} <= set(HUES[:num_experts])
    return np.array([[column.get(HUES[k], 0.0) for k in range(num_experts)] for column in columns])


def test_strategies_side_by_side_and_who_painted_what(page: Page, site: Site) -> None:
    """At the same seeds; each strip shows the routing that the API tells, to a fiftieth."""
    label, seed, steps, count = (5, 4, 25, 1) if PICTURES else (3, 1, 6, 2)
    paint(page, tuple(USUAL), **{"class": str(label)}, seed=str(seed), count=str(count), steps=str(steps))
    assert done(page) == f"Done: {len(USUAL) * count} image{'s' * (count * len(USUAL) > 1)} of {label}."
    names = [item.inner_text() for item in page.locator("#legend li").all()]
    assert names == [f"expert {k}" for k in range(len(names))] and len(names) >= 2
    picture(page, "page.png")
    for number in range(count):
        row = page.locator(".seed").nth(number)
        assert row.get_by_role("heading", level=3).inner_text() == f"Seed {seed + number}"
        assert [heading.inner_text() for heading in row.get_by_role("heading", level=4).all()] == USUAL
        tops = {figure.bounding_box()["y"] for figure in row.get_by_role("figure").all()}
        assert len(tops) == 1
        for strategy, figure in zip(USUAL, row.get_by_role("figure").all(), strict=True):
            right = site.generate(class_label=label, seed=seed + number, strategy=strategy, steps=steps, routing=True)
            image, strip = figure.locator("img"), figure.locator("svg")
            shown = pixels(image.get_attribute("src").removeprefix(PNG))
            assert np.abs(shown - pixels(right["data"][0]["b64_json"])).max() <= 1
            weights_SK = np.array(right["routing"][0])
            assert np.abs(drawn(strip, steps, len(names)) - weights_SK).max() <= 0.03
            heaviest = f"expert {weights_SK.sum(0).argmax()}"
            assert f"Experts over {steps} steps: " in strip.get_attribute("aria-label")
            assert heaviest in strip.get_attribute("aria-label")
            assert figure.locator(".shares li").first.inner_text().startswith(heaviest)
            assert figure.locator("img").evaluate("image => getComputedStyle(image).imageRendering") == "pixelated"


@contextmanager
def standing_still(served: Served, calls: int) -> Iterator[None]:
    """The engine stops before its next call but so many, and goes on at the end."""
    gate, left, answer = threading.Event(), iter(range(calls)), served.engine._answer

    def gated(asked: Any) -> Any:
        if next(left, None) is None:
            gate.wait(60)
        return answer(asked)

    served.engine._answer = gated
    try:
        yield
    finally:
        served.engine._answer = answer
        gate.set()


@pytest.mark.parametrize("how", ["button", "key"])
def test_what_runs_can_be_stopped(page: Page, served: Served, how: str) -> None:
    with standing_still(served, 9):
        paint(page, ("once", "top-1"), steps="20")
        expect(page.locator("figure img").first).to_be_visible()
        expect(page.get_by_role("status")).to_have_text("Painting 2 images of 0.")
        stop = page.get_by_role("button", name="Stop")
        stop.click() if how == "button" else page.keyboard.press("Escape")
        expect(page.get_by_role("status")).to_have_text("Stopped: 0 of 2 images done.")
        expect(stop).to_be_disabled()
        if how == "button":
            expect(page.get_by_role("button", name="Paint")).to_be_focused()
    wait_for(lambda: served.engine.scheduler.rows == 0, 30)
    assert 0 < page.locator("path").count() <= 2
    paint(page, steps="5")
    assert done(page) == "Done: 2 images of 0."


REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    ("steps", "0", {"steps": 0}),
    ("others", "top-9", {"strategy": "top-9"}),
]


def test_a_refusal_is_marked_at_its_field(page: Page, site: Site) -> None:
    """In the words of the API, or in the page's own; the mark goes when the next request does."""
    refusals = [(*each[:2], site.generate(**{"prompt": "0"} | each[2])["error"]["message"]) for each in REFUSALS]
    for field, value, message in (*refusals, ("count", "11", "from 1 to 10 images")):
        paint(page, ("full",), **{field: value})
        marked = page.locator("[aria-invalid]")
        expect(marked).to_have_attribute("id", field)
        expect(marked).to_be_focused()
        expect(marked).to_have_accessible_description(message)
        expect(page.get_by_text(message)).to_be_visible()
        page.keyboard.press("Control+A")
        page.keyboard.press("Delete")
        page.keyboard.press("Enter")
        done(page)
        expect(marked).to_have_count(0)
    page.get_by_role("checkbox", name="full").uncheck()
    paint(page)
    expect(page.get_by_text("choose one strategy or more")).to_be_visible()
    assert re.fullmatch(r"\d+", page.get_by_label("Seed", exact=True).input_value())


def test_who_is_left_out_is_named(page: Page, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, *others = [LocalRunner(served.engine) for _ in range(served.sampler.info.num_experts)]
    gone.away = True
    monkeypatch.setattr(served.sampler, "_of_expert", [gone, *others])
    paint(page, ("full",), steps="3")
    done(page)
    expect(page.locator(".note")).to_have_text("without expert 0, which cannot be reached now")
    assert HUES[0] not in {path.get_attribute("fill") for path in page.locator("path").all()}


def test_texts(browser: Browser, site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = make_text_run(tmp_path_factory.mktemp("texts"))
    data = run.config.data
    assert data.text is not None and data.latents is not None
    encoder, latents = TextEncoder.from_config(data.text), Latents.from_config(data.latents)

    async def encode(prompt: str) -> tuple[Text, int]:
        return await asyncio.to_thread(encoder.encode, [prompt]), encoder.lengths([prompt])[0]

    async def decode(latents_BCHW: Any) -> Any:
        return await asyncio.to_thread(latents.decode, latents_BCHW)

    texts = Served(run, encode=encode, decode=decode)
    before, site.app = site.app, Guard(texts.app)
    try:
        with tab(browser, site.url) as opened:
            page = opened.page
            expect(page.get_by_label("Class")).to_be_hidden()
            page.get_by_label("Prompt").fill("a b")
            page.keyboard.press("Enter")
            assert done(page) == "Done: 1 image of “a b”."
            (asked,) = opened.asked
            assert asked["prompt"] == "a b" and asked["partial_images"] == 5
            right = site.generate(prompt="a b", seed=1)["data"][0]["b64_json"]
            assert page.get_by_role("img", name="“a b”, once, seed 1").get_attribute("src") == PNG + right
            expect(page.get_by_text("tokens count")).to_have_count(0)
            page.get_by_label("Prompt").fill("a b c d e f g h")
            page.keyboard.press("Enter")
            expect(page.get_by_text("only the first 9 of the prompt's 10 tokens count")).to_be_visible()
    finally:
        site.app = before
        texts.engine.close()
