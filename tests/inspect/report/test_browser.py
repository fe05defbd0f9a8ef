"""The report in Chromium: it opens fast, loads nothing, logs no error, and does what its panes, search and keys promise."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as dtensor_extent

import fxshard
from fxshard.byte_sizes import size_text
from fxshard.layout.layouts import Layout
from tests.inspect.report.example_reports import large_page, llama_page, llama_plan
from tests.plans.small_plans import by_hand

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 2.0


def a_browser() -> str:
    found = os.environ.get("FXSHARD_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no browser: apt-get install chromium, or name one in FXSHARD_BROWSER")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[test]'")
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=a_browser(), args=["--no-sandbox"])  # root has no sandbox
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The Llama's report, opened. Afterwards: no error or warning was logged, and nothing but the file was asked for."""
    one = browser.new_page(viewport={"width": 1440, "height": 900})
    said, asked = open_report(one, llama_page())
    yield one
    one.close()
    assert not said and asked == [llama_page().as_uri()]


def open_report(one: Any, path: Path) -> tuple[list[str], list[str]]:
    said: list[str] = []
    asked: list[str] = []
    one.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
    one.on("pageerror", lambda error: said.append(str(error)))
    one.on("request", lambda request: asked.append(request.url))
    one.goto(path.as_uri(), timeout=120_000)
    one.wait_for_selector("html[data-ready=yes]", timeout=120_000)
    return said, asked


def test_the_first_screen(page: Any) -> None:
    text = page.inner_text("#pane-overview")
    plan = llama_plan()
    assert size_text(sum(plan.memory.values())) in text and "of a limit of 2.00 GB" in text
    assert page.inner_text("#title") == "Llama" and "layers.*.attention.wq.weight" in text


def test_modules_open_and_close(page: Any) -> None:
    page.click("#tab-graph")
    assert page.locator('[data-id="m:layers.0"]').count() == 0
    page.click('[data-id="m:layers"]')
    page.click('[data-id="m:layers.1"]')
    assert page.locator('.item[data-id="m:layers.1.attention"]').count() == 1
    page.click('.cluster[data-id="m:layers.1"] .cluster-name')
    assert page.locator('.item[data-id="m:layers.1.attention"]').count() == 0
    fill = page.get_attribute('.item[data-id="m:layers.1"] > rect', "style")
    page.click("text=By cost")
    assert page.get_attribute('.item[data-id="m:layers.1"] > rect', "style") != fill


def test_the_keyboard(page: Any) -> None:
    page.keyboard.press("2")
    assert page.get_attribute("#tab-graph", "aria-selected") == "true"
    page.keyboard.press("ArrowDown")
    assert page.locator(".item.focus").count() == 1
    page.evaluate("R.view.focus = 'm:layers'")
    page.keyboard.press("Enter")
    assert page.locator('.item[data-id="m:layers.0"]').count() == 1
    page.keyboard.press("Backspace")
    assert page.locator('.item[data-id="m:layers.0"]').count() == 0
    page.keyboard.press("f")
    assert page.get_attribute('[data-choice="half:backward"]', "aria-checked") == "true"
    for key, name in zip("134", ("overview", "parameters", "communication"), strict=True):
        page.keyboard.press(key)
        assert page.is_visible(f"#pane-{name}") and not page.is_visible("#pane-graph")
    page.keyboard.press("?")
    assert page.is_visible("#keys")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.get_attribute("html", "data-theme") == "dark"


