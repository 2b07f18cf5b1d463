"""The studies of this repository: their configs are valid, and the tables of their pages follow from their lines."""

from __future__ import annotations

import json
import tomllib
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import pytest
from playing.choice import Asked, plan, read_runs
from playing.study import Study, StudyError, edges, read_study
from playing.tables import matrix, summarize, tables, tried
from playing.work import configured
from scipy.stats import ttest_ind
from study_fixtures import load_script

from partita.report.comparison import Difference
from partita.report.tables import paired_difference

STUDIES = Path(__file__).parents[2] / "studies"
FILES = [file for file in sorted(STUDIES.rglob("*.toml")) if "arms" in tomllib.loads(file.read_text())]

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")


def parts(study: Study, on: str | None = None) -> list[str]:
    """Return the tables of a study, without the titles of its points, footnotes and the text below."""
    text = tables(study, read_runs(study, "run"), on=on)
    return [part for part in text.split("\n\n") if part.startswith("|")]


def gap_text(gap: Difference) -> str:
    """Return a difference in points with its interval, with plain minus signs."""
    return f"{100 * gap.mean:+.1f} [{100 * gap.low:.1f}, {100 * gap.high:.1f}]"


@pytest.mark.fast_cases(1)
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
    "name",
    [
        "adamw/trec-lengths",
        "adamw/ohsumed-lengths",
        "frozen/cifar100",
        "frozen/cifar100-long",
        "frozen/cohorts",
        "frozen/cohorts12",
        "frozen/epochs1",
        "frozen/epochs20",
        "frozen/mild",
        "frozen/orders",
        "frozen/tinyimagenet",
        "frozen/scope",
        "frozen/falling",
        "frozen/ohsumed",
        "frozen/baselines",
        "frozen/ranges",
        "frozen/clip",
        "frozen/digits",
        "frozen/digits-seeds",
        "frozen/digits-scope",
        "frozen/digits-value",
        "frozen/digits-decay",
        "frozen/digits-baselines",
        "pretrained/ohsumed-recipe",
        "private/settings",
        "prompts/clip/office-clients",
        "recipe/dinov2",
        "recipe/minilm",
        "safl2/centralized",
    ],
)
def test_tables_of_points_follow_from_the_lines(name: str) -> None:
    study = read_study(STUDIES / f"{name}.toml")
    page = (study.file.parent / "README.md").read_text()
    found = parts(study)
    assert len(found) == len(study.points())
    assert all(table in page for table in found)


def test_tables_of_prompts_on_clip_follow_from_the_lines() -> None:
    folder = STUDIES / "prompts" / "clip"
    page = (folder / "README.md").read_text()
    studies = {name: read_study(folder / f"{name}.toml") for name in ("office-parts", "pacs-parts", "cifar100-methods")}
    studies["cifar100-methods"] = studies["cifar100-methods"].compared_to("pfeddc")
    for study in studies.values():
        [table] = parts(study)
        assert table in page, study.name
    shots = read_study(folder / "office-shots.toml")
    assert matrix(shots, read_runs(shots, "run")) in page
    for point, shown in zip(shots.points(), zip(*shot_gaps(page), strict=True), strict=True):
        arms = {row.arm: row.means for row in summarize(shots, read_runs(shots, "run"), point)}
        own = arms.pop("pfeddc")
        gaps = [paired_difference([(other[seed], own[seed]) for seed in shots.seeds]) for other in arms.values()]
        texts = [gap_text(gap) for gap in gaps]
        assert list(shown) == texts


def test_clients_that_join_later_follow_from_the_lines() -> None:
    study = read_study(STUDIES / "prompts" / "clip" / "office-joining.toml")
    page = (study.file.parent / "README.md").read_text()
    found = parts(study, "unseen")
    assert len(found) == len(study.points()) == 3
    assert all(table in page for table in found)


def test_prompts_with_more_clients_and_rounds_follow_from_the_lines() -> None:
    clients = load_script("prompts/clip/clients")
    page = (STUDIES / "prompts" / "clip" / "README.md").read_text()
    assert clients.by_round() in page
    assert clients.by_clients() in page
    assert clients.failed("pfeddc", "48") == (10, 240)
    assert clients.failed("promptfl", "48") == (1, 240)


def shot_gaps(page: str) -> list[list[str]]:
    """Return the cells of the table of pFedDC's differences by number of images, one list for each arm."""
    table = page.partition("| pFedDC less |")[2].partition("\n\n")[0].replace("−", "-")
    return [line.strip("| ").split(" | ")[1:] for line in table.splitlines()[2:]]


