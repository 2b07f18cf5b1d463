"""Which model is evaluated: the server's if it is shared, otherwise the personal models."""

from __future__ import annotations

import tomllib

import pytest
from helpers import SMALL_TASK, SMALL_VIT

from partita.core.rounds import rounds
from partita.engines.simulation import SimulationEngine
from partita.evaluation import score
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.experiment.round_log import evaluate_round

CONFIG = (
    """
rounds = 1
[method]
name = "{method}"
"""
    + SMALL_TASK
    + "test_examples = 40"
    + SMALL_VIT
)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("method", "common"),
    [("fedavg", True), ("fedfrozen", True), ("fedper", False), ("fedbabu", False), ("fedtp", False)],
)
def test_central_test_uses_the_server_model_only_when_it_is_shared(method: str, common: bool) -> None:
    experiment = build(parse(tomllib.loads(CONFIG.format(method=method))))
    run, model, federation = experiment.run, experiment.model, experiment.federation
    engine = SimulationEngine(run, model, federation)
    (played,) = rounds(run, model, engine)
    found = evaluate_round(experiment, engine, played)["test"]["loss"]
    of_the_server = score(model, played.server.params, federation.test)["loss"]
    assert (found == of_the_server) == common


def test_negative_finetune_is_refused_before_training() -> None:
    settings = tomllib.loads(CONFIG.format(method="fedbabu"))
    settings["method"]["finetune"] = -1
    with pytest.raises(ValueError, match=r"method\.finetune is -1; it must be a whole number from 0"):
        build(parse(settings))
