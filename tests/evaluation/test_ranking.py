"""Areas under curves, against scikit-learn, with ties and weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from partita.evaluation.outcomes import auroc, average_precision


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(2, 40), st.sampled_from([2, 5, 1000]))
def test_areas_are_those_of_scikit_learn(seed: int, examples: int, levels: int) -> None:
    draws = np.random.default_rng(seed)
    truth = draws.random(examples) < 0.4
    truth[:2] = False, True
    scores = draws.integers(0, levels, examples) / levels  # few levels: many ties
    weights = np.stack([np.ones(examples), 1.0 + draws.integers(0, 4, examples)])
    for row, area, precision in zip(
        weights, auroc(truth, scores, weights), average_precision(truth, scores, weights), strict=True
    ):
        assert area == pytest.approx(roc_auc_score(truth, scores, sample_weight=row), abs=1e-12)
        assert precision == pytest.approx(average_precision_score(truth, scores, sample_weight=row), abs=1e-12)


def test_areas_are_undefined_without_positive_or_negative_examples() -> None:
    scores, once = np.array([0.1, 0.2]), np.ones((1, 2))
    assert np.isnan(auroc(np.array([True, True]), scores, once)).all()
    assert np.isnan(auroc(np.array([False, False]), scores, once)).all()
    assert average_precision(np.array([True, True]), scores, once) == 1
    assert np.isnan(average_precision(np.array([False, False]), scores, once)).all()
