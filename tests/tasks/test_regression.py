"""Regression against its theory: gradients by hand, plain loops, least squares, scikit-learn and transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import OPTIMIZERS, TorchLoop, client_batches, final_params, max_difference, play, toy_run
from torch import Tensor
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification, BertConfig, BertModel

from partita.core.data import Batch, ClientData
from partita.core.dp_settings import PrivacySettings
from partita.core.model import Model, Output
from partita.core.optim import SGD
from partita.core.rng import Key, seeded
from partita.core.tensors import Tensors, equal
from partita.data import DataError, Federation, Table, Task, split
from partita.engines.flower.message_checks import check_scores, valid_scores
from partita.engines.flower.messages import MessageError
from partita.evaluation.evaluator import Predictions
from partita.evaluation.metrics import Regression
from partita.methods.fedavg import fedavg
from partita.models import ModelError, build
from partita.models.functional import FunctionalModel, without_logs
from partita.tasks import IMAGE_REGRESSION, TEXT, TEXT_REGRESSION
from partita.tasks.losses import squared_error
from partita.training.dp_sgd import clipped_sum
from partita.training.ghost_clipping import ghost_sum

TARGETS = ("width", "height")
ROUNDS = 60


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def task_of(count: int = 60) -> Task:
    """Images whose two targets are linear in the pixels."""
    pixels = noise(count, 1, 4, 4)
    targets = pixels.flatten(1) @ noise(16, 2, seed=1) + 3.0
    table = Table({"pixel_values": pixels}, targets)
    return Task("toy", table, table, TARGETS, channels=1, size=4, kind=IMAGE_REGRESSION)


def vit(task: Task, **options: Any) -> FunctionalModel:
    model = build("vit", task, Key(0), **{"layers": 1, "width": 8, "heads": 2, **options})
    assert isinstance(model, FunctionalModel)
    return model


# ---- the loss


def test_the_gradient_is_twice_the_error_over_the_number_of_targets() -> None:
    predictions, targets = noise(5, 3).requires_grad_(), noise(5, 3, seed=1)
    losses = squared_error(predictions, targets)
    assert losses.shape == (5,)
    [gradient] = torch.autograd.grad(losses.sum(), predictions)
    torch.testing.assert_close(gradient, 2 * (predictions - targets).detach() / 3)
    each = torch.vmap(torch.func.grad(lambda one, target: squared_error(one[None], target[None])[0]))
    torch.testing.assert_close(each(predictions.detach(), targets), gradient)


def test_transformers_computes_the_same_loss_of_the_saved_image_model(tmp_path: Path) -> None:
    task = task_of(7)
    model, batch = vit(task), task.train.take(torch.arange(7))
    losses = model.losses(model(model.initial, batch.inputs), batch.targets)
    model.save_pretrained(model.initial, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "width", "1": "height"})
    with without_logs():
        plain = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(plain(**batch.inputs, labels=batch.targets).loss, losses.mean())


@pytest.mark.parametrize("names", [("score",), TARGETS])
def test_transformers_computes_the_same_loss_of_the_saved_text_model(names: tuple[str, ...], tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with without_logs(), seeded(Key(0)):
        BertModel(BertConfig(**sizes, vocab_size=9)).save_pretrained(tmp_path / "body")
    inputs = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    targets = noise(2, len(names))
    table = Table(inputs, targets)
    task = Task("toy", table, table, names, kind=TEXT_REGRESSION, vocabulary_size=9)
    model = build("pretrained", task, Key(0), path=str(tmp_path / "body"))
    assert isinstance(model, FunctionalModel)
    out = model(model.initial, inputs)
    assert out.logits.shape == targets.shape
    model.save_pretrained(model.initial, tmp_path / "tuned")
    with without_logs():
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned").eval()
    torch.testing.assert_close(plain(**inputs, labels=targets).loss, model.losses(out, targets).mean())
    again = build("pretrained", task, Key(1), path=str(tmp_path / "tuned"))
    assert equal(again.initial, model.initial), "a head of as many targets is kept"
    labelled = Table(inputs, torch.tensor([0, 1]))
    classes = Task("toy", labelled, labelled, ("no", "yes"), kind=TEXT, vocabulary_size=9)
    other = build("pretrained", classes, Key(1), path=str(tmp_path / "tuned"), fresh_head=True)
    assert isinstance(other, FunctionalModel)
    assert other.module.config.problem_type is None, "the problem type of the checkpoint is that of another task"


def test_prompts_need_classes() -> None:
    with pytest.raises(ModelError, match="clip predicts one class per image"):
        build("clip", task_of(), Key(0), shape="tiny")


# ---- training


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_client_is_a_plain_loop_bit_for_bit(kind: str) -> None:
    task = task_of()
    model, federation = vit(task), split(task, "iid", 1, key=Key(0))
    run = toy_run(fedavg(), 1, OPTIMIZERS[kind], lr=0.01)
    [played] = play(run, model, federation)
    examples = federation["c0"].train
    loop = TorchLoop(model, run.training)
    losses = loop.fit(examples, client_batches(run, 0, "c0", examples))
    assert played.loss == pytest.approx(sum(losses) / len(losses))
    delta = {name: loop.values()[name] - value for name, value in model.initial.items()}
    expected = {name: value + delta[name] for name, value in model.initial.items()}
    assert equal(final_params([played]), expected)


def test_a_block_of_unequal_clients_equals_its_clients_one_by_one() -> None:
    task = task_of()
    model, federation = vit(task), split(task, "quantity", 3, key=Key(0), alpha=1.0, min_examples=5)
    run = toy_run(fedavg(), 2, SGD(), lr=0.01)
    sizes = {len(federation[client].train) for client in federation.clients}
    assert len(sizes) > 1, "so that some examples of the block are padding"
    blocks, singles = (final_params(play(run, model, federation, block=block)) for block in (3, 1))
    assert max_difference(singles, model.initial) > 0
    assert max_difference(blocks, singles) < 1e-6


class Linear(Model):
    """Linear regression: the inputs "x" (example, feature), the targets (example, target)."""

    name = "linear"

    def __init__(self, features: int, targets: int) -> None:
        self.initial = {"weight": torch.zeros(features, targets), "bias": torch.zeros(targets)}
        self.tags = {name: frozenset({"head"}) for name in self.initial}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(inputs["x"] @ params["weight"] + params["bias"])

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return TEXT_REGRESSION.loss(out.logits, targets)


class Sites:
    """Clients of unequal size whose inputs and targets differ."""

    clients = ("a", "b", "c")

    def __init__(self) -> None:
        self.tables = {}
        for place, client in enumerate(self.clients):
            x = noise(20 + 9 * place, 3, seed=place) + 0.2 * place
            y = x @ noise(3, 2, seed=9) + place + 0.3 * noise(len(x), 2, seed=20 + place)
            self.tables[client] = Table({"x": x}, y)

    def __getitem__(self, client: str) -> ClientData:
        return ClientData(self.tables[client], self.tables[client], self.tables[client])


def test_one_full_step_a_round_leads_to_the_least_squares_solution_of_the_pooled_data() -> None:
    """FedAvg by sizes is then gradient descent on the pooled mean squared error."""
    sites, model = Sites(), Linear(3, 2)
    x = torch.cat([table.inputs["x"] for table in sites.tables.values()])
    design = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    y = torch.cat([table.targets for table in sites.tables.values()]).double()
    wanted = torch.linalg.lstsq(design, y).solution  # (feature + 1, target)
    curvature = torch.linalg.eigvalsh(design.T @ design / len(x))  # of the mean over two targets
    run = toy_run(fedavg(), ROUNDS, SGD(), lr=1 / float(curvature[-1]), batch_size=64, steps=1)
    found = final_params(play(run, model, sites, block=3))
    solution = torch.cat([found["weight"], found["bias"][None]]).double()
    assert float((1 - curvature[0] / curvature[-1]) ** ROUNDS) < 1e-5, "enough rounds for this condition"
    torch.testing.assert_close(solution, wanted, rtol=0, atol=2e-4)


def test_ghost_clipping_sums_the_clipped_gradients_of_examples() -> None:
    task = task_of(6)
    model, batch = vit(task, frozen=("embedding",)), task.train.take(torch.arange(6))
    params = {name: value + 0.3 * noise(*value.shape, seed=3) for name, value in sorted(model.initial.items())}

    def losses(trainable: Tensors) -> Tensor:
        return model.losses(model(trainable, batch.inputs), batch.targets)

    def one(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = model.losses(model(trainable, inputs), targets).sum()
        return loss, loss

    private, mask = PrivacySettings(clip=12.0, noise=0.0), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    wanted, _ = clipped_sum(one, params, batch.inputs, batch.targets, mask, private)
    found, _, norms = ghost_sum(losses, params, mask, 6, private)
    assert norms.min() < 12 < norms.max(), "some are clipped and some are not"
    assert max_difference(found, wanted) < 1e-5 * max(float(value.abs().max()) for value in wanted.values())


# ---- metrics


def answers(predictions: Tensor, targets: Tensor, size: int = 7) -> Iterator[Predictions]:
    for guess, truth in zip(predictions.split(size), targets.split(size), strict=True):
        yield Predictions(guess, truth, squared_error(guess, truth))


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_metrics_are_those_of_scikit_learn(targets: int, size: int) -> None:
    from sklearn import metrics

    truth = 5 * noise(40, targets) + 2
    guesses = truth + noise(40, targets, seed=1) * torch.arange(1, targets + 1)
    assert Regression()(answers(guesses, truth, size)) == pytest.approx(
        {
            "mse": metrics.mean_squared_error(truth, guesses),
            "mae": metrics.mean_absolute_error(truth, guesses),
            "r2": metrics.r2_score(truth, guesses),
            "loss": metrics.mean_squared_error(truth, guesses),
        },
        rel=1e-5,
    )


def test_r2_is_zero_for_the_mean_and_negative_for_worse() -> None:
    truth = noise(20, 1)
    assert Regression()(answers(truth.mean().expand(20, 1), truth))["r2"] == pytest.approx(0, abs=1e-6)
    assert Regression()(answers(-truth, truth))["r2"] < -1


def test_r2_leaves_out_targets_that_do_not_vary() -> None:
    from sklearn import metrics

    truth, guesses = noise(20, 3), noise(20, 3, seed=1)
    truth[:, 1] = 0.1
    found = Regression()(answers(guesses, truth))
    assert found["r2"] == pytest.approx(metrics.r2_score(truth[:, [0, 2]], guesses[:, [0, 2]]), rel=1e-5)
    for few in (answers(guesses[:1], truth[:1]), answers(guesses[:, 1:2], truth[:, 1:2])):
        assert Regression()(few).keys() == {"mse", "mae", "loss"}
    assert "r2" not in Regression()(answers(guesses * math.inf, truth))


def test_a_site_may_send_a_negative_r2_but_no_nan() -> None:
    check_scores({"r2": -7.0, "mse": 40.0, "mae": 3.0}, Regression())
    with pytest.raises(MessageError, match="sent nan for mse; it must be a finite number"):
        check_scores({"mse": math.nan}, Regression())
    assert valid_scores({"r2": -7.0, "mse": math.inf}, Regression()) == {"r2": -7.0}


# ---- splits


@pytest.mark.parametrize(
    ("name", "options"), [("dirichlet", {"alpha": 1.0}), ("pathological", {"classes_per_client": 1})]
)
def test_splits_by_label_name_the_remedy(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"needs exactly one class per example; use 'iid', 'quantity' or 'by_column'"):
        split(task_of(), name, 3, key=Key(0), **options)


def test_a_split_without_labels_deals_every_row() -> None:
    federation: Federation = split(task_of(), "iid", 3, key=Key(0), validation=0, test=0)
    parts = [federation[client].train for client in federation.clients]
    dealt = torch.cat([part.take(torch.arange(len(part))).targets for part in parts])
    assert np.array_equal(np.sort(dealt.numpy(), 0), np.sort(federation.task.train.targets.numpy(), 0))
    assert isinstance(parts[0].take(torch.arange(1)), Batch)
