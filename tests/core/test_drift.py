"""Drift measured on a stream against numpy on the whole cohort."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import Clients, play, toy_model, toy_run
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_fixtures import pack_per_client

from partita.core import drift
from partita.core.drift import Drift
from partita.core.model import Model
from partita.core.rng import Key
from partita.core.tensors import Tensors, digest
from partita.core.update import Update
from partita.methods.fedavg import fedavg


class TaggedModel(Model):
    """Has only names and tags, which is all that drift uses."""

    name = "tagged"
    tags = {"a": frozenset({"x"}), "b": frozenset({"x", "y"}), "c": frozenset({"y"}), "d": frozenset({"z"})}  # noqa: RUF012


SHAPES = {"a": (2, 3), "b": (4,), "c": (), "d": (2,)}


def update_of(number: int, names: str, weight: float, scale: float = 1.0) -> Update:
    delta = {
        name: scale * torch.randn(SHAPES[name], generator=(Key(number) / name).generator()) + 0.5 for name in names
    }
    return Update(f"c{number}", delta, {}, weight, {}, None)


def drift_of(updates: list[Update]) -> dict[str, dict[str, float]]:
    drift = Drift(TaggedModel())
    for update in updates:
        drift.add(update)
    return drift.measures()


def flat_vector(delta: Tensors, names: list[str]) -> np.ndarray:
    return np.concatenate([delta[name].numpy().astype(np.float64).ravel() for name in names])


def expected_drift(updates: list[Update], tag: str) -> dict[str, float]:
    """The formulas for the case that all clients sent all names."""
    names = [name for name in SHAPES if tag in TaggedModel.tags[name] and name in updates[0].delta]
    d = np.stack([flat_vector(update.delta, names) for update in updates])  # (client, number)
    p = np.array([update.weight for update in updates])
    p = p / p.sum()
    m = p @ d
    return {
        "dispersion": np.sqrt(p @ ((d - m) ** 2).sum(1)) / np.linalg.norm(m),
        "cosine": p @ (d @ m / (np.linalg.norm(d, axis=1) * np.linalg.norm(m))),
        "distance": np.sqrt(p @ (d**2).sum(1)),
    }


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(0.5, 20)), min_size=1, max_size=5),
    st.sampled_from([0.01, 1.0, 30.0]),
)
@settings(max_examples=40)
def test_drift_matches_numpy(clients: list[tuple[int, float]], scale: float) -> None:
    updates = [update_of(number, "abcd", weight, scale) for number, weight in clients]
    before = [digest(update.delta) for update in updates]
    result = drift_of(updates)
    assert result.keys() == {"x", "y", "z"}
    for tag, measures in result.items():
        expected = expected_drift(updates, tag)
        # The dispersion is a difference of two large sums when all clients agree.
        assert measures["dispersion"] == pytest.approx(expected["dispersion"], rel=1e-4, abs=1e-3)
        assert measures["cosine"] == pytest.approx(expected["cosine"], rel=1e-5, abs=1e-6)
        assert measures["distance"] == pytest.approx(expected["distance"], rel=1e-5)
    assert [digest(update.delta) for update in updates] == before


def test_clients_that_agree_have_no_dispersion() -> None:
    updates = [update_of(1, "abc", weight) for weight in (1.0, 5.0, 2.0)]
    for measures in drift_of(updates).values():
        assert measures["dispersion"] == pytest.approx(0.0, abs=1e-3)
        assert measures["cosine"] == pytest.approx(1.0)


def test_opposing_clients_have_known_dispersion_and_zero_cosine() -> None:
    up, down = ({"a": torch.zeros(2, 3), "d": torch.tensor([value, 0.0])} for value in (3.0, -1.0))
    result = drift_of([Update("u", up, {}, 1.0, {}, None), Update("v", down, {}, 1.0, {}, None)])
    assert result["z"] == pytest.approx({"dispersion": 2.0, "cosine": 0.0, "distance": np.sqrt(5.0)}, abs=1e-6)
    assert result["x"] == {"dispersion": 0.0, "cosine": 0.0, "distance": 0.0}


def test_updates_that_cancel_have_zero_dispersion_and_cosine() -> None:
    there, back = torch.tensor([3.0, 4.0]), torch.tensor([-3.0, -4.0])
    measures = drift_of([Update("a", {"d": there}, {}, 1.0, {}, None), Update("b", {"d": back}, {}, 1.0, {}, None)])
    assert measures["z"] == {"dispersion": 0.0, "cosine": 0.0, "distance": 5.0}


def test_drift_weighs_each_name_by_its_own_senders() -> None:
    """Each name has its own senders and so its own mean; a client's direction is over what it sent of the tag, and it
    points nowhere along what it did not send."""
    updates = [update_of(1, "ab", 2.0), update_of(2, "b", 1.0), update_of(3, "abcd", 5.0)]
    result = drift_of(updates)
    assert result.keys() == {"x", "y", "z"}
    for tag in ("x", "y"):
        names = [name for name in "abc" if tag in TaggedModel.tags[name]]
        spread = mean = along = 0.0
        anyone = sum(update.weight for update in updates if update.delta.keys() & set(names))
        for name in names:
            senders = [update for update in updates if name in update.delta]
            weights = np.array([update.weight for update in senders])
            p = weights / weights.sum()
            d = np.stack([flat_vector(update.delta, [name]) for update in senders])
            lengths = [
                np.linalg.norm(flat_vector(update.delta, [each for each in names if each in update.delta]))
                for update in senders
            ]
            m = p @ d
            spread += p @ (d**2).sum(1)
            mean += m @ m
            along += (weights / anyone @ (d / np.array(lengths)[:, None])) @ m
        expected = {
            "dispersion": np.sqrt(spread - mean) / np.sqrt(mean),
            "cosine": along / np.sqrt(mean),
            "distance": np.sqrt(spread),
        }
        assert result[tag] == pytest.approx(expected, rel=1e-5)
    assert result["z"]["dispersion"] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("lot", [1, 100, drift._MAX_ELEMENTS])
def test_packed_updates_are_measured_in_batches_with_equal_results(lot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update at a time, a few at once, and all updates with equal names at once."""
    monkeypatch.setattr(drift, "_MAX_ELEMENTS", lot)
    looks: list[int] = []
    point = Drift._add_directions
    monkeypatch.setattr(
        Drift, "_add_directions", lambda self, *given: (looks.append(len(given[1])), point(self, *given))
    )
    sent = [(1, "abcd", 2.0), (2, "abcd", 1.0), (3, "abcd", 0.5), (4, "b", 5.0), (5, "abcd", 0.0), (6, "abcd", 3.0)]
    updates = [update_of(*each) for each in sent]
    rows = [
        pack_per_client({name: value.unsqueeze(0) for name, value in update.delta.items()})[0] for update in updates
    ]
    in_rows = drift_of([replace(update, delta=row) for update, row in zip(updates, rows, strict=True)])
    assert looks == {1: [1, 1, 1, 1, 1], 100: [2, 1, 1]}.get(lot, [3, 1])
    for tag, expected in drift_of(updates).items():
        assert in_rows[tag] == pytest.approx(expected)


def test_cosine_of_clients_without_common_names_is_that_of_right_angles() -> None:
    """Two updates of equal norm at right angles: each is at 45 degrees to the mean."""
    apart = [Update("a", {"a": torch.ones(2)}, {}, 1.0, {}, None), Update("b", {"b": torch.ones(2)}, {}, 1.0, {}, None)]
    assert drift_of(apart)["x"]["cosine"] == pytest.approx(np.sqrt(0.5))


def test_drift_without_updates_is_empty() -> None:
    assert drift_of([]) == {}
    assert drift_of([Update("c", {}, {}, 1.0, {}, None)]) == {}


def test_rounds_measure_drift_for_every_tag_without_changing_the_run() -> None:
    model, population = toy_model(), Clients(a=5, b=6)
    loud, quiet = (play(toy_run(fedavg(), 2, drift=drift), model, population) for drift in (True, False))
    assert loud[0].drift.keys() == set().union(*model.tags.values())
    assert quiet[0].drift == {}
    assert digest(loud[-1].server.params) == digest(quiet[-1].server.params)
    assert loud[1].traffic == quiet[1].traffic
