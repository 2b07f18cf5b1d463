"""Reading studies, planning their runs, choosing settings, and the files of lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from play import _arm_names
from playing.choice import Asked, choose, left_to_play, plan
from playing.lines import LinesError, append_line, only_writer, read_lines
from playing.study import Study, StudyError, read_study
from playing.work import configured, recorded
from study_fixtures import CONFIG, STUDY, write_study

TUNED = """
config = "tiny.toml"
score = "accuracy"
seeds = [0, 1]
baseline = "fedavg"
[tune]
seed = 100
last = 2
[tune.grid]
"training.lr" = [1e-4, 1e-3, 1e-2]
[axes]
"split.alpha" = [0.1, 1.0]
[arms.fedavg]
"method.name" = "fedavg"
[arms.same]
"method.name" = "fedprox"
tuned_as = "fedavg"
[arms.more]
"method.name" = "fedadam"
tuned_as = "fedavg"
grid = {"method.lr" = [0.01, 0.1, 1.0]}
[arms.nothing]
grid = {}
"""


def tuned_lines(
    study: Study, scores: dict[str, list[float | None]], arms: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Return a line for each run of the tuning, with the scores of the last value that it tries."""
    lines: list[dict[str, Any]] = []
    for _ in range(2):  # the second time for arms that build on others
        lines = [
            {
                **run.identity,
                "digest": run.digest,
                "validation": {"rounds": [1, 2, 3], "accuracy": scores[str(list(run.chosen.values())[-1])]},
            }
            for run in plan(study, "tune", Asked(arms=arms), lines)
        ]
    return lines


SCORES: dict[str, list[float | None]] = {
    "0.0001": [0.9, 0.2, 0.2],  # best only in a round that does not count
    "0.001": [0.0, 0.5, 0.7],
    "0.01": [0.0, 0.4, None],
    "0.1": [0.0, 0.1, 0.1],
    "1.0": [0.0, 0.8, 0.8],
}


def test_a_study_is_crossed_with_its_axes_seed_by_seed(tmp_path: Path) -> None:
    file = write_study(tmp_path, STUDY + '[axes]\nsplit.alpha = [0.1, 1.0]\n"training.epochs" = [1, 2]\n')
    planned = plan(read_study(file), "run", Asked(), [])
    assert len(planned) == 3 * 2 * 2 * 3
    assert [run.seed for run in planned] == sorted(run.seed for run in planned)
    last = planned[-1]
    assert (last.arm, last.point) == ("fedprox 0.1", {"split.alpha": 1.0, "training.epochs": 2})
    assert last.raw["method"] == {"name": "fedprox", "mu": 0.1}
    assert (last.raw["split"]["alpha"], last.raw["training"]["epochs"], last.raw["seed"]) == (1.0, 2, 2)
    assert len({run.key for run in planned}) == len(planned)


def test_a_method_is_replaced_and_keys_can_be_removed(tmp_path: Path) -> None:
    config = CONFIG.replace('name = "fedavg"', 'name = "fedprox"\nmu = 0.5')
    study = STUDY + '[arms.other]\n"method.name" = "fedavg"\nremove = ["training.lr"]\n'
    by_arm = {run.arm: run for run in plan(read_study(write_study(tmp_path, study, config)), "run", Asked(), [])}
    assert by_arm["other"].raw["method"] == {"name": "fedavg"}
    assert "lr" not in by_arm["other"].raw["training"]
    assert by_arm["broken"].raw["method"] == {"name": "fedprox", "mu": 0.5}


def test_an_axis_may_name_its_points(tmp_path: Path) -> None:
    axis = '[axes.attack]\nnone = {}\n"a tenth" = {"federation.attackers" = 0.1, "split.alpha" = 1.0}\n'
    planned = plan(read_study(write_study(tmp_path, STUDY + axis)), "run", Asked(arms=["fedavg"], seeds=[1]), [])
    assert [run.point for run in planned] == [{"attack": "none"}, {"attack": "a tenth"}]
    assert planned[1].raw["federation"]["attackers"] == 0.1
    assert "federation" not in planned[0].raw


def test_overrides_of_places_do_not_change_the_digest(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path))

    def digest(*overrides: str) -> str:
        return plan(study, "run", Asked(overrides, ["fedavg"], [0]), [])[0].digest

    assert digest() == digest("data.path=elsewhere", "model.path=there", "engine.device=cuda")
    assert digest() != digest("training.lr=0.5")


