"""Training with label smoothing and class weights, and the training settings that do not fit a task or an engine."""

from __future__ import annotations

import tomllib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from architecture_fixtures import ThreeClients, make_case, make_model
from helpers import SMALL_TASK, SMALL_VIT, Clients, final_params, max_difference, play, toy_model, toy_run

from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.model import TagError
from partita.core.optim import SGD
from partita.core.options import OptionError
from partita.core.personal_copy import add_personal_copy
from partita.core.settings import RunError, Training
from partita.core.tensors import Tensors
from partita.experiment import builder
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.methods.fedavg import fedavg
from partita.models.functional import FunctionalModel

CASE = make_case("bert-text")
OPTIONS: dict[str, Any] = {"label_smoothing": 0.2, "class_weights": (0.1, 0.5, 0.2)}


def ends(block: int = 1, method: Method | None = None, **options: Any) -> Tensors:
    run = toy_run(method or fedavg(), 2, SGD(0.9), **{"dropout": False, **OPTIONS, **options})
    return final_params(play(run, CASE.model, ThreeClients(CASE), block=block))


@pytest.mark.slow
def test_blocks_and_accumulated_batches_equal_single_clients() -> None:
    alone = ends()
    assert max_difference(alone, ends(block=3)) < 1e-5
    assert max_difference(alone, ends(batch_size=2, accumulate=2)) < 1e-5
    assert max_difference(alone, ends(block=3, batch_size=2, accumulate=2)) < 1e-5
    assert max_difference(alone, ends(label_smoothing=0.0)) > 1e-4
    assert max_difference(alone, ends(class_weights=())) > 1e-4


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("clipping", ["direct", "ghost"])
def test_private_gradients_have_smoothed_labels(clipping: Any) -> None:
    """With a clip that never applies and no noise, DP-SGD is plain training. Clients have one batch of all examples."""
    private = Method("private", privacy=PrivacySettings(clip=1e3, noise=0.0, clipping=clipping, sampling="shuffle"))
    model = make_model("bert-text", ("embedding",))
    runs = [toy_run(method, 1, SGD(0.9), dropout=False, label_smoothing=0.2) for method in (private, fedavg())]
    ours, plain = (final_params(play(run, model, ThreeClients(CASE))) for run in runs)
    assert max_difference(ours, plain) < 1e-5


def test_a_personal_copy_has_the_loss_of_its_model() -> None:
    out, targets = CASE.model(CASE.params, {"input_ids": torch.tensor([[2, 3]])}), torch.tensor([1])
    copied = add_personal_copy(CASE.model)
    assert torch.equal(copied.class_losses(out, targets, 0.1, ()), CASE.model.class_losses(out, targets, 0.1, ()))


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(OptionError, match=r"training.class_weights is \(1.0, 0.0\); it must be a table, each a number"):
        Training(class_weights=(1.0, 0.0))
    with pytest.raises(RunError, match=r"training\.class_weights is \[1\.0, 2\.0\] and privacy\.unit is 'example'"):
        toy_run(Method("private", privacy=PrivacySettings(clip=1.0, noise=1.0)), 1, class_weights=(1.0, 2.0))


def test_models_with_a_loss_of_their_own_refuse_smoothing() -> None:
    with pytest.raises(TagError, match=r"leave out training.label_smoothing and training.class_weights"):
        play(toy_run(fedavg(), 1, label_smoothing=0.1), toy_model(), Clients(a=4))


def small(**training: Any) -> Any:
    raw = tomllib.loads(SMALL_VIT + SMALL_TASK)
    return parse({**raw, "method": {"name": "fedavg"}, "training": {**raw["training"], **training}})


def test_class_weights_go_by_name() -> None:
    classes = build(small()).federation.task.classes
    weights = build(small(class_weights={classes[1]: 3.0})).run.training.weights
    assert weights == tuple(3.0 if index == 1 else 1.0 for index in range(len(classes)))
    with pytest.raises(OptionError, match=r"training.class_weights names the class 'clas'"):
        build(small(class_weights={"clas": 2.0}))


def test_cached_layers_without_dropout_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    config = replace(config, engine=replace(config.engine, cache_frozen=True))
    monkeypatch.setattr(FunctionalModel, "uses_dropout", lambda self: True)
    monkeypatch.setattr(builder, "_cached", lambda model, federation: (model, federation))
    with pytest.warns(UserWarning, match="the cached layers run without dropout"):
        build(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(replace(config, training=replace(config.training, dropout=False)))
