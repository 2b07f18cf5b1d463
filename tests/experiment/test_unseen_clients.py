"""Clients that take no part in the federation, on whose data the model is tested."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SMALL_TASK, SMALL_VIT
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import write_run

from partita.core.rng import Key
from partita.data import DataError, Federation, load, split
from partita.evaluation import score
from partita.experiment.builder import build
from partita.experiment.config import load as load_config
from partita.experiment.config import parse
from partita.experiment.flower_app import FlowerError, _settings
from partita.experiment.runner import start
from partita.report import load_run, page
from partita.runs import load_run as load_recorded

TASK = load("synthetic", Key(0), examples=80, size=2)


def rows_of(federation: Federation, client: str) -> list[list[int]]:
    data = federation[client]
    return [part.indices.tolist() for part in (data.train, data.validation, data.test)]  # type: ignore[attr-defined]


def config(method: str = "fedavg", unseen: float | None = 2, **split: Any) -> dict[str, Any]:
    raw = tomllib.loads(SMALL_TASK + SMALL_VIT)
    raw["split"] |= {"clients": 5, "test": 0.5, **({"unseen": unseen} if unseen else {}), **split}
    return {**raw, "method": {"name": method}, "rounds": 1}


@pytest.mark.slow
@given(st.integers(2, 9), st.data())
def test_every_client_keeps_its_rows_whether_it_takes_part_or_not(clients: int, data: st.DataObject) -> None:
    unseen, seed = data.draw(st.integers(1, clients - 1)), data.draw(st.integers(0, 99))
    whole = split(TASK, "iid", clients, key=Key(seed))
    part = split(TASK, "iid", clients, key=Key(seed), unseen=unseen)
    assert len(part.unseen) == unseen
    assert sorted([*part.clients, *part.unseen]) == sorted(whole.clients)
    for client in whole.clients:
        assert rows_of(part, client) == rows_of(whole, client)


def test_the_draw_depends_on_the_key_and_shares_round_down() -> None:
    drawn = {tuple(split(TASK, "iid", 8, key=Key(seed), unseen=0.3).unseen) for seed in range(8)}
    assert {len(names) for names in drawn} == {2}
    assert len(drawn) > 1


@pytest.mark.parametrize("unseen", [8, 9, 0.1])
def test_both_sides_need_a_client(unseen: float) -> None:
    with pytest.raises(DataError, match=r"split\.unseen = .* of 8 clients"):
        split(TASK, "iid", 8, key=Key(0), unseen=unseen)


def test_rows_elsewhere_cannot_be_tested() -> None:
    with pytest.raises(DataError, match=r"split\.unseen needs the rows of all clients on this machine"):
        split(TASK, "site", key=Key(0), sites=("a", "b"), client="a", unseen=1)


def test_pooled_clients_leave_the_unseen_ones_out() -> None:
    federation = split(TASK, "iid", 4, key=Key(0), unseen=1)
    pooled, [outside] = federation.pooled(), federation.unseen
    assert list(pooled.unseen) == [outside]
    assert rows_of(pooled, outside) == rows_of(federation, outside)
    used = {row for part in rows_of(pooled, "pooled") for row in part}
    assert used.isdisjoint(row for part in rows_of(federation, outside) for row in part)
    assert len(used) == 60


@pytest.mark.slow
def test_unseen_clients_are_tested_but_never_train(tmp_path: Path) -> None:
    settings = parse(config())
    [row] = start(settings, tmp_path / "run")
    experiment = build(settings)
    unseen = experiment.federation.unseen
    assert row["population"] == 3
    assert not set(unseen) & {*row["cohort"], *row["personal"]["accuracy"]}
    assert row["unseen"]["accuracy"].keys() == set(unseen)
    run = load_recorded(tmp_path / "run")
    model, params = run.functional()
    for client in unseen:
        expected = score(model, params, experiment.federation[client].test)
        assert {name: row["unseen"][name][client] for name in expected} == pytest.approx(expected)
    assert "Unseen clients" in page([load_run(tmp_path / "run")], tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_central_model_is_tested_on_unseen_clients_as_it_was_trained(tmp_path: Path) -> None:
    settings = parse(config("centralized"))
    [row] = start(settings, tmp_path / "run")
    experiment = build(settings)
    model, params = load_recorded(tmp_path / "run").functional()
    for client in experiment.federation.unseen:
        trained, initial = (score(model, own, experiment.federation[client].test) for own in (params, model.initial))
        assert row["unseen"]["loss"][client] == pytest.approx(trained["loss"])
        assert trained["loss"] != pytest.approx(initial["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedper", "fedbabu"])
def test_personal_parts_of_unseen_clients_have_their_initial_values(method: str, tmp_path: Path) -> None:
    raw = config(method)
    if method == "fedper":
        raw["method"]["finetune"] = 0
    settings = parse(raw)
    [row] = start(settings, tmp_path / "run")
    assert len(row["unseen"]["accuracy"]) == 2
    if method == "fedper":
        experiment = build(settings)
        model, params = load_recorded(tmp_path / "run").functional()
        kept = {name: value for name, value in model.initial.items() if "head" in model.tags[name]}
        for client in experiment.federation.unseen:
            expected = score(model, {**params, **kept}, experiment.federation[client].test)["accuracy"]
            assert row["unseen"]["accuracy"][client] == pytest.approx(expected)


def test_a_run_without_unseen_clients_has_no_such_scores(tmp_path: Path) -> None:
    [row] = start(parse(config(unseen=None)), tmp_path / "run")
    assert "unseen" not in row


def test_the_report_shows_mean_spread_and_worst(tmp_path: Path) -> None:
    values = {f"c{place}": place / 10 for place in range(5)}
    folder = write_run(tmp_path, "fedavg", 0, rounds=1, edit=lambda row: {**row, "unseen": {"accuracy": values}})
    text = page([load_run(folder)], tmp_path / "page.html").read_text()
    spread = f"{100 * np.std(list(values.values()), ddof=1):.1f}"
    assert "fedavg</th>" + "".join(f"<td>{cell}</td>" for cell in ("5", "20.0", spread, "0.0")) in text


@pytest.mark.parametrize(
    ("option", "settings"), [("unseen", "split.unseen=1"), ("reorder", "split.reorder=patches split.reorder_size=2")]
)
def test_sites_refuse_what_is_for_simulations(option: str, settings: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[method]\nname = "fedavg"\n')
    assert load_config(path) == _settings(path, {})
    with pytest.raises(FlowerError, match=rf"split\.{option} is for simulations"):
        _settings(path, {"set": f"split.name=iid split.clients=3 {settings}"})