def test_an_arm_keeps_the_place_that_it_names(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, STUDY.replace('"model.patch" = 3', '"model.path" = "own"')))
    [fedavg, own, _] = plan(study, "run", Asked(("model.path=there",), [], [0]), [])
    assert (fedavg.raw["model"]["path"], own.raw["model"]["path"]) == ("there", "own")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('baseline = "fedavg"', 'baseline = "fedsgd"', "baseline is 'fedsgd', which is not an arm"),
        ("seeds = [0, 1, 2]", "seeds = [0, 0]", "it must list different whole numbers"),
        ('score = "accuracy"', "", "score is missing"),
        ("last = 2", "least = 2", "unknown key 'least'"),
        ("last = 2", 'on = "train"', "must be 'test' or 'personal'"),
        ("last = 2", "last = 0", "at least 1"),
        ('"tiny.toml"', '"huge.toml"', "which is not a file"),
        ("[arms.broken]", "[tune]\nseed = 1\n[arms.broken]", "which is a seed of the study"),
        ("[arms.broken]", '[arms.broken]\ntuned_as = "fedavg"', "there is no table"),
        ("[arms.broken]", "[tune]\nseed = 9\nat = {x = 1}\n[arms.broken]", "which is no point of"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    with pytest.raises(StudyError, match=reason):
        read_study(write_study(tmp_path, STUDY.replace(old, new)))


def test_unequal_budgets_are_refused_unless_allowed(tmp_path: Path) -> None:
    unequal = TUNED.replace("[0.01, 0.1, 1.0]", "[0.01, 0.1]")
    with pytest.raises(StudyError, match=r"fedavg 3, more 2.*unequal_budgets = true"):
        read_study(write_study(tmp_path, unequal))
    read_study(write_study(tmp_path, unequal.replace("seed = 100", "seed = 100\nunequal_budgets = true")))


def test_an_arm_that_builds_on_another_is_tuned_after_it(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, TUNED))
    first = plan(study, "tune", Asked(), [])
    assert [(run.arm, run.chosen) for run in first] == [("fedavg", {"training.lr": r}) for r in (1e-4, 1e-3, 1e-2)]
    lines = tuned_lines(study, SCORES)
    more = [dict(run.chosen) for run in plan(study, "tune", Asked(), lines) if run.arm == "more"]
    assert more == [{"training.lr": 0.001, "method.lr": rate} for rate in (0.01, 0.1, 1.0)]
    assert {run.point["split.alpha"] for run in first} == {0.1}, "one choice for all points, made at the first"


def test_run_takes_what_tuning_chose_and_marks_the_edge(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, TUNED))
    lines = tuned_lines(study, SCORES)
    runs = {run.arm: run for run in plan(study, "run", Asked(seeds=[1]), lines)}
    assert dict(runs["fedavg"].chosen) == dict(runs["same"].chosen) == {"training.lr": 0.001}
    assert dict(runs["more"].chosen) == {"training.lr": 0.001, "method.lr": 1.0}
    assert dict(runs["nothing"].chosen) == {}
    assert [runs[arm].edge for arm in ("fedavg", "same", "more", "nothing")] == [(), (), ("method.lr",), ()]
    assert runs["more"].raw["method"] == {"name": "fedadam", "lr": 1.0}
    low = {**SCORES, "0.001": [0.0, 0.0, 0.0]}
    [edge] = {run.edge for run in plan(study, "run", Asked(arms=["same"]), tuned_lines(study, low, ("fedavg",)))}
    assert edge == ("training.lr",)


def test_a_metric_of_which_less_is_better_is_minimized(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, TUNED.replace('"accuracy"', '"loss"')))
    lines = tuned_lines(study, SCORES, ("fedavg",))
    lines = [{**line, "validation": {"loss": line["validation"]["accuracy"]}} for line in lines]
    assert choose(study, study.arms["fedavg"], {"split.alpha": 0.1}, Asked(), lines) == {"training.lr": 1e-4}


def test_run_refuses_an_incomplete_tuning(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, TUNED))
    lines = tuned_lines(study, SCORES, ("fedavg",))
    with pytest.raises(StudyError, match=r"the tuning of 'fedavg' is not complete: .*training.lr 0.01.*play.py tune"):
        plan(study, "run", Asked(), lines[:2])
    assert plan(study, "run", Asked(arms=["nothing"]), []), "an arm without a grid needs no tuning"


def test_by_axis_every_point_has_its_own_choice(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, TUNED.replace("last = 2", "last = 2\nby_axis = true")))
    lines = tuned_lines(study, SCORES, ("fedavg",))
    assert len(lines) == 6
    for line in lines:
        if line["point"]["split.alpha"] == 1.0:
            line["validation"]["accuracy"] = [line["chosen"]["training.lr"]] * 3
    runs = plan(study, "run", Asked(arms=["fedavg"], seeds=[0]), lines)
    assert [run.chosen["training.lr"] for run in runs] == [0.001, 0.01]


def test_a_line_of_another_config_is_refused(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path))
    runs = plan(study, "run", Asked(), [])
    line = {**runs[0].identity, "digest": runs[0].digest}
    assert len(left_to_play(study, runs, [line])) == len(runs) - 1
    with pytest.raises(StudyError, match=r"has a line of another config for small run: fedavg, seed 0"):
        left_to_play(study, runs, [{**line, "digest": "0"}])


def test_tuning_never_reads_a_test_set_and_needs_validation_parts(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, TUNED))
    config = configured(plan(study, "tune", Asked(), [])[0])
    assert (config.evaluate.every, config.evaluate.personal_every, config.evaluate.validation_every) == (0, 0, 1)
    assert config.evaluate.validation_metric == "accuracy"
    study = read_study(write_study(tmp_path, TUNED, CONFIG.replace("validation = 0.3", "validation = 0.0")))
    with pytest.raises(ValueError, match=r"split.validation is 0"):
        configured(plan(study, "tune", Asked(), [])[0])


