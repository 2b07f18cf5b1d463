"""How good a model is on a set of examples."""

from __future__ import annotations

import torch

from partita.core import tree
from partita.core.model import Examples, Model
from partita.core.tree import Tensors

BATCH = 512  # large, since nothing is kept for a backward pass


def score(model: Model, params: Tensors, examples: Examples) -> dict[str, float]:
    """Accuracy and mean loss; an empty set has no scores."""
    if not len(examples):
        return {}
    device = next(iter(params.values())).device
    right = loss = 0.0
    with torch.inference_mode():
        for indices in torch.arange(len(examples)).split(BATCH):
            batch = examples.take(indices)
            targets = batch.targets.to(device)
            out = model(params, tree.to(batch.inputs, device))
            right += float((out.logits.argmax(-1) == targets).sum())
            loss += float(model.losses(out, targets).sum())
    return {"accuracy": right / len(examples), "loss": loss / len(examples)}
