"""The loss of a batch as a mean over its examples, or over all its labeled tokens."""

from __future__ import annotations

import pytest
import torch
from architecture_fixtures import ThreeClients, make_case
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run

from partita.core.data import IGNORE_INDEX
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.optim import SGD
from partita.core.settings import RunError, Training
from partita.core.tensors import Tensors
from partita.methods.fedavg import fedavg
from partita.training.objective import example_weights, masked_mean

CASE = make_case("bert-tokens")
TARGETS = torch.tensor([[1, 2, IGNORE_INDEX], [0, IGNORE_INDEX, IGNORE_INDEX], [IGNORE_INDEX] * 3, [1, 1, 1]])
BY_TOKEN = Training(0.1, loss_average="tokens")


def ends(block: int = 1, **options: object) -> Tensors:
    population = ThreeClients(CASE)
    run = toy_run(fedavg(), 2, SGD(0.9), dropout=False, **{"loss_average": "tokens", **options})  # type: ignore[arg-type]
    return final_params(play(run, CASE.model, population, block=block))


def test_mean_over_tokens_weights_each_example_by_its_labeled_tokens() -> None:
    assert example_weights(Training(0.1), TARGETS, None) is None
    weights = example_weights(BY_TOKEN, TARGETS, None)
    assert weights is not None
    assert weights.tolist() == [2, 1, 0, 3]
    masked = example_weights(BY_TOKEN, TARGETS, torch.tensor([1.0, 0, 1, 1]))
    assert masked is not None
    assert masked.tolist() == [2, 0, 0, 3]
    assert float(masked_mean(torch.tensor([1.0, 7, 5, 2]), masked)) == pytest.approx((2 * 1 + 3 * 2) / 5)


def test_loss_of_a_batch_is_that_of_torch_over_all_tokens() -> None:
    logits = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    mean = masked_mean(CASE.kind.loss(logits, TARGETS), example_weights(BY_TOKEN, TARGETS, None))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), ignore_index=IGNORE_INDEX)
    assert torch.allclose(mean, expected)


@pytest.mark.slow
def test_blocks_and_accumulated_batches_average_over_the_same_tokens() -> None:
    alone = ends()
    assert max_difference(alone, ends(block=3)) < 1e-5
    assert max_difference(alone, ends(batch_size=2, accumulate=2)) < 1e-5
    assert max_difference(alone, ends(block=3, batch_size=2, accumulate=2)) < 1e-5
    assert max_difference(alone, ends(loss_average="examples")) > 1e-4


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(
        RunError, match=r"training\.loss_average is 'tokens' and .*DP-SGD clips the gradient of each example"
    ):
        toy_run(Method("private", privacy=PrivacySettings(clip=1.0, noise=1.0)), 1, loss_average="tokens")
    with pytest.raises(RunError, match="the task has no labels of tokens"):
        play(toy_run(fedavg(), 1, loss_average="tokens"), toy_model(), Clients(a=4))