def test_runs_are_refused_where_no_round_would_be_scored(tmp_path: Path) -> None:
    personal = STUDY.replace("last = 2", 'last = 2\non = "personal"')
    study = read_study(write_study(tmp_path, personal, CONFIG.replace("personal_every = 3", "personal_every = 0")))
    with pytest.raises(StudyError, match=r"on is 'personal', but evaluate.personal_every is 0"):
        configured(plan(study, "run", Asked(), [])[0])
    study = read_study(write_study(tmp_path, STUDY, CONFIG.replace("drift = false", "drift = false\nevery = 0")))
    with pytest.raises(StudyError, match=r"on is 'test', but evaluate.every is 0"):
        configured(plan(study, "run", Asked(), [])[0])


def test_tuning_is_refused_where_no_round_would_be_scored(tmp_path: Path) -> None:
    never = TUNED.replace("last = 2", 'last = 2\nset."evaluate.validation_every" = 4')
    for text, rounds in ((never, 3), (never.replace("[arms.fedavg]", "[arms.fedavg]\nrounds = 2"), 2)):
        study = read_study(write_study(tmp_path, text))
        with pytest.raises(StudyError, match=f"validation_every is 4, but arm 'fedavg' has only {rounds} rounds"):
            configured(plan(study, "tune", Asked(), [])[0])
    configured(plan(read_study(write_study(tmp_path, never.replace("= 4", "= 3"))), "tune", Asked(), [])[0])


def test_a_line_that_was_cut_off_is_left_out_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    assert read_lines(file) == []
    append_line(file, {"a": 1})
    with file.open("a") as stream:
        stream.write('{"a": 2, "b"')
    assert read_lines(file) == [{"a": 1}]
    append_line(file, {"a": 3})
    assert read_lines(file) == [{"a": 1}, {"a": 3}]
    file.write_text('{"a": 1}\nnot json\n')
    with pytest.raises(LinesError, match="line 2"):
        read_lines(file)


def test_a_study_is_played_by_one_process_at_a_time(tmp_path: Path) -> None:
    file = write_study(tmp_path)
    with only_writer(file), pytest.raises(LinesError, match="played by another"), only_writer(file):
        pass
    with only_writer(file):
        pass


def test_lines_hold_what_tables_need() -> None:
    row = {"bytes": {"up": 3, "down": 4}, "train_loss": 0.5, "seconds": 1.0, "test": None, "personal": None}
    rows: list[dict[str, Any]] = [
        {**row, "round": 0, "test": {"accuracy": 0.1}, "chosen": {"c0": [1]}, "drift": {"key": {"cosine": 0.5}}},
        {**row, "round": 1, "lost": {"c1": "gone"}, "chosen": {"c0": [2]}},
        {
            **row,
            "round": 2,
            "test": {"accuracy": 0.3, "f1": 0.2},
            "personal": {"accuracy": {"c0": 0.5, "c1": 0.7}},
            "privacy": {"epsilon": 2.0, "delta": 1e-5},
            "chosen": {"c0": [1]},
        },
    ]
    line = recorded(rows, ("drift", "drift.key.cosine"))
    assert line["test"] == {"rounds": [1, 3], "accuracy": [0.1, 0.3], "f1": [None, 0.2]}
    assert line["personal"]["rounds"] == [3]
    assert line["personal"]["accuracy"] == [pytest.approx(0.6)]
    assert line["personal"]["clients"] == {"accuracy": {"c0": 0.5, "c1": 0.7}}
    assert (line["bytes"], line["epsilon"]) == ({"up": [3, 3, 3], "down": [4, 4, 4]}, 2.0)
    assert (line["layers"], line["lost"]) == ([{"c0": [1]}, {"c0": [2]}, {"c0": [1]}], [0, 1, 0])
    assert line["drift"] == [{"key": {"cosine": 0.5}}, None, None]
    assert line["drift.key.cosine"] == [0.5, None, None]
    json.dumps(line)


def test_arms_can_be_asked_for_by_names_with_commas(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, STUDY + '[arms."random, common"]\n'))
    assert _arm_names(["random, common", "fedavg,broken"], [study]) == {"random, common", "fedavg", "broken"}
    assert _arm_names([], [study]) == set()
    with pytest.raises(StudyError, match="no arm 'fedsgd'"):
        _arm_names(["fedsgd"], [study])


def test_studies_of_the_same_name_do_not_share_runs(tmp_path: Path) -> None:
    one, other = (read_study(write_study(tmp_path / name)) for name in "ab")
    names = {run.name for study in (one, other) for run in plan(study, "run", Asked(), [])}
    assert len(names) == 2 * 9


def test_differences_to_an_unknown_arm_are_refused(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path))
    arm = list(study.arms)[-1]
    assert study.compared_to(arm).baseline == arm
    with pytest.raises(StudyError, match=r"there is no arm 'fedavgg'; there are "):
        study.compared_to("fedavgg")
