"""The differences on the page of SAFL's controls: how they are computed, and that they follow from the lines."""

from __future__ import annotations

import importlib.util
from itertools import combinations
from pathlib import Path

import pytest
from playing.choice import read_runs
from playing.study import read_study
from playing.tables import layers, summarize, tables

FOLDER = Path(__file__).parents[2] / "studies" / "safl2"
spec = importlib.util.spec_from_file_location("contrasts", FOLDER / "contrasts.py")
assert spec is not None
assert spec.loader is not None
contrasts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(contrasts)

# A score that is the sum of its layers' numbers, so that ranks and means are known. Seeds shift all pairs alike.
SUMS = {f"{a}, {b}": {0: (a + b) / 100, 1: (a + b + 2) / 100} for a, b in combinations((0, 1, 3), 2)}


def test_references_are_the_middle_pair_and_the_mean_by_seed() -> None:
    scores = {"safl": {0: 0.5, 1: 0.6, 2: 0.7}, **SUMS}
    assert contrasts.ranked(scores) == ["1, 3", "0, 3", "0, 1"]
    found = contrasts.with_references(scores)
    assert found["median pair"] == SUMS["0, 3"]
    assert found[contrasts.MEAN] == pytest.approx({0: 0.08 / 3, 1: 0.14 / 3})


def test_differences_are_paired_on_common_seeds() -> None:
    scores = {**SUMS, "safl": {0: 0.11, 1: 0.15, 9: 0.99}, "0, 1": {**SUMS["0, 1"], 7: 0.5}}
    row = contrasts.contrasts(scores, [("safl", "0, 1")], "accuracy").splitlines()[-1]
    # The gaps are 10 and 12 points; Student's t with one degree of freedom is 12.706.
    assert row == "| `safl` − `0, 1` | +11.0 [−1.7, 23.7] | 0.058 | 2 |"


def test_layer_means_are_over_the_pairs_with_the_layer() -> None:
    assert contrasts.layer_means(SUMS).splitlines()[-1] == "| mean, % | 3.0 | 3.5 | 4.5 |"


def test_page_follows_from_the_lines() -> None:
    study, page = read_study(contrasts.STUDY), (FOLDER / "README.md").read_text()
    lines = read_runs(study, "run")
    scores = {row.arm: row.means for row in summarize(study, lines, {})}
    assert len(contrasts.ranked(scores)) == 15
    assert tables(study, lines).partition("\n\n")[0] in page
    assert contrasts.contrasts(scores, contrasts.CONTRASTS, study.score) in page
    assert contrasts.layer_means(scores) in page
    assert "; ".join(contrasts.ranked(scores)) in page
    assert "\n".join(layers(study, lines).splitlines()[:7]) in page
