"""Label smoothing and class weights against torch's cross-entropy and transformers' label smoother."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from partita.core.data import IGNORE_INDEX
from partita.core.settings import Training
from partita.tasks.losses import class_losses, cross_entropy, token_cross_entropy
from partita.training.objective import example_weights, masked_mean

DRAW = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 4, generator=DRAW)
TARGETS = torch.tensor([0, 3, 1, 1, 2, 0])
TOKEN_LOGITS = torch.randn(3, 5, 4, generator=DRAW)
TOKEN_TARGETS = torch.tensor([[0, 1, IGNORE_INDEX, 2, 3], [IGNORE_INDEX] * 5, [1, IGNORE_INDEX, 1, 1, IGNORE_INDEX]])
WEIGHTS = (0.1, 0.2, 0.05, 0.15)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("weights", [(), WEIGHTS], ids=["equal", "weighted"])
def test_mean_of_a_batch_is_that_of_torch(smoothing: float, weights: tuple[float, ...]) -> None:
    given = torch.tensor(weights) if weights else None
    training = Training(0.1, label_smoothing=smoothing, class_weights=weights)
    mean = masked_mean(class_losses(LOGITS, TARGETS, smoothing, weights), example_weights(training, TARGETS, None))
    torch.testing.assert_close(mean, functional.cross_entropy(LOGITS, TARGETS, given, label_smoothing=smoothing))
    by_token = Training(0.1, label_smoothing=smoothing, class_weights=weights, loss_average="tokens")
    mean = masked_mean(
        class_losses(TOKEN_LOGITS, TOKEN_TARGETS, smoothing, weights), example_weights(by_token, TOKEN_TARGETS, None)
    )
    flat = TOKEN_LOGITS.flatten(0, 1), TOKEN_TARGETS.flatten()
    torch.testing.assert_close(mean, functional.cross_entropy(*flat, given, label_smoothing=smoothing))


def test_smoothing_is_that_of_trainer() -> None:
    training = Training(0.1, label_smoothing=0.2, loss_average="tokens")
    mean = masked_mean(class_losses(TOKEN_LOGITS, TOKEN_TARGETS, 0.2), example_weights(training, TOKEN_TARGETS, None))
    torch.testing.assert_close(mean, LabelSmoother(0.2)({"logits": TOKEN_LOGITS}, TOKEN_TARGETS))


def test_without_options_it_is_the_plain_loss_of_each_example() -> None:
    torch.testing.assert_close(class_losses(LOGITS, TARGETS), cross_entropy(LOGITS, TARGETS))
    torch.testing.assert_close(
        class_losses(TOKEN_LOGITS, TOKEN_TARGETS), token_cross_entropy(TOKEN_LOGITS, TOKEN_TARGETS)
    )


def test_examples_of_a_token_task_count_alike_unless_the_mean_is_over_tokens() -> None:
    training = Training(0.1, class_weights=WEIGHTS)
    assert example_weights(training, TOKEN_TARGETS, None) is None
    weights = example_weights(training, TARGETS, torch.tensor([1.0, 1, 1, 0, 1, 1]))
    torch.testing.assert_close(weights, torch.tensor([0.1, 0.15, 0.2, 0, 0.05, 0.1]))
    block = example_weights(training, TARGETS.view(2, 3), None, clients=True)
    torch.testing.assert_close(block, torch.tensor([[0.1, 0.15, 0.2], [0.2, 0.05, 0.1]]))
