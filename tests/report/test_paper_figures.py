"""Figures for papers: SVG and PDF files."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_fixtures import write_run

from partita.report import ReportError, RunRecord, figures, load_run


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    root = tmp_path_factory.mktemp("runs")
    return [load_run(write_run(root, label, seed)) for label in ("fedavg", "fedfrozen") for seed in range(2)]


@pytest.mark.slow
def test_each_figure_is_written_as_svg_and_pdf_and_is_the_same_again(records: list[RunRecord], tmp_path: Path) -> None:
    once, again = figures(records, tmp_path / "a" / "deep"), figures(records, tmp_path / "b")
    names = [f"{name}.{kind}" for name in ("rounds", "bytes", "drift", "personal", "plan") for kind in ("svg", "pdf")]
    assert [path.name for path in once] == names
    for one, two in zip(once, again, strict=True):
        assert one.read_bytes() == two.read_bytes()
    for path in once:
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF-")
        else:
            drawing = ElementTree.parse(path).getroot()
            assert drawing.tag.endswith("svg")
            texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
            assert len(texts) > 5, "text stays text"


@pytest.mark.slow
def test_figures_show_the_named_metric(records: list[RunRecord], tmp_path: Path) -> None:
    figures(records, tmp_path, metric="loss")
    assert "test loss" in (tmp_path / "rounds.svg").read_text()
    assert "accuracy" not in (tmp_path / "rounds.svg").read_text()


def test_nothing_is_written_without_matplotlib(
    records: list[RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ReportError, match="figures need matplotlib"):
        figures(records, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
