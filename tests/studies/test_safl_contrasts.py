"""Differences and layers on the page of SAFL's controls: how they are computed, and that they follow from the lines."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest
from playing.choice import read_runs
from playing.lines import Line
from playing.study import read_study
from playing.tables import MISSING, layers, tables, tried
from study_fixtures import load_script

FOLDER = Path(__file__).parents[2] / "studies" / "safl2"


contrasts, choices = load_script("safl2/contrasts"), load_script("safl2/choices")
PAGE = (FOLDER / "README.md").read_text()
PROSE = " ".join(PAGE.split())


def read(name: str, kind: str = "run") -> list[Line]:
    return read_runs(read_study(FOLDER / f"{name}.toml"), kind)


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


def test_a_study_without_pairs_has_no_references() -> None:
    scores = {"safl 10": {0: 0.1, 1: 0.2}, "fedavg": {0: 0.2, 1: 0.3}}
    assert contrasts.with_references(scores) == scores


def test_choices_of_three_clients_in_two_rounds() -> None:
    # Six layers, so thirds are {0, 1}, {2, 3}, {4, 5}. Clients differ in the first round, and one changes a layer.
    first = {"a": frozenset({0, 1}), "b": frozenset({0, 1}), "c": frozenset({1, 2})}
    second = {"a": frozenset({0, 1}), "b": frozenset({0, 1}), "c": frozenset({0, 1})}
    found = choices.choices([[first, second]], 6)
    assert found.layer == pytest.approx(8 / 12)
    assert found.thirds == pytest.approx((11 / 12, 1 / 12, 0))
    assert (found.differ, found.shared) == pytest.approx((1 / 2, (2 + 1 + 1 + 2 + 2 + 2) / 6))
    assert (found.change, found.kept) == pytest.approx((1 / 3, 5 / 3))


def test_changes_are_not_counted_from_one_run_to_the_next() -> None:
    runs = [[{"a": frozenset({layer})}] * 2 for layer in (0, 5)]
    assert choices.choices([[*run, {**run[0], "b": frozenset({3})}] for run in runs], 6).change == 0


def test_page_follows_from_the_lines() -> None:
    study, lines = read_study(FOLDER / "pairs.toml"), read("pairs")
    scores, _ = contrasts.read_scores("pairs")
    assert len(contrasts.ranked(scores)) == 15
    assert tables(study, lines).partition("\n\n")[0] in PAGE
    assert contrasts.layer_means(scores) in PAGE
    assert "; ".join(contrasts.ranked(scores)) in PROSE
    assert "\n".join(layers(study, lines).splitlines()[:7]) in PAGE
    for arm, own in choices.by_arm(list(study.arms)[:7], lines, 6).items():
        assert (
            f"| `{arm}` | {100 * own.differ:.0f} | {100 * own.change:.0f} | {100 * fmean(scores[arm].values()):.1f} |"
            in PAGE
        )


@pytest.mark.parametrize("name", contrasts.CONTRASTS)
def test_differences_of_the_page_follow_from_the_lines(name: str) -> None:
    scores, metric = contrasts.read_scores(name)
    assert contrasts.contrasts(scores, contrasts.CONTRASTS[name], metric) in PAGE


@pytest.mark.parametrize("name", ["maccrobat", "ohsumed"])
def test_tables_of_language_models_follow_from_the_lines(name: str) -> None:
    study, lines, tuned = read_study(FOLDER / f"{name}.toml"), read(name), read(name, "tune")
    assert tables(study, lines).partition("\n\n")[0] in PAGE
    assert choices.table(choices.by_arm(study.arms, lines, 30)) in PAGE
    planned = len(study.arms) * 3
    assert f"{len(tuned)} of {planned} tuning runs, {len(lines)} of {planned} runs" in PAGE
    assert f"{planned - len(tuned)} tuning runs, {planned - len(lines)} runs" in PAGE
    for arm in dict.fromkeys(line["arm"] for line in tuned):
        own = {
            line["chosen"]["training.lr"]: line["validation"][study.score][-1] for line in tuned if line["arm"] == arm
        }
        texts = {rate: f"{100 * score:.1f}" for rate, score in own.items()}
        if len(own) == 3:
            best = max(own, key=lambda rate: own[rate])
            texts[best] = f"**{texts[best]}**"
        assert f"| `{arm}` | {' | '.join(texts.get(rate, MISSING) for rate in (3e-4, 1e-3, 3e-3))} |" in PAGE


def test_tables_with_stable_rates_follow_from_the_lines() -> None:
    study, lines = read_study(FOLDER / "maccrobat-rates.toml"), read("maccrobat-rates")
    assert tables(study, lines).partition("\n\n")[0] in PAGE
    assert choices.table(choices.by_arm(study.arms, lines, 30)) in PAGE
    assert tried(study, read("maccrobat-rates", "tune")).partition("\n\n")[0] in PAGE


def test_scores_by_round_until_all_arms_are_level_follow_from_the_lines() -> None:
    lines = read("centralized")
    assert {tuple(line["test"]["rounds"]) for line in lines} == {(3, 6, 9, 12, 15)}
    for arm in read_study(FOLDER / "centralized.toml").arms:
        columns = zip(*(line["test"]["accuracy"] for line in lines if line["arm"] == arm), strict=True)
        assert f"| `{arm}` | {' | '.join(f'{100 * fmean(column):.1f}' for column in columns)} |" in PAGE


def test_the_run_that_failed_is_described_as_in_its_line() -> None:
    lines = {(line["arm"], line["seed"]): line for line in read("maccrobat")}
    for arm in ("fedavg", "safl 10", "random, fixed", "random, common"):
        cells = [", ".join(f"{100 * value:.1f}" for value in lines[arm, seed]["test"]["f1"]) for seed in range(3)]
        assert f"| `{arm}` | {' | '.join(cells)} |" in PAGE
    failed, recovered = lines["random, fixed", 0], lines["random, common", 0]
    # No entity is found, and the share of right tags is one number for both rounds and for SAFL's third round.
    assert failed["test"]["recall"] == [0.0, 0.0]
    assert {*failed["test"]["accuracy"], lines["safl 10", 0]["test"]["accuracy"][0]} == {failed["test"]["accuracy"][0]}
    assert f"right for {100 * failed['test']['accuracy'][0]:.1f}% of them" in PROSE
    assert all(2.3 < loss < 2.75 for loss in failed["train_loss"][1:])
    # The same draw of layers in the first round, at another commit.
    assert failed["train_loss"][0] == recovered["train_loss"][0]
    assert failed["layers"][0] == recovered["layers"][0]
    assert failed["commit"] != recovered["commit"]


def test_layers_of_language_models_are_described_as_in_the_lines() -> None:
    verdicts = (FOLDER.parent / "README.md").read_text()
    for name in ("maccrobat", "ohsumed"):
        own = choices.by_arm(["safl 10"], read(name), 30)["safl 10"]
        assert (
            "middle and upper third: {:.0f}, {:.0f}, {:.0f}%".format(*(100 * third for third in own.thirds)) in verdicts
        )
    safl = [choices.rounds(line) for line in read("maccrobat") if line["arm"] == "safl 10"]
    first = choices.choices([[run[0], run[0]] for run in safl], 30)
    assert "it is {:.0f}, {:.0f} and {:.0f}%".format(*(100 * third for third in first.thirds)) in PROSE
    assert f"two of them share {first.shared:.1f} of ten" in PROSE
    sent = [len(frozenset().union(*row.values())) for run in safl for row in run]
    assert f"change {min(sent)} to {max(sent)} layers in a round" in PROSE
    runs = {(line["arm"], line["seed"]): choices.rounds(line) for line in read("ohsumed")}
    common = fmean(
        len(row[client] & other[client])
        for seed in range(3)
        for row, other in zip(runs["safl 10", seed], runs["safl 10, content", seed], strict=True)
        for client in row
    )
    assert f"{common:.1f} in common with what `content` chooses" in PROSE
