"""The studies of this repository: their configs are valid, and the tables of their pages follow from their lines."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from playing.choice import Asked, plan, read_runs
from playing.study import Study, StudyError, edges, read_study
from playing.tables import matrix, summarize, tables, tried
from playing.work import configured

from partita.report.tables import paired_difference

STUDIES = Path(__file__).parents[2] / "studies"
FILES = [file for file in sorted(STUDIES.rglob("*.toml")) if "arms" in tomllib.loads(file.read_text())]


def parts(study: Study, on: str | None = None) -> list[str]:
    """Return the tables of a study, without the titles of its points, footnotes and the text below."""
    text = tables(study, read_runs(study, "run"), on=on)
    return [part for part in text.split("\n\n") if part.startswith("|")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_study_can_be_played(file: Path) -> None:
    study = read_study(file)
    tuned = read_runs(study, "tune")
    planned = plan(study, "tune", Asked(), tuned) if study.tuning else []
    with suppress(StudyError):  # if its tuning has not been played
        planned += plan(study, "run", Asked(seeds=study.seeds[:1]), tuned)
    assert planned
    for run in planned:
        configured(run)
    assert {line["arm"] for line in read_runs(study, "run")} <= set(study.arms)


@pytest.mark.parametrize("name", ["adamw/trec-options", "adamw/ohsumed-options", "language_models/methods"])
def test_tables_of_the_page_follow_from_the_lines(name: str) -> None:
    study = read_study(STUDIES / f"{name}.toml")
    page = (study.file.parent / "README.md").read_text()
    found = [*parts(study), *(parts(study, "test") if study.on == "personal" else [])]
    assert len(found) == 2
    for table in found:
        assert table in page


@pytest.mark.parametrize(
    "name", ["frozen/cifar100", "frozen/epochs20", "frozen/orders", "frozen/digits", "pretrained/ohsumed-recipe"]
)
def test_tables_of_frozen_kernels_follow_from_the_lines(name: str) -> None:
    study = read_study(STUDIES / f"{name}.toml")
    page = (study.file.parent / "README.md").read_text()
    found = parts(study)
    assert len(found) == len(study.points())
    assert all(table in page for table in found)


@pytest.mark.parametrize("name", ["cifar100", "epochs20", "orders"])
def test_spreads_of_the_page_are_compared_on_the_same_seeds(name: str) -> None:
    study = read_study(STUDIES / "frozen" / f"{name}.toml")
    page = (study.file.parent / "README.md").read_text()
    for point in study.points():
        spreads = {row.arm: row.spreads for row in summarize(study, read_runs(study, "run"), point)}
        never, frozen = spreads["never"], spreads["0.3"]
        seeds = sorted(never.keys() & frozen.keys())
        found = paired_difference([(never[seed], frozen[seed]) for seed in seeds])
        means = [100 * sum(own[seed] for seed in seeds) / len(seeds) for own in (never, frozen)]
        cells = [str(len(seeds)), *(f"{mean:.2f}" for mean in means)]
        cells += [f"{100 * found.mean:+.2f} [{100 * found.low:.2f}, {100 * found.high:.2f}]", f"{found.p:.2f}"]
        assert f"| {' | '.join(cells)} |" in page.replace("−", "-")


@pytest.mark.parametrize(
    "name", ["recipe/dinov2", "recipe/dinov2-central", "recipe/minilm", "frozen/cifar100", "pretrained/ohsumed-recipe"]
)
def test_settings_tried_on_the_page_follow_from_the_lines(name: str) -> None:
    study = read_study(STUDIES / f"{name}.toml")
    table = tried(study, read_runs(study, "tune")).partition("\n\n")[0]
    assert table.startswith("|")
    assert table in (study.file.parent / "README.md").read_text()


@pytest.mark.parametrize("name", ["digits-attacks", "trec-attacks"])
def test_matrices_of_the_page_follow_from_the_lines(name: str) -> None:
    study = read_study(STUDIES / "robust" / f"{name}.toml")
    table = matrix(study, read_runs(study, "run"))
    assert len(table.splitlines()) == 2 + 6
    assert table in (study.file.parent / "README.md").read_text()


def test_runs_of_language_models_have_the_rates_that_tuning_chose() -> None:
    study = read_study(STUDIES / "language_models" / "methods.toml")
    runs = {run.arm: run for run in plan(study, "run", Asked(), read_runs(study, "tune"))}
    for line in read_runs(study, "run"):
        assert line["chosen"] == dict(runs[line["arm"]].chosen)
    assert not any(edges(study.arms[arm], run.chosen) for arm, run in runs.items() if study.arms[arm].grid)
    assert dict(runs["fedadam"].chosen) == {"training.lr": 3e-3, "method.lr": 1e-2}