@pytest.mark.slow
def test_scores_and_differences_of_all_methods_follow_from_the_lines() -> None:
    study = read_study(STUDIES / "baselines" / "methods.toml")
    page, runs = (study.file.parent / "README.md").read_text(), read_runs(study, "run")

    def cells(on: str, baseline: str = study.baseline) -> dict[str, list[str]]:
        [text] = [part for part in tables(study.compared_to(baseline), runs, on=on).split("\n\n") if part[0] == "|"]
        rows = [row.strip("| ").split(" | ") for row in text.splitlines()[2:]]
        return {row[0].split("`")[1]: row for row in rows}

    for (arm, test), own in zip(cells("test").items(), cells("personal").values(), strict=True):
        named, score, worst, difference, _, corrected, bytes_sent, _, chosen = test
        row = [named, score, difference, corrected, own[1], worst, own[3], bytes_sent, chosen]
        assert f"| {' | '.join(row)} |" in page, arm
    compared = [("scaffold by examples", "scaffold", "test"), ("feddyn by examples", "feddyn", "test")]
    compared += [(arm, "fedavg, fine-tuned", "personal") for arm in ("fedrep", "fedper", "fedbabu", "local-only")]
    for arm, baseline, on in compared:
        _, _, _, difference, p, *_ = cells(on, baseline)[arm]
        where = "central test" if on == "test" else "own tests"
        assert f"| `{arm}` − `{baseline}`, {where} | {difference} | {p} |" in page


def test_a_late_freeze_is_compared_with_a_falling_rate() -> None:
    study = read_study(STUDIES / "frozen" / "digits-decay.toml")
    page = (study.file.parent / "README.md").read_text().replace("−", "-")
    for frozen, falling, joint in (
        ("0.8, value", "never, a tenth of the rate", ", "),
        ("0.8, value, cosine", "never, cosine", "; orders "),
    ):
        found = []
        for point in study.points():
            own = {row.arm: row.means for row in summarize(study, read_runs(study, "run"), point)}
            found.append(gap_text(paired_difference([(own[falling][seed], own[frozen][seed]) for seed in study.seeds])))
        assert joint.join(found) in page


def test_the_late_freeze_on_photographs_is_compared_with_a_falling_rate() -> None:
    study = read_study(STUDIES / "frozen" / "scope.toml")
    page, runs = (study.file.parent / "README.md").read_text().replace("−", "-"), read_runs(study, "run")
    [point] = study.points()
    own = {row.arm: row.means for row in summarize(study, runs, point)}
    falling = [(own["never, a tenth of the rate"][seed], own["0.8, value"][seed]) for seed in study.seeds]
    assert f"`0.8, value` less it: {gap_text(paired_difference(falling))}" in page
    assert own["auto"] == own["never"]

    def at(arm: str, round: int) -> float:
        return 100 * fmean(line["test"]["accuracy"][round - 1] for line in runs if line["arm"] == arm)

    assert {tuple(line["test"]["rounds"]) for line in runs} == {tuple(range(1, 51))}
    value, falls, never = (at(arm, 50) for arm in ("0.8, value", "never, a tenth of the rate", "never"))
    assert f"from {at('never', 40):.1f} in round 40 to {value:.1f} in round 50" in page
    assert f"or {falls:.1f} (a tenth of the rate), and to {never:.1f} without either" in page
    early = [at("0.3, value", round) - at("never", round) for round in (18, 50)]
    assert f"{early[0]:.1f} points above `never`, in round 50 it is {-early[1]:.1f} below" in page


def test_spreads_of_scopes_follow_from_the_lines() -> None:
    study = read_study(STUDIES / "frozen" / "digits-scope.toml")
    page = (study.file.parent / "README.md").read_text().replace("−", "-")
    for arm in ("0.5, value", "0.8, value"):
        found = []
        for point in study.points():
            own = {row.arm: row.spreads for row in summarize(study, read_runs(study, "run"), point)}
            gap = paired_difference([(own["never"][seed], own[arm][seed]) for seed in study.seeds])
            found.append(f"{100 * gap.mean:+.2f} [{100 * gap.low:.2f}, {100 * gap.high:.2f}]")
        assert ", ".join(found) in page


@pytest.mark.parametrize("name", ["cifar100", "epochs20", "orders", "digits"])
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


def test_contrasts_of_digits_follow_from_the_lines() -> None:
    study = read_study(STUDIES / "frozen" / "digits.toml")
    page = " ".join((study.file.parent / "README.md").read_text().replace("−", "-").split())
    runs = read_runs(study, "run")
    points = [{row.arm: row.means for row in summarize(study, runs, point)} for point in study.points()]
    three, ten = points[0], points[-1]

    def text(pairs: list[tuple[float, float]]) -> str:
        return gap_text(paired_difference(pairs))

    for shorter in ("0.1", "0.3"):
        assert all(text([(arms[shorter][seed], arms["0.5"][seed]) for seed in study.seeds]) in page for arms in points)
    for arm in ("0.3", "0.5"):
        gaps = [[arms[arm][seed] - arms["never"][seed] for seed in study.seeds] for arms in (ten, three)]
        assert f"three less ten{', 0.5' if arm == '0.5' else ''}: {text(list(zip(*gaps, strict=True)))}" in page
    assert all(arms["auto"] == arms["never"] for arms in points)


