"""Dropout that draws from the seeds of the examples instead of torch's global generator (decision 0018)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, cast

import torch
from torch.nn import functional

from partita.core.keyed_bits import keep_factors, place_id, place_tensor, random_words
from partita.models import ModelError
from partita.models.vmap_layers import is_layer

_OTHER_DROPOUT = (
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)
TOKENS_FIRST = ("xlnet",)  # types whose states are (token, example, width)


@dataclass(eq=False)
class DropoutDraws:
    """What all dropout layers of a model share: the seeds of the forward pass that is running.

    Attributes:
        seeds: The seed of each example, (example,); None outside training, where nothing is dropped.
        calls: By place, the number of draws so far in this forward pass.
        in_layer: Whether a program for all layers that are alike runs. `calls` then has names inside the layer, and
            places are tensors.
        found: Whether a part of the model draws from the seeds.
        left_out: Parts of the model that drop nothing, because their draws cannot come from seeds, in words.
        replaced: Functions of torch that are replaced while a module runs, innermost last.
    """

    seeds: torch.Tensor | None = None
    calls: dict[int | str, int] = field(default_factory=dict)
    in_layer: bool = False
    found: bool = True
    left_out: tuple[str, ...] = ()
    replaced: list[tuple[Any, Any]] = field(default_factory=list)

    @contextmanager
    def using(self, seeds: torch.Tensor | None) -> Iterator[None]:
        """Draw from `seeds` inside the block."""
        before = self.seeds, self.calls
        self.seeds, self.calls = seeds, {}
        try:
            yield
        finally:
            self.seeds, self.calls = before

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Draw nothing inside the block, where torch has its own functions, as the compiler expects."""
        before = self.seeds, self.calls, self.in_layer, self.replaced
        functions = functional.dropout, torch.rand
        functional.dropout, torch.rand = self.replaced[0] if self.replaced else functions
        self.seeds, self.calls, self.replaced = None, {}, []
        try:
            yield
        finally:
            self.seeds, self.calls, self.in_layer, self.replaced = before
            functional.dropout, torch.rand = functions

    def factors(self, part: Any, rate: float, value: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return the factors of a dropout.

        Args:
            part: The part of the model that drops, with its `place`.
            rate: The probability to drop.
            value: The tensor whose dtype the factors get. Its first dimension is the example, or holds several rows of
                each example, one example after the other.
            sizes: The sizes of the dimensions after the first.

        Returns:
            The factors, of shape (row, *sizes); ones, if the rows are not those of the examples.
        """
        assert self.seeds is not None
        examples = self.seeds.shape[0]
        rows = value.shape[0] // examples
        if rows * examples != value.shape[0]:
            warnings.warn(
                f"a dropout of the model gets {value.shape[0]} rows for {examples} examples, so its masks "
                "cannot be drawn by example; it drops nothing",
                stacklevel=2,
            )
            return torch.ones(value.shape[0], *sizes, dtype=value.dtype, device=value.device)
        name: int | str = part.name_in_layer if self.in_layer else part.place
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        place: int | torch.Tensor = part.place_tensor if self.in_layer else part.place
        if rows == 1:
            return keep_factors(random_words(self.seeds, place + call, sizes), rate, value.dtype)
        return keep_factors(random_words(self.seeds, place + call, (rows, *sizes)).flatten(0, 1), rate, value.dtype)


class KeyedDropout(torch.nn.Dropout):
    """nn.Dropout that draws from the seeds of the examples, and drops nothing without seeds."""

    draws: DropoutDraws
    place: int
    tokens_first: bool = False  # whether inputs of three dimensions are (token, example, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.tokens_first and inputs.ndim == 3:
            return _dropped(self, inputs.transpose(0, 1), self.p).transpose(0, 1)
        return _dropped(self, inputs, self.p)


class KeyedDropPath(torch.nn.Module):
    """Stochastic depth: sets a whole residual branch to zero, for each example with probability `drop_prob`."""

    draws: DropoutDraws
    place: int
    drop_prob: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.draws.seeds is None:
            return hidden_states
        factors = self.draws.factors(self, self.drop_prob, hidden_states, ())
        return hidden_states * factors.view(-1, *[1] * (hidden_states.ndim - 1))


def attention_factors(module: torch.nn.Module, rate: float, query: torch.Tensor, keys: int) -> torch.Tensor | None:
    """Return the dropout factors of attention probabilities, (example, head, query, key); None outside training.

    Args:
        module: The attention module.
        rate: The probability to drop.
        query: (example, head, token, width).
        keys: The number of keys.

    Raises:
        ModelError: If the module is in train mode without keyed dropout.
    """
    draws = getattr(module, "draws", None)
    if draws is None:
        raise ModelError(
            f"{type(module).__name__} uses attention dropout {rate}, which draws from the global random state; "
            "put the module in eval mode"
        )
    if draws.seeds is None:
        return None
    factors: torch.Tensor = draws.factors(module, rate, query, (query.shape[1], query.shape[2], keys))
    return factors


def use_keyed_dropout(module: torch.nn.Module) -> DropoutDraws | None:
    """Let the dropout of a module in eval mode draw from seeds. Changes the module in place.

    Returns:
        The draws that all its dropout layers share; None if the module has no dropout.
    """
    draws, left_out = DropoutDraws(), list[str]()
    found, tokens_first = False, getattr(getattr(module, "config", None), "model_type", "") in TOKENS_FIRST
    for path, part in module.named_modules():
        named = _names_in_forward(type(part))
        if isinstance(part, _OTHER_DROPOUT) and part.p > 0:
            left_out.append(f"{path} ({type(part).__name__})")
        elif type(part) is torch.nn.Dropout and part.p > 0:
            found = key_dropout(part, draws, path)
            part.tokens_first = tokens_first  # type: ignore[assignment]
        elif type(part).__name__.endswith("DropPath") and getattr(part, "drop_prob", None):
            part.__class__ = KeyedDropPath
            found = _attach(part, draws, path)
        elif "ALL_ATTENTION_FUNCTIONS" in named and (_own_rates(part) or _child_rates(part)):
            part.training = True  # it passes its rate to the attention function, which draws
            if {"functional", "dropout"} <= named:  # of its output
                _draw_functional_dropout(part)
            found = _attach(part, draws, path)
        elif "training" in named and (rates := [rate for rate in _own_rates(part) if rate in named]):
            if "layerdrop" in rates or not {"functional", "dropout"} <= named:
                left_out.append(f"{path} ({type(part).__name__}: {', '.join(rates)})")
            else:
                part.training = True
                _draw_functional_dropout(part)
                found = _attach(part, draws, path)
    draws.found, draws.left_out = found, tuple(left_out)
    return draws if found or left_out else None


def key_dropout(part: torch.nn.Dropout, draws: DropoutDraws, path: str) -> bool:
    """Turn a dropout layer into a KeyedDropout at this place, in place, and return True."""
    part.__class__ = KeyedDropout
    return _attach(part, draws, path)


def _attach(part: torch.nn.Module, draws: DropoutDraws, path: str) -> bool:
    part.draws, part.place = draws, place_id(path)  # type: ignore[assignment]
    part.register_buffer("place_tensor", place_tensor(place_id(path)), persistent=False)
    return True


def _dropped(part: Any, inputs: torch.Tensor, rate: float) -> torch.Tensor:
    if part.draws.seeds is None or rate == 0:
        return inputs
    factors: torch.Tensor = part.draws.factors(part, rate, inputs, tuple(inputs.shape[1:]))
    return inputs * factors


def _own_rates(part: torch.nn.Module) -> list[str]:
    """The names of a module's own dropout rates above 0."""
    return [name for name, value in vars(part).items() if "drop" in name and isinstance(value, float) and value > 0]


def _child_rates(part: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.Dropout) and child.p > 0 for child in part.children())


