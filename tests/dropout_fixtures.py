"""The same dropout masks in a plain transformers module, as a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from partita.core.keyed_bits import keep_factors, place_id, random_words


@contextmanager
def injected_masks(module: nn.Module, seeds: Callable[[], Tensor]) -> Iterator[None]:
    """Let every `nn.functional.dropout` in a module in train mode use the masks of the module that calls it.

    Args:
        module: A module of transformers with eager attention.
        seeds: Returns the seeds of the batch that is running.
    """
    running: list[str] = []
    calls = Counter[str]()
    hooks = [module.register_forward_pre_hook(lambda *_: calls.clear())]
    for path, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
        hooks.append(part.register_forward_hook(lambda *_: (running.pop(), None)[1]))

    def dropout(value: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return value
        place = place_id(running[-1]) + calls[running[-1]]
        calls[running[-1]] += 1
        words = random_words(seeds(), place, tuple(value.shape[1:]))
        return value * keep_factors(words, p, value.dtype)

    before: Any = functional.dropout
    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = before
        for hook in hooks:
            hook.remove()
