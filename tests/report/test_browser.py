"""The report in a real browser: the system's Chromium, driven by playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import write_run

from partita.report import load_run, page

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
]

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
# The share of the canvas's pixels that are drawn, and how many different colors they have.
DRAWN = """canvas => {
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const pixels = new Uint32Array(data.buffer);
    return {share: pixels.filter(Boolean).length / pixels.length, colors: new Set(pixels).size};
}"""


def write_report(root: Path) -> Path:
    """A report with three labels, three seeds, local training, privacy, attacks, layers and hostile names."""

    def edit(row: dict[str, Any]) -> dict[str, Any]:
        own = row["personal"] and {"accuracy": {**row["personal"]["accuracy"], HOSTILE: 0.5}}
        chosen = {HOSTILE: ["layer.0"], "c1": ["layer.0", "layer.1"]}
        test = {**row["test"], "a_rather_long_name_of_a_metric": 0.5}
        spent = {"epsilon": 0.1 * (row["round"] + 1), "delta": 1e-5}
        return {**row, "personal": own, "chosen": chosen, "privacy": spent, "lost": {HOSTILE: HOSTILE}, "test": test}

    records = []
    for label in ("fedavg", HOSTILE.replace("/", "|"), "fedfrozen", "local-only"):
        for seed in range(3):
            folder = write_run(root, label, seed, edit=edit)
            held = {"name": HOSTILE, "train": 3, "validation": 0, "test": 1, "labels": [1, 2]}
            split = {"population": 1, "classes": [HOSTILE, "b"], "clients": [held]}
            (folder / "split.json").write_text(json.dumps(split))
            (folder / "privacy.json").write_text(json.dumps({"unit": HOSTILE, "sampling": "poisson", "noise": 1.0}))
            attack = {"auc": 0.5, "members": 3, "outsiders": 3, "false": [0.0, 0.1, 0.5, 1], "true": [0.0, 0.3, 0.8, 1]}
            (folder / "audit.json").write_text(json.dumps({"attacks": {HOSTILE: attack}}))
            config = folder / "config.toml"
            key = f"{json.dumps(HOSTILE)} = {json.dumps('a.value_of_a.setting_that.is_long_and.has_no_spaces' * 3)}"
            config.write_text(config.read_text().replace("alpha = 0.3", key).replace("|script", "/script"))
            records.append(load_run(folder))
    return page(records, root / "report.html", title=HOSTILE)


class Opened:
    """Opens the report in the browser and collects what goes wrong there."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser, self.path = browser, path
        self.faults: list[str] = []

    def __call__(self, width: int = 1280, scheme: str = "light", script: bool = True) -> Any:
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script
        )
        tab = context.new_page()
        tab.on("console", lambda message: self.faults.append(message.text))
        tab.on("pageerror", lambda error: self.faults.append(str(error)))
        tab.on("dialog", lambda dialog: (self.faults.append("a dialog opened"), dialog.dismiss()))
        tab.on("request", lambda request: request.url.startswith("file:") or self.faults.append(request.url))
        tab.goto(self.path.as_uri())
        return tab


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report"))


@pytest.fixture
def open_report(browser: Any, report_path: Path) -> Iterator[Callable[..., Any]]:
    opened = Opened(browser, report_path)
    yield opened
    for context in browser.contexts:
        context.close()
    assert opened.faults == [], "nothing on the console, no dialog, nothing loaded"


def drawn(tab: Any, name: str) -> dict[str, float]:
    return tab.locator(f"[data-chart={name}] canvas").evaluate(DRAWN)


def pixels(tab: Any, name: str) -> str:
    return tab.locator(f"[data-chart={name}] canvas").evaluate("canvas => canvas.toDataURL()")


def test_every_chart_is_drawn_and_hostile_names_stay_text(open_report: Callable[..., Any]) -> None:
    tab = open_report()
    names = tab.locator("[data-chart]").evaluate_all("hosts => hosts.map(host => host.dataset.chart)")
    assert names == ["curves", "drift", "personal", "epsilon", "attacks"]
    for name in names:
        found = drawn(tab, name)
        assert found["share"] > 0.01, name
        assert found["colors"] > 10, name
    assert tab.locator("script").count() == 2
    assert tab.locator("img").count() == 0
    assert tab.title() == HOSTILE
    assert HOSTILE in tab.locator("[data-chart=curves] .legend").inner_text()


def test_legend_metric_axis_and_log_scale_change_the_chart(open_report: Callable[..., Any]) -> None:
    tab = open_report()
    chart = tab.locator("[data-chart=curves]")
    before = pixels(tab, "curves")
    button = chart.locator(".legend button").first
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert pixels(tab, "curves") != before
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert pixels(tab, "curves") == before
    chart.locator("[data-log=y] input").check()
    assert pixels(tab, "curves") != before
    chart.locator("[data-log=y] input").uncheck()
    views = chart.locator("[data-choose=view] option").all_inner_texts()
    assert views[:3] == ["test accuracy", "test loss", "test a_rather_long_name_of_a_metric"]
    assert views[-2:] == ["personal accuracy", "train loss"]
    axes = chart.locator("[data-choose=axis] option").all_inner_texts()
    assert axes == ["rounds", "bytes", "seconds"]
    for choice, count in (("view", len(views)), ("axis", len(axes))):
        seen = set()
        for place in range(count):
            chart.locator(f"[data-choose={choice}]").select_option(str(place))
            seen.add(pixels(tab, "curves"))
        assert len(seen) == count, choice
        chart.locator(f"[data-choose={choice}]").select_option("0")
    assert pixels(tab, "curves") == before


