"""`partita split` shows what clients would hold, without a model."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from partita.cli.main import app
from partita.report import ReportError

CONFIG = """
rounds = 2
[method]
name = "fedavg"
[data]
name = "synthetic"
examples = 200
size = 4
[split]
name = "dirichlet"
clients = 4
alpha = 0.3
[model]
name = "pretrained"
path = "does-not-exist"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    return str(file)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["split", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_table_lists_clients_and_no_model_is_loaded(config: str) -> None:
    out = run("--config", config)
    assert all(f"\n c{place} " in out for place in range(4))
    assert "█" in out
    assert "4 of 4 clients with " in out
    assert "total variation distance" in out
    assert "does not cover" not in out


def test_json_has_counts_and_skew_as_the_table_has(config: str) -> None:
    found = json.loads(run("--config", config, "--json", "--set", "split.alpha=1000", "--set", "split.test=0"))
    assert found["population"] == len(found["clients"]) == 4
    for client in found["clients"]:
        assert sum(client["labels"]) == client["train"]
        assert client["distance"] < 0.25, "a split with a large alpha is nearly even"
    skewed = json.loads(run("--config", config, "--json", "--set", "split.alpha=0.05", "--set", "split.min_examples=1"))
    assert skewed["skew"]["mean_distance"] > found["skew"]["mean_distance"] + 0.2
    assert skewed["skew"]["mean_entropy"] < found["skew"]["mean_entropy"]


@pytest.mark.slow
def test_picture_is_written_as_svg_png_and_html(config: str, tmp_path: Path) -> None:
    for name in ("split.svg", "split.png", "new/split.html"):
        assert f"picture: {tmp_path / name}" in run("--config", config, "--out", str(tmp_path / name)).replace("\n", "")
    assert ElementTree.parse(tmp_path / "split.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    with Image.open(tmp_path / "split.png") as image:
        assert image.width > 500
    page = (tmp_path / "new" / "split.html").read_text()
    assert "What clients hold: dirichlet split of synthetic, seed 0" in page
    assert "<script" not in page


def test_other_file_names_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"--out is 'split\.gif'; its name must end in \.html, \.png or \.svg"):
        run("--config", str(tmp_path / "missing.toml"), "--out", "split.gif")


def test_private_config_is_told_that_counts_are_exact(config: str) -> None:
    assert "privacy guarantee does not cover" in run("--config", config, "--set", "privacy.noise=1.0")


def test_remote_data_has_no_split_here(config: str) -> None:
    with pytest.raises(ValueError, match="no client has training examples on this machine"):
        run("--config", config, "--set", "split={name='site', sites=['north', 'south']}")
