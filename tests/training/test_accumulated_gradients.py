"""Gradients accumulated over several batches against those of one large batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from torch import Tensor

from partita.core import tensors
from partita.core.batch_schedule import count_steps
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.settings import RunError, Training
from partita.core.tensors import Tensors
from partita.methods.fedavg import fedavg
from partita.methods.fedprox import fedprox
from partita.training.client_axis import ClientAxis
from partita.training.gradients import AccumulatedGradients

CLIENTS = Clients(a=22, b=5, c=11)  # last batches of 6, 5 and 3 examples, in parts of 4


def ends(method: Method, optimizer: Optimizer, batch_size: int, accumulate: int, block: int, **more: Any) -> Tensors:
    run = toy_run(method, 2, optimizer, batch_size=batch_size, accumulate=accumulate, **more)
    played = play(run, toy_model(), CLIENTS, block=block)
    return {**final_params(played), "losses": torch.tensor([each.loss for each in played])}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("method", [fedavg(), fedprox(0.5)], ids=["fedavg", "fedprox"])
@pytest.mark.parametrize("optimizer", [SGD(0.9), AdamW(eps=0.1)], ids=["sgd", "adamw"])
def test_accumulated_batches_equal_one_large_batch(optimizer: Optimizer, method: Method, block: int) -> None:
    large = ends(method, optimizer, 8, 1, block)
    parts = ends(method, optimizer, 4, 2, block)
    for name, value in large.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-6)
    assert not tensors.equal(large, ends(method, optimizer, 4, 1, block))


def test_clipping_sees_the_gradient_of_the_whole_step() -> None:
    large, parts = (ends(fedavg(), SGD(), *sizes, 1, clip=0.05) for sizes in ((8, 1), (4, 2)))
    for name, value in large.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-6)


def test_steps_are_counted_by_optimizer_step() -> None:
    training = Training(0.1, batch_size=4, accumulate=3)
    assert training.examples_per_step == 12
    assert [count_steps(count, training, None) for count in (1, 12, 13, 30)] == [1, 1, 2, 3]


def test_no_more_than_one_batch_is_computed_at_a_time() -> None:
    sizes: list[int] = []

    def gradients(trainable: Tensors, values: Any, dims: Any, count: int) -> tuple[Tensors, Tensor]:
        sizes.append(len(values[-2]))
        return {"w": values[-2].mean()}, values[-2].mean()

    targets = torch.arange(10.0)
    values = [{}, {}, {}, {}, {"x": torch.zeros(10, 2)}, targets, None]
    grads, loss = AccumulatedGradients(gradients, ClientAxis(1), Training(0.1, batch_size=4))({}, values, [None] * 8, 1)
    assert sizes == [4, 4, 2]
    assert float(grads["w"]) == float(loss) == pytest.approx(4.5)


def test_targets_of_tokens_count_by_example() -> None:
    def gradients(trainable: Tensors, values: Any, dims: Any, count: int) -> tuple[Tensors, Tensor]:
        return {"w": values[-2].mean()}, values[-2].mean()

    targets = torch.arange(30.0).reshape(10, 3)
    values = [{}, {}, {}, {}, {"x": torch.zeros(10, 3)}, targets, None]
    grads, loss = AccumulatedGradients(gradients, ClientAxis(1), Training(0.1, batch_size=4))({}, values, [None] * 8, 1)
    assert float(grads["w"]) == float(loss) == pytest.approx(14.5)


def test_padding_has_no_weight() -> None:
    """The second client has three examples, so its second batch is padding alone."""
    mask = torch.tensor([[1.0] * 6, [1.0] * 3 + [0.0] * 3])

    def gradients(trainable: Tensors, values: Any, dims: Any, count: int) -> tuple[Tensors, Tensor]:
        *_, targets, mask = values
        means = (targets * mask).sum(1) / mask.sum(1).clamp(min=1)
        return {"w": means.unsqueeze(1).expand(-1, 2)}, means

    targets = torch.arange(12.0).reshape(2, 6)
    values = [{}, {}, {}, {}, {"x": torch.zeros(2, 6, 1)}, targets, mask]
    grads, losses = AccumulatedGradients(gradients, ClientAxis(2), Training(0.1, batch_size=4))({}, values, [0] * 8, 2)
    assert losses.tolist() == pytest.approx([2.5, 7.0])
    assert grads["w"].flatten().tolist() == pytest.approx([2.5, 2.5, 7.0, 7.0])


def test_accumulation_is_refused_with_dp_sgd() -> None:
    private = Method("private", privacy=PrivacySettings(clip=1.0, noise=1.0))
    with pytest.raises(RunError, match=r"training\.accumulate is 2 and privacy\.unit is .*raise training\.batch_size"):
        toy_run(private, accumulate=2)