def test_pointer_and_arrow_keys_show_values(open_report: Callable[..., Any]) -> None:
    tab = open_report()
    tip = tab.locator("[data-chart=curves] .tip")
    assert tip.is_hidden()
    over = tab.locator("[data-chart=curves] .u-over")
    box = over.bounding_box()
    over.hover(position={"x": box["width"] - 1, "y": box["height"] / 2})
    text = tip.inner_text()
    assert text.startswith("round 16")
    content = json.loads(tab.locator("#data").text_content())
    line = content["charts"]["curves"]["views"][0]["lines"][0]
    assert f"{line['y'][-1]:.2f}".rstrip("0") in text, "the last mean of fedavg"
    assert HOSTILE in text
    tab.mouse.move(0, 0)
    assert tip.is_hidden()
    tab.locator("[data-chart=curves] .plot").focus()
    tab.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("round 1\n")
    tab.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("round 2\n")
    tab.keyboard.press("Escape")
    assert tip.is_hidden()
    tab.locator("[data-chart=personal] .u-over").hover(position={"x": 30, "y": 60})
    text = tab.locator("[data-chart=personal] .tip").inner_text()
    assert text.startswith(HOSTILE), "the name of the first client"
    assert "fedfrozen" in text


def test_tables_sort_by_click_and_keyboard(open_report: Callable[..., Any]) -> None:
    tab = open_report()
    table = tab.locator("#figures table").last
    heading = table.locator("th[scope=col]").nth(1)

    def values() -> list[float]:
        texts = table.locator("tbody tr td:nth-child(2)").all_inner_texts()
        return [float(text.split(" ")[0]) for text in texts]

    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert values() == sorted(values())
    heading.locator("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert values() == sorted(values(), reverse=True)
    name = table.locator("th[scope=col]").first
    name.locator("button").click()
    assert heading.get_attribute("aria-sort") is None
    names = table.locator("tbody th").all_inner_texts()
    assert [each for each in names if each.startswith("c")] == [f"c{number}" for number in range(10)]


def test_sizes_sort_by_bytes_and_missing_values_are_last(open_report: Callable[..., Any]) -> None:
    tab = open_report()
    order = tab.evaluate(
        """() => {
        const cells = ["2 kB", "–", "1 500 B", "1 MB", "not reached", "12 B", "−3", "<0.001"];
        const table = document.querySelector("#comparison table");
        const column = 1;
        const row = table.tBodies[0].rows[0];
        table.tBodies[0].replaceChildren(...cells.map(text => {
            const copy = row.cloneNode(true);
            copy.cells[column].textContent = text;
            return copy;
        }));
        table.tHead.rows[table.tHead.rows.length - 1].cells[column].querySelector("button").click();
        return [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
    }"""
    )
    assert order == ["−3", "<0.001", "12 B", "1 500 B", "2 kB", "1 MB", "not reached", "–"]


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_scrolls_sideways_but_tables_in_their_box(width: int, open_report: Callable[..., Any]) -> None:
    tab = open_report(width)
    tab.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    boxes = tab.locator(".wide").evaluate_all(
        "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).map(box => box.tabIndex)"
    )
    assert set(boxes) <= {0}, "a box that scrolls takes the keyboard's focus"
    assert boxes or width > 400
    assert tab.locator("[data-chart=curves] canvas").bounding_box()["width"] <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(scheme: str, open_report: Callable[..., Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    tab = open_report(1000, scheme)
    tab.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    found = axe.Axe().run(tab).response["violations"]
    serious = [
        (fault["id"], [node["html"][:200] for node in fault["nodes"][:3]])
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_switch_changes_the_colors_and_is_not_stored(open_report: Callable[..., Any]) -> None:
    tab = open_report()
    paper = "getComputedStyle(document.body).backgroundColor"
    light, before = tab.evaluate(paper), pixels(tab, "curves")
    tab.get_by_role("button", name="Switch to dark colors").click()
    assert tab.evaluate(paper) != light
    assert pixels(tab, "curves") != before
    assert tab.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    tab.reload()
    assert tab.evaluate(paper) == light


def test_page_without_script_shows_tables_and_says_what_is_missing(open_report: Callable[..., Any]) -> None:
    tab = open_report(script=False)
    assert tab.get_by_text("which does not run here").is_visible()
    assert open_report().get_by_text("which does not run here").count() == 0
    assert tab.locator("#comparison table").first.is_visible()
    assert tab.locator("#chart-curves details table tbody tr").count() == 12


def test_policy_blocks_a_script_that_is_not_the_pages_own(open_report: Callable[..., Any]) -> None:
    tab = open_report()
    tab.evaluate(
        """() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
    }"""
    )
    assert tab.evaluate("window.ran") is None
    assert "Content Security Policy" in open_report.faults.pop()  # type: ignore[attr-defined]


def test_client_is_chosen_by_list_and_by_address(open_report: Callable[..., Any]) -> None:
    tab = open_report()
    heading = tab.locator("#client-page h3")
    tab.select_option("#client-choice", label="c3")
    assert heading.text_content() == "Client c3"
    assert tab.url.endswith("#client-c3")
    assert tab.locator("#client-page svg.client-curve path").count() == 4, "a curve for each label"
    tab.select_option("#client-choice", label=HOSTILE)
    assert heading.text_content() == f"Client {HOSTILE}"
    tab.evaluate("location.hash = '#client-c5'")
    playwright.expect(heading).to_have_text("Client c5")
