"""The live page in a real browser: it draws, follows the run, and can be read by everyone."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import write_run
from watch_fixtures import serving

from partita.storage.processes import this_process

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
LOOK = 10_000  # milliseconds; the page asks every two seconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
    os.environ.pop("NODE_OPTIONS", None)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test if it complains or an alert opens."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page, complaints = context.new_page(), []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.set_default_timeout(LOOK)
    yield page
    context.close()
    assert not complaints


@contextmanager
def watching(page: Any, root: Path) -> Iterator[Any]:
    """The server of a folder's live page. The page leaves before the server stops: it asks again every two seconds."""
    with serving(root) as server:
        yield server
        page.goto("about:blank")


def write_progress(folder: Path, **values: Any) -> None:
    told = {
        "state": "running", "phase": "training", "round": 9, "rounds": 16, "cohort": 5, "online": 10, "asked": 5,
        "replied": 3, "pace": 60.0, "started": time.time(), "updated": time.time() + 600, "process": this_process(),
        "clients": {"c0": "replied", "c1": "lost"}, "lost": {"c1": "away"},
    }  # fmt: skip
    (folder / "progress.json").write_text(json.dumps({**told, **values}))


def write_runs(root: Path) -> Path:
    """Two finished runs, one that goes on, and a broken one. Returns the one that goes on."""
    write_run(root, "fedavg", 0)
    write_run(root, "fedavg", 1)
    live = write_run(root, "fedprox", 1, rounds=9, finished=False)
    write_progress(live)
    (write_run(root, "broken", 0) / "rows.jsonl").write_text("no row\n")
    return live


def ink(page: Any, metric: str) -> int:
    """The number of pixels of a chart that are neither transparent nor gray."""
    script = """metric => { const canvas = document.querySelector(`[data-metric="${metric}"] canvas`);
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] && Math.max(...data.slice(i, i + 3)) - Math.min(...data.slice(i, i + 3)) > 40) count++;
        return count; }"""
    found: int = page.evaluate(script, metric)
    return found


def test_a_comparison_is_drawn_and_follows_its_runs(page: Any, tmp_path: Path) -> None:
    live = write_runs(tmp_path)
    with watching(page, tmp_path) as server:
        page.goto(server.opening_address)
        page.wait_for_selector(".uplot")
        assert page.locator(".chart").count() == 4
        assert page.locator("#rows tr").count() == 4
        assert ink(page, "test/accuracy") > 500
        assert "fedprox, seed 1" in page.inner_text("#rows")
        assert page.locator(".badge.unreadable").count() == 1
        row = page.locator("#rows tr", has_text="fedprox")
        assert "9 / 16" in row.inner_text()
        assert "7 min" in row.inner_text()  # seven rounds of a minute
        assert "2 / 4" in page.inner_text("#tiles")
        with (live / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"round": 9, "test": {"accuracy": 0.99}, "lost": {"c7": "went home"}}) + "\n")
        row.locator("text=10 / 16").wait_for()
        assert "99.0 %" in row.inner_text()
        assert "went home" in page.inner_text("#lost-list")
        assert "99.0 % in round 10" in page.get_attribute('[data-metric="test/accuracy"] .plot', "aria-label")
        (live / "result.json").write_text("{}")
        row.locator("text=finished").wait_for()
        assert "fedprox, seed 1: finished" in page.inner_text("#status")


def test_one_run_shows_its_round_its_plan_and_the_way_back(page: Any, tmp_path: Path) -> None:
    write_runs(tmp_path)
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        page.click("#rows a:has-text('fedprox')")
        page.wait_for_selector("#round:not([hidden])")
        assert "Round 10 of 16" in page.inner_text("#round")
        assert "3 of 5 replied, 1 lost" in page.inner_text("#round")
        assert "c1 was lost: away" in page.inner_text("#round")
        assert "query" in page.inner_text("#plan")
        assert page.is_hidden("#runs")
        page.click("text=All 4 runs")
        page.wait_for_selector("#runs:not([hidden])")


