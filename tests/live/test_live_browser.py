"""In a real browser, the page follows a run without a reload and keeps what a reader has set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import chromium
from live.chromium import Chromium
from live.growing_run import GrowingRun
from live.test_live_page import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium"),
]
LAST_STEP = "Math.max(...document.querySelector('#figure-training .figure').data[0].x)"
HEIGHTS = "Array.from(document.querySelectorAll('.svg-container'), (one) => one.clientHeight)"
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"


@pytest.fixture
def browser(tmp_path) -> Iterator[Chromium]:
    opened = Chromium(tmp_path / "browser")
    yield opened
    opened.close()


def keep(browser: Chromium, name: str) -> None:
    """Keep a picture where SCREENSHOTS names a folder."""
    if folder := os.environ.get("SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}.png")


@pytest.mark.parametrize("width", [1400, 400])
def test_new_steps_appear_without_a_reload(browser, tmp_path, width):
    run = GrowingRun(tmp_path)
    run.train(12, held_out=True)
    browser.resize(width, 900)
    with served(run.run.path) as port:
        browser.send("Page.navigate", url=f"http://127.0.0.1:{port}/")
        browser.wait_for("document.querySelectorAll('#figure-training .js-plotly-plot').length > 3")
        browser.evaluate("window.same = true")
        assert browser.evaluate(OVERFLOW) <= 0
        keep(browser, f"live-{width}-before")
        # What a reader does: zoom in a curve, open the settings, scroll down.
        figure = "document.querySelector('#figure-training .figure')"
        browser.evaluate(f"Plotly.relayout({figure}, {{'yaxis.range': [4, 5]}}).then(() => 0)")
        browser.evaluate("document.querySelector('details').open = true")
        browser.evaluate("window.scrollTo(0, 300)")
        top = "Math.round(document.querySelector('.log').getBoundingClientRect().top)"
        before = browser.evaluate(top)
        assert browser.evaluate(LAST_STEP) == 12
        run.train(3, held_out=True)
        assert browser.wait_for(f"{LAST_STEP} === 15")
        assert browser.wait_for("document.querySelector('.log').textContent.includes('step 15/40')")
        assert "step 15 of 40" in browser.evaluate("document.title")
        # The second held-out loss brings a panel that was not there.
        assert browser.evaluate("document.querySelectorAll('#figure-held-out .main-svg').length")
        assert browser.evaluate(f"{figure}.layout.yaxis.range") == [4, 5]
        assert browser.evaluate("document.querySelector('details').open")
        assert abs(browser.evaluate(top) - before) <= 2
        assert browser.evaluate("window.scrollY") > 200
        assert browser.evaluate("window.same")
        assert browser.evaluate(OVERFLOW) <= 0
        keep(browser, f"live-{width}")
        browser.resize(700, 900)
        assert browser.wait_for(f"{figure}.querySelector('.svg-container').clientWidth < 660")
        assert browser.evaluate(f"{HEIGHTS}.every((height) => height > 200)")
        browser.resize(width, 900)
        run.end()
        assert browser.wait_for("document.title.startsWith('finished')")
        assert browser.complaints == []
    # The server has ended: the page says so and stays.
    assert browser.wait_for("!document.querySelector('.lost').hidden")
    assert browser.evaluate(LAST_STEP) == 15
    keep(browser, f"live-{width}-ended")


def test_a_page_opened_before_the_first_step_gets_its_curves(browser, tmp_path):
    run = GrowingRun(tmp_path)
    with served(run.run.path) as port:
        browser.send("Page.navigate", url=f"http://127.0.0.1:{port}/")
        browser.wait_for("document.querySelector('#news') && window.known !== ''")
        keep(browser, "live-not-begun")
        assert browser.evaluate("document.querySelectorAll('.figure').length") == 0
        run.train(2)
        assert browser.wait_for(
            "document.querySelectorAll('#figure-training .js-plotly-plot').length"
        )
        run.end()
        assert browser.complaints == []