def test_search_and_a_node(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("output.weight")
    assert page.inner_text('#found [aria-selected="true"]').startswith("output.weight")
    page.keyboard.press("Enter")
    detail = page.inner_text("#detail")
    assert page.inner_text("#detail h2") == "output.weight" and str(llama_plan().layout_of("output.weight")) in detail
    assert page.locator("#detail .tensor .block").count() == len({str(r) for r in ranges(page, "output.weight").values()})
    assert page.locator("#detail .mesh .block").count() == 4
    explained = llama_plan().explain("output.weight")
    assert page.locator("#detail .answer .other").count() == len(explained.choices)
    page.click("#detail .rows a >> nth=0")  # its first reader
    assert page.inner_text("#detail h2").startswith("einsum") and "output.weight" in page.inner_text("#detail")
    page.keyboard.press("Escape")
    assert not page.is_visible("#detail")


def ranges(page: Any, name: str) -> dict[int, list[Any]]:
    """Of a parameter: for each rank the pieces of each dim, as the page computes them."""
    script = """(name) => { const [s, l] = R.nodes.find((n) => n.user === name).outs[0];
        return [...Array(R.meshSize()).keys()].map((rank) => R.rangesOf(R.data.graph.shapes[s], R.cuts.get(`${s},${l}`), rank)); }"""
    return dict(enumerate(page.evaluate(script, name)))


def test_the_page_places_blocks_as_dtensor(page: Any) -> None:
    plan = llama_plan()
    shapes = {end.name: (n.shapes[0], n.spec.outputs[0]) for end in plan.inputs for n in plan.nodes if n.name == end.node}
    for name in ("output.weight", "tok_embeddings.weight", "layers.0.feed_forward.w1.weight", "args[0]"):
        shape, layout = shapes[name]
        for rank, found in ranges(page, name).items():
            local, offset = dtensor_extent(shape, plan.mesh.shape, [rank // 2, rank % 2], list(Layout(layout)))
            assert found == [[[start, length]] for start, length in zip(offset, local, strict=True)]


def test_tables(page: Any) -> None:
    page.keyboard.press("3")
    rows = page.locator("#pane-parameters .tabulator-row")
    rows.first.wait_for()
    merged = rows.count()
    page.fill("#pane-parameters input[type=search]", "attention wq")
    page.wait_for_function("document.querySelectorAll('#pane-parameters .tabulator-row').length === 1")
    rows.first.click()
    assert page.inner_text("#detail h2").endswith("attention.wq.weight")
    page.fill("#pane-parameters input[type=search]", "")
    page.uncheck("#pane-parameters input[type=checkbox]")
    page.wait_for_function(f"R.parameters.getDataCount() > {merged}")
    page.keyboard.press("Escape")
    page.keyboard.press("4")
    page.click("#pane-communication .tabulator-col:has-text('Sent by a rank')")
    first = page.inner_text("#pane-communication .tabulator-row >> nth=0")
    assert size_text(max(sent_by_redistributions())) in first


def sent_by_redistributions() -> list[int]:
    found: dict[int, int] = {}
    for one in llama_plan().collectives:
        found[one.entry] = found.get(one.entry, 0) + one.bytes
    return list(found.values())


def test_timeline_and_memory(page: Any) -> None:
    page.keyboard.press("5")
    page.wait_for_selector("#lanes canvas")
    assert page.evaluate("R.timePlot.scales.x.max") == pytest.approx(page.evaluate("R.data.timeline.total"))
    page.focus("#lanes")
    page.keyboard.press("+")
    assert page.evaluate("R.timePlot.scales.x.max - R.timePlot.scales.x.min") < page.evaluate("R.data.timeline.total") * 0.6
    page.keyboard.press("6")
    page.wait_for_selector("#memory-plot canvas")
    profile = llama_plan().memory_profile()
    assert page.evaluate("Math.max(...R.total)") == profile.peak and size_text(profile.peak) in page.inner_text("#peak")
    assert page.evaluate("Array.from(R.total)") == list(profile.over_time)
    page.locator("#alive-table .tabulator-row").first.wait_for()
    assert page.evaluate("R.aliveTable.getDataCount()") == len(profile.alive())


def opened(one: Any, path: Path) -> tuple[list[str], list[str], float]:
    """As ``open_report``, with the page's processor time in seconds, which does not count what else runs on the machine."""
    browsers = one.context.new_cdp_session(one)
    browsers.send("Performance.setTimeDomain", {"timeDomain": "threadTicks"})
    browsers.send("Performance.enable")
    said, asked = open_report(one, path)
    figures = {figure["name"]: figure["value"] for figure in browsers.send("Performance.getMetrics")["metrics"]}
    assert figures["ThreadTime"] > 0
    return said, asked, figures["ThreadTime"]


def test_it_opens_fast(browser: Any) -> None:
    one = browser.new_page()
    assert opened(one, llama_page())[2] < SECONDS
    one.close()


@pytest.mark.slow
def test_32_layers_open_fast(browser: Any) -> None:
    path, one = large_page(), browser.new_page()
    said, asked, seconds = opened(one, path)
    assert seconds < SECONDS
    for key in "23456":
        one.keyboard.press(key)
    one.keyboard.press("2")
    one.click('[data-id="m:layers"]')
    one.click('[data-id="m:layers.0"]')
    assert one.locator('.item[data-id="m:layers.0.attention"]').count() == 1
    assert not said and asked == [path.as_uri()]
    one.close()


def test_a_plan_without_its_graph(browser: Any, tmp_path: Path) -> None:
    """A plan file that was written by hand or by an older fxshard: the page shows what there is."""
    plan = fxshard.ShardingPlan.from_json(re.sub(r'"(reads|results|modules)": \[\n.*?\n\],\n', "", by_hand(llama_plan()), flags=re.S))
    assert not plan.reads
    fxshard.save_report(plan, tmp_path / "report.html")
    one = browser.new_page()
    said, _ = open_report(one, tmp_path / "report.html")
    for key in "23456":
        one.keyboard.press(key)
    assert not said and "only the edges of redistributions" in one.text_content("#pane-graph")
    one.close()
