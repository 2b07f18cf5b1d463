"""Predictions for documents whose texts were cut into windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import torch

from partita.core import tensors
from partita.core.data import IGNORE_INDEX, Batch, Examples
from partita.core.model import Forward, Model, Output
from partita.core.tensors import Tensors
from partita.evaluation.evaluator import Predictions


def document_predictions(
    model: Model, params: Tensors, windows: Examples, documents: torch.Tensor, size: int, forward: Forward
) -> Iterator[Predictions]:
    """Yield the predictions for documents, from those for their windows.

    The logits of a document are the mean of its windows' logits. If each token has a target, a document is the
    sequence of its tokens with a target, each from the only window in which it has one.

    Args:
        model: The model.
        params: All its parameters, on the device to evaluate on.
        windows: The windows.
        documents: The document of each window, (window,). Windows of a document follow one another.
        size: Windows in a forward pass, and documents in a batch.
        forward: Runs the model on a batch.
    """
    device = next(iter(params.values())).device
    counts = documents.unique_consecutive(return_counts=True)[1]  # (document,)
    for first, group in zip(_starts(counts, size), counts.split(size), strict=True):
        rows = torch.arange(first, first + int(group.sum()))
        outputs = chain.from_iterable(
            _windows(forward, model, params, windows.take(part), device) for part in rows.split(size)
        )
        joined = [_joined(list(islice(outputs, count))) for count in group.tolist()]
        logits, targets = (_stacked(parts) for parts in zip(*joined, strict=True))
        yield Predictions(logits, targets, model.losses(Output(logits), targets))


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack one tensor per document. Documents with different numbers of tokens are padded."""
    if len({row.shape for row in rows}) == 1:
        return torch.stack(list(rows))
    return torch.nn.utils.rnn.pad_sequence(list(rows), True, 0 if rows[0].is_floating_point() else IGNORE_INDEX)


def _starts(counts: torch.Tensor, size: int) -> list[int]:
    """Return the first window of each batch of `size` documents."""
    starts: list[int] = (counts.cumsum(0) - counts)[::size].tolist()
    return starts


def _windows(
    forward: Forward, model: Model, params: Tensors, batch: Batch, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits and targets of each window, without the tokens that have no target."""
    wanted = batch.targets.to(device)
    found, _ = forward(model, params, tensors.to(batch.inputs, device), wanted)
    for logits, targets in zip(found, wanted, strict=True):
        each_token = logits.ndim > 1  # (token, class)
        scored = targets != IGNORE_INDEX
        yield (logits[scored], targets[scored]) if each_token else (logits, targets)


def _joined(windows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets of a document."""
    logits, targets = zip(*windows, strict=True)
    if logits[0].ndim > 1:
        return torch.cat(logits), torch.cat(targets)
    return torch.stack(logits).mean(0), targets[0]
