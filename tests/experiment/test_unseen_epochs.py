"""`evaluate.unseen_epochs`: a client that takes no part first trains what it would keep."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from partita.core.settings import RunError
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.experiment.runner import resume, start

CLIP = {"name": "clip", "shape": "tiny"}
LORA = {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 2, "adapter": {"rank": 4, "ranks": [2, 4]}}
Rows = list[dict[str, Any]]


def config(method: str, epochs: int = 0, rounds: int = 1, unseen: int | None = 2, **more: Any) -> dict[str, Any]:
    name, *options = method.split(" ")
    split = {"name": "iid", "clients": 5, "test": 0.5, **({"unseen": unseen} if unseen else {})}
    return {
        "method": {"name": name, **dict.fromkeys(options, 0)},
        "data": {"name": "synthetic", "examples": 240, "test_examples": 20, "size": 4, "classes": 4, "noise": 0.3},
        "split": split,
        "model": {"name": "vit", "layers": 1, "width": 16, "heads": 2, "patch": 2},
        "training": {"lr": 0.01, "batch_size": 8},
        "evaluate": {"unseen_epochs": epochs, "personal_every": 1},
        "rounds": rounds,
        **more,
    }


def play(folder: Path, raw: Mapping[str, Any]) -> Rows:
    return list(start(parse(raw), folder))


def without_times(rows: Rows) -> Rows:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def mean(scores: Mapping[str, float]) -> float:
    return sum(scores.values()) / len(scores)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [("fedavg", {}), ("fedbabu", {}), ("promptfl", {"model": CLIP})],
    ids=["fedavg", "fedbabu", "promptfl"],
)
def test_rows_of_a_method_without_personal_parameters_do_not_change(
    method: str, more: dict[str, Any], tmp_path: Path
) -> None:
    trained, plain = (play(tmp_path / str(epochs), config(method, epochs, **more)) for epochs in (4, 0))
    assert without_times(trained) == without_times(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [("fedper finetune", {}), ("fedrep", {}), ("pfeddc", {"model": CLIP}), ("coop", {"model": CLIP})],
    ids=["fedper", "fedrep", "pfeddc", "coop"],
)
def test_only_the_scores_of_unseen_clients_change(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    trained, plain = (play(tmp_path / str(epochs), config(method, epochs, 2, **more)) for epochs in (4, 0))
    for row, other in zip(without_times(trained), without_times(plain), strict=True):
        own, others = row.pop("unseen"), other.pop("unseen")
        assert own["loss"].keys() == others["loss"].keys()
        assert all(own["loss"][client] != others["loss"][client] for client in own["loss"])
        assert row == other


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedrep finetune", "local-only"])
def test_an_untrained_head_is_at_chance_and_a_trained_one_far_above(method: str, tmp_path: Path) -> None:
    training = {"lr": 0.01, "batch_size": 8, "epochs": 3}
    before, after = (
        play(tmp_path / str(epochs), config(method, epochs, 4, training=training))[-1]["unseen"]["accuracy"]
        for epochs in (0, 20)
    )
    assert mean(before) < 0.3  # of four classes
    assert mean(after) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedper", "fedrep finetune"])
def test_a_resumed_run_and_workers_have_the_same_scores(method: str, tmp_path: Path) -> None:
    def raw(block: int = 1, **engine: int) -> dict[str, Any]:
        sgd = {"optimizer": "sgd", "lr": 0.1, "batch_size": 8}
        # Worker processes have one thread each, and sums over several threads differ by rounding.
        return config(method, 3, 3, training=sgd, engine={"clients_per_block": block, "threads": 1, **engine})

    whole = play(tmp_path / "whole", raw())
    list(islice(start(parse(raw()), tmp_path / "cut"), 1))
    resumed = list(resume(parse(raw()), tmp_path / "cut"))
    assert [row["round"] for row in resumed] == [1, 2]
    assert without_times(resumed) == without_times(whole)[1:]
    assert without_times(play(tmp_path / "workers", raw(workers=2))) == without_times(whole)
    for row, other in zip(play(tmp_path / "block", raw(block=4)), whole, strict=True):
        assert row["unseen"]["loss"] == pytest.approx(other["unseen"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_an_unseen_client_trains_all_ranks_of_what_it_keeps(tmp_path: Path) -> None:
    trained, plain = (play(tmp_path / str(epochs), config("fedsa-lora", epochs, model=LORA))[-1] for epochs in (4, 0))
    assert trained["personal"] == plain["personal"]
    assert mean(trained["unseen"]["loss"]) < mean(plain["unseen"]["loss"])


@pytest.mark.slow
def test_privacy_of_those_who_take_part_costs_the_same(tmp_path: Path) -> None:
    private: dict[str, Any] = {"privacy": {"noise": 2.0, "unit": "example", "repeatable": True}}
    trained, plain = (
        play(tmp_path / str(epochs), config("fedper finetune", epochs, **private))[-1] for epochs in (4, 0)
    )
    assert trained.pop("unseen") != plain.pop("unseen")
    assert without_times([trained]) == without_times([plain])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("method", "unit"), [("fedper finetune", "client"), ("fedper", "example")])
def test_scores_of_unseen_clients_are_withheld(tmp_path: Path, method: str, unit: str) -> None:
    private: dict[str, Any] = {"privacy": {"noise": 2.0, "unit": unit, "repeatable": True}}
    assert "unseen" not in play(tmp_path, config(method, 0, **private))[-1]


def test_a_central_model_is_the_same_for_all_with_and_without_epochs(tmp_path: Path) -> None:
    trained, plain = (play(tmp_path / str(epochs), config("centralized", epochs)) for epochs in (4, 0))
    assert without_times(trained) == without_times(plain)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("ditto", {}),
        ("apfl", {}),
        ("pfedme", {}),
        ("fedala", {}),
        ("pfedprompt", {"model": CLIP}),
        ("ditto", {"model": LORA}),
    ],
    ids=["ditto", "apfl", "pfedme", "fedala", "pfedprompt", "ranks"],
)
def test_parameters_that_plain_steps_do_not_reach_are_refused(method: str, more: dict[str, Any]) -> None:
    sgd: dict[str, Any] = {"training": {"optimizer": "sgd", "lr": 0.01}}
    wanted = rf"method\.name is '{method}': clients of this method are tested with .*, or use a method that keeps"
    with pytest.raises(RunError, match=wanted):
        build(parse(config(method, 5, **sgd, **more)))
    build(parse(config(method, 0, **sgd, **more)))
