"""Whether torch.vmap can lift a model's forward function over clients, so that several train in one block."""

from __future__ import annotations

import warnings

import torch

from partita.core.model import Model
from partita.core.tensors import Tensors
from partita.core.torch_private import vmap_fallback_warnings

FALLBACK = "performance drop"  # a part of torch's warning that vmap runs an operation client by client
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the largest number; a wrong result differs by much more


def why_one_by_one(model: Model, inputs: Tensors) -> str:
    """Run the forward pass of one example for two clients at once, and return why that is not possible; "" if it is.

    Args:
        model: The model. Its parameters are not copied.
        inputs: Inputs of a batch, on any device. Only the first example is used.
    """
    device = next(iter(model.initial.values())).device
    one = {name: value[:1].to(device) for name, value in inputs.items()}
    params = {name: value.detach() for name, value in model.initial.items()}
    both = {name: value.expand(2, *value.shape).requires_grad_() for name, value in params.items()}
    given = {name: value.expand(2, *value.shape) for name, value in one.items()}

    def logits(params: Tensors, inputs: Tensors) -> torch.Tensor:
        return model(params, inputs).logits

    with torch.no_grad():
        alone = logits(params, one)
    try:
        with torch.enable_grad(), vmap_fallback_warnings(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            lifted = torch.vmap(logits)(both, given)
    except (RuntimeError, ValueError) as error:
        return f"torch.vmap cannot lift it ({_first_sentence(str(error))})"
    if slow := [str(each.message) for each in seen if FALLBACK in str(each.message)]:
        operation = slow[0].partition("for ")[2].partition(".")[0] or "an operation"
        return f"torch.vmap would run {operation} client by client"
    if alone.is_meta:  # without values, there is nothing to compare
        return ""
    bound = CLOSE.get(alone.dtype, CLOSE[torch.float32]) * max(1.0, float(alone.abs().max()))
    if not bool(((lifted - alone).abs() <= bound).all()):
        return "torch.vmap changes its result"
    return ""


def _first_sentence(text: str) -> str:
    return text.strip().splitlines()[0].partition(". ")[0].rstrip(".")