def _names_in_forward(kind: type) -> set[str]:
    """The names that the code of `forward` reads."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    return _names_in(code) if code else set()


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def _draw_functional_dropout(part: torch.nn.Module) -> None:
    """Let `nn.functional.dropout` draw from the seeds during the forward pass of a module, which is in train mode.

    Modules with LayerDrop compare `torch.rand` with its rate in train mode, also if the rate is 0. They get ones there.
    """
    if is_layer(part):  # runs by `LayerForward`
        part.drops_by_function = True  # type: ignore[assignment]
        return
    part.register_forward_pre_hook(_replace_functions)
    part.register_forward_hook(_restore_functions, always_call=True)  # also after an error


@contextmanager
def functional_dropout(layer: torch.nn.Module) -> Iterator[None]:
    """Let `nn.functional.dropout` draw from the seeds inside the block, if the layer calls it."""
    if not getattr(layer, "drops_by_function", False):
        yield
        return
    _replace_functions(layer, ())
    try:
        yield
    finally:
        _restore_functions(layer, (), None)


def _replace_functions(part: Any, inputs: Any) -> None:
    part.draws.replaced.append((functional.dropout, torch.rand))
    functional.dropout = partial(_functional_dropout, part)
    torch.rand = cast(Any, _no_draws)


def _restore_functions(part: Any, inputs: Any, output: Any) -> None:
    functional.dropout, torch.rand = part.draws.replaced.pop()


def _no_draws(*sizes: Any, **options: Any) -> Any:
    """Return ones; without sizes a number, so that the compiler knows how it compares with a rate of LayerDrop."""
    return 1.0 if sizes == ([],) else torch.ones(*sizes, **options)


def _functional_dropout(
    part: Any, value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return _dropped(part, value, p if training else 0.0)