def test_toggles_choose_metrics_runs_and_the_scale(page: Any, tmp_path: Path) -> None:
    write_runs(tmp_path)
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        page.wait_for_selector(".uplot")
        whole = ink(page, "test/accuracy")
        page.click("#legend button:has-text('fedavg')")
        assert page.get_attribute("#legend button:has-text('fedavg')", "aria-pressed") == "false"
        assert 0 < ink(page, "test/accuracy") < whole
        page.click("#legend button:has-text('fedavg')")
        page.click("#metrics button:has-text('accuracy, test')")
        assert page.locator('[data-metric="test/accuracy"]').count() == 0
        page.click("#metrics button:has-text('learning rate')")
        assert page.locator('[data-metric="lr"] canvas').count() == 1
        page.check("#log")
        assert ink(page, "train_loss") > 100


def test_hover_and_arrow_keys_show_values(page: Any, tmp_path: Path) -> None:
    write_runs(tmp_path)
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        page.wait_for_selector(".uplot")
        chart = '[data-metric="test/accuracy"]'
        page.hover(f"{chart} .u-over")
        page.wait_for_selector(f"{chart} .tip:not([hidden])")
        assert "fedavg, seed 0" in page.inner_text(f"{chart} .tip")
        page.mouse.move(1, 1)
        page.focus(f"{chart} .plot")
        page.keyboard.press("ArrowRight")
        assert page.inner_text(f"{chart} .tip").startswith("round 1\n")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#status").startswith("round 2")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("selected", [False, True])
def test_it_fits_a_phone_and_axe_finds_no_serious_fault(page: Any, tmp_path: Path, scheme: str, selected: bool) -> None:
    from axe_playwright_python.sync_playwright import Axe

    live = write_runs(tmp_path)
    with (live / "rows.jsonl").open("a") as file:
        alarm = {"outlying update": "the update norm of " + "averylongname" * 20}
        file.write(json.dumps({"round": 9, "test": {"accuracy": 0.5}, "alarms": alarm}) + "\n")
    page.emulate_media(color_scheme=scheme)
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        page.wait_for_selector(".uplot")
        if selected:
            page.click("#rows a:has-text('fedprox')")
        for width in (1400, 400):
            page.set_viewport_size({"width": width, "height": 800})
            # charts are redrawn; a function, because the page's policy forbids evaluating a string
            page.wait_for_function("(width) => document.querySelector('.uplot').clientWidth <= width", arg=width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            found = Axe().run(page).response["violations"]
            serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
            assert not serious, json.dumps(serious, indent=1)[:3000]


def test_hostile_names_stay_text(page: Any, tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, HOSTILE, 0, finished=False,
        edit=lambda row: {**row, "lost": {HOSTILE: HOSTILE}, "alarms": {HOSTILE: HOSTILE}, "test": {HOSTILE: 0.5}},
    )  # fmt: skip
    write_progress(folder, clients={HOSTILE: HOSTILE}, lost={HOSTILE: HOSTILE}, phase=HOSTILE, present=[HOSTILE])
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        page.wait_for_selector(".uplot")
        assert HOSTILE in page.inner_text("#lost-list")
        assert HOSTILE in page.inner_text("#alarm-list")
        page.hover(".u-over >> nth=0")
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2


def test_an_empty_folder_fills_up(page: Any, tmp_path: Path) -> None:
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        page.wait_for_selector("#empty:not([hidden])")
        write_run(tmp_path, "fedavg", 0)
        page.wait_for_selector(".uplot")
        assert page.is_hidden("#empty")


def test_a_hundred_runs_are_drawn(page: Any, tmp_path: Path) -> None:
    for seed in range(100):
        write_run(tmp_path, "fedavg", seed)
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        page.wait_for_selector(".uplot")
        assert page.locator("#rows tr").count() == 100
        assert "100 / 100" in page.inner_text("#tiles")