@pytest.mark.parametrize(("name", "count"), [("digits-seeds", 5), ("digits-value", 3), ("cifar100-long", 5)])
def test_contrasts_of_frozen_kernels_follow_from_the_lines(name: str, count: int) -> None:
    contrasts = load_script("frozen/contrasts")
    page = (STUDIES / "frozen" / "README.md").read_text()
    found = contrasts.page_tables(*contrasts.read(name))
    assert len(found) == count
    assert all(table in page for table in found)


def test_clients_by_epochs_follow_from_the_lines() -> None:
    grid = load_script("frozen/grid")
    page = (STUDIES / "frozen" / "README.md").read_text()
    tables = [*grid.grid_tables(), *grid.steps_tables()]
    assert len(tables) == 7
    assert all(table in page for table in tables)


@pytest.mark.slow
def test_the_map_of_freezing_follows_from_the_lines() -> None:
    regimes = load_script("frozen/regimes")
    page = (STUDIES / "frozen" / "README.md").read_text()
    assert regimes.overview() in page
    assert regimes.all_digits() in page
    assert regimes.between() in page
    known = [each for setting in regimes.SETTINGS for each in regimes.differences(setting) if each is not None]
    lost = [each for setting in regimes.SETTINGS if (each := regimes.differences(setting)[1]) and each.high < 0]
    assert not any(each.low > 0 for each in known)
    assert f"{len(regimes.SETTINGS)} settings with a warm-up of 0.3, {NUMBERS[len(lost)]} lose" in page
    assert f"No interval of {len(known)} is above zero" in page


def test_the_private_head_is_compared_with_the_best_of_the_first_round() -> None:
    study = read_study(STUDIES / "private" / "heads.toml")
    page = (study.file.parent / "README.md").read_text()
    runs = read_runs(study, "run")
    first = [json.loads(line) for line in (STUDIES / "safl" / "private.jsonl").read_text().splitlines()]
    titles = {"all layers": "FedAvg", "two layers (SAFL)": "SAFL", "head": "head"}
    best, differences = [], []
    for point in study.points():
        head = list(next(row for row in summarize(study, runs, point) if row.arm == "head").means.values())
        rows: dict[str, list[float]] = {title: [] for title in titles.values()}
        for line in first:
            if line["epsilon"] == point["privacy.epsilon"]:
                rows[titles[line["trains"]]].append(line["accuracy"])
        best.append(max(rows, key=lambda title: fmean(rows[title])))
        assert len(head) == len(rows[best[-1]]) == 5
        assert min(head) > max(max(row) for row in rows.values())
        interval = ttest_ind(head, rows[best[-1]], equal_var=False).confidence_interval(0.95)
        mean = fmean(head) - fmean(rows[best[-1]])
        differences.append(f"{100 * mean:+.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]")
    scores, warm = (row.partition("` |")[2] for row in matrix(study, runs).splitlines()[2:4])
    assert f"| linear head, after the warm start |{warm}\n" in page
    gaps = [summarize(study, runs, point)[1].difference for point in study.points()]
    texts = [gap_text(gap) for gap in gaps]
    assert f"| less the head without it | {' | '.join(texts)} |" in page.replace("−", "-")
    assert f"| linear head on the mean, 8,855 numbers |{scores}\n" in page
    assert f"| best of the first round | {' | '.join(best)} |" in page
    assert f"| linear head less that | {' | '.join(differences)} |" in page


def test_private_layers_are_compared_with_fedavg_by_epsilon() -> None:
    study = read_study(STUDIES / "private" / "layers.toml")
    page, runs = (study.file.parent / "README.md").read_text().replace("−", "-"), read_runs(study, "run")
    assert matrix(study, runs) in page
    by_arm: dict[str, list[str]] = {}
    for point in study.points():
        for row in summarize(study, runs, point):
            if (gap := row.difference) is not None:
                text = gap_text(gap)
                by_arm.setdefault(row.arm, []).append(text)
    assert len(by_arm) == len(study.arms) - 1
    for arm, texts in by_arm.items():
        assert f"| `{arm}` | {' | '.join(texts)} |" in page


@pytest.mark.parametrize(
    "name",
    [
        "recipe/dinov2",
        "recipe/dinov2-central",
        "recipe/minilm",
        "recipe/minilm-central",
        "recipe/clip",
        "recipe/smollm2",
        "frozen/cifar100",
        "frozen/epochs1",
        "frozen/tinyimagenet",
        "frozen/baselines",
        "frozen/ranges",
        "frozen/clip",
        "frozen/ohsumed",
        "pretrained/ohsumed-recipe",
        "private/layers",
        "safl2/centralized",
    ],
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
    assert not any(edges(study, study.arms[arm], run.chosen) for arm, run in runs.items() if study.arms[arm].grid)
    assert dict(runs["fedadam"].chosen) == {"training.lr": 3e-3, "method.lr": 1e-2}
