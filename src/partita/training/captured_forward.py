"""Forward passes of an evaluation as CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch

from partita.core import tensors
from partita.core.model import Model, logits_and_losses
from partita.core.tensors import Tensors
from partita.core.torch_private import foreach_copy_

WARMUP_PASSES = 2  # eager passes of one shape before a capture: torch selects kernels in the first passes
MAX_SHAPES = 16  # batches of other shapes run eagerly; each captured shape holds its inputs and logits
MAX_LOGITS = 2**26  # more logits take longer to compute than to launch, and would be in memory twice

Scores = tuple[torch.Tensor, torch.Tensor]  # logits and losses
Record = Callable[[Callable[[], Scores], str], tuple[Callable[[], None], Scores] | None]


class CapturedForward:
    """Computes logits and losses of batches: eagerly at first, then by replaying captured graphs, one per shape.

    A graph reads parameters from fixed addresses, so they are copied there. Only passes of the first model are
    captured, which is the one that the server trains.

    Args:
        record: Captures work; returns None if it must run eagerly.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.model: Model | None = None
        self.layout: Hashable = None  # of its parameters
        self.params: Tensors = {}  # what captured passes read
        self.taken = Counter[Hashable]()
        self.captured: dict[Hashable, _Pass | None] = {}

    def __call__(self, model: Model, params: Tensors, inputs: Tensors, targets: torch.Tensor) -> Scores:
        """Return what `logits_and_losses` returns, up to rounding. Call it under `torch.inference_mode`."""
        if self.model is None:
            self.model, self.layout = model, _layout(params)
        if model is not self.model or _layout(params) != self.layout:
            return logits_and_losses(model, params, inputs, targets)
        shape = _layout({**inputs, "targets": targets})
        self.taken[shape] += 1
        if self.taken[shape] <= WARMUP_PASSES or self.captured.get(shape, ()) is None:
            logits, losses = logits_and_losses(model, params, inputs, targets)
            if logits.numel() > MAX_LOGITS:
                self.captured[shape] = None
            return logits, losses
        self.params = self.params or tensors.clone_all(params)
        foreach_copy_(list(self.params.values()), [params[name] for name in self.params])
        if shape not in self.captured:
            self.captured[shape] = self._capture(model, inputs, targets)
        captured = self.captured[shape]
        return logits_and_losses(model, params, inputs, targets) if captured is None else captured(inputs, targets)

    def _capture(self, model: Model, inputs: Tensors, targets: torch.Tensor) -> _Pass | None:
        if sum(known is not None for known in self.captured.values()) >= MAX_SHAPES:
            return None
        held, wanted = tensors.clone_all(inputs), targets.clone()
        replay = self.record(
            lambda: logits_and_losses(model, self.params, held, wanted), f"the evaluation of {model.name}"
        )
        return None if replay is None else _Pass(held, wanted, *replay)


class _Pass:
    """A captured pass: the tensors that it reads and writes."""

    def __init__(self, inputs: Tensors, targets: torch.Tensor, replay: Callable[[], None], scores: Scores) -> None:
        self.inputs, self.targets, self.replay, self.scores = inputs, targets, replay, scores

    def __call__(self, inputs: Tensors, targets: torch.Tensor) -> Scores:
        given = [*(inputs[name] for name in self.inputs), targets]
        foreach_copy_([*self.inputs.values(), self.targets], given)
        self.replay()
        logits, losses = self.scores
        return logits.clone(), losses.clone()  # the next replay overwrites them


def _layout(values: Tensors) -> Hashable:
    return tuple([(name, values[name].shape, values[name].dtype) for name in sorted(values)])
