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
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
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


def report_of(page: Any) -> Any:
    """The report, with its charts drawn."""
    report = page.frame_locator("#report")
    report.locator(".uplot").first.wait_for()
    return report


def test_a_comparison_is_drawn_and_follows_its_runs(page: Any, tmp_path: Path) -> None:
    live = write_runs(tmp_path)
    with watching(page, tmp_path) as server:
        page.goto(server.opening_address)
        report = report_of(page)
        assert page.locator("#rows tr").count() == 4
        assert page.locator(".unreadable").count() == 1
        row = page.locator("#rows tr", has_text="fedprox, seed 1")
        assert "9 / 16" in row.inner_text()
        assert "7 min" in row.inner_text()  # seven rounds of a minute
        assert "training, 3 of 5 replied" in row.inner_text()
        assert "lost c1: away" in row.inner_text()
        report.locator("select").first.select_option(index=1)
        chosen = report.locator("select").first.input_value()
        with (live / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"round": 9, "test": {"accuracy": 0.99}, "lost": {"c7": "went home"}}) + "\n")
        row.locator("text=10 / 16").wait_for()
        assert "99.0 % in round 10" in row.inner_text()
        report.locator("text=went home").first.wait_for()
        report_of(page)
        assert report.locator("select").first.input_value() == chosen, "what the reader chose stays"
        (live / "result.json").write_text("{}")
        row.locator("text=finished").wait_for()
        assert "fedprox, seed 1: finished" in page.inner_text("#status")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_axe_finds_no_serious_fault(page: Any, tmp_path: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    live = write_runs(tmp_path)
    with (live / "rows.jsonl").open("a") as file:
        alarm = {"outlying update": "the update norm of " + "averylongname" * 20}
        file.write(json.dumps({"round": 9, "test": {"accuracy": 0.5}, "alarms": alarm}) + "\n")
    page.emulate_media(color_scheme=scheme)
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        report_of(page)
        for width in (1400, 400):
            page.set_viewport_size({"width": width, "height": 800})
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
        report = report_of(page)
        assert HOSTILE in page.inner_text("#rows")
        for each in (page, report):
            assert each.locator("img").count() == 0
        assert page.locator("script").count() == 1
        assert report.locator("script").count() == 2


def test_an_empty_folder_fills_up(page: Any, tmp_path: Path) -> None:
    with watching(page, tmp_path) as server:
        page.goto(server.address)
        page.wait_for_selector("#empty:not([hidden])")
        write_run(tmp_path, "fedavg", 0)
        report_of(page)
        assert page.is_hidden("#empty")
