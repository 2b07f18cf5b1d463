"""The compiler can follow what partita adds to a module, and it computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers.modeling_outputs import ImageClassifierOutput

from partita.core.keyed_bits import example_seeds
from partita.core.layer_compiler import compiled_layers
from partita.core.rng import Key
from partita.models.architectures.general import GENERAL, HeadInputs
from partita.models.dropout import use_keyed_dropout
from partita.models.layer_forward import use_layer_forward
from partita.models.split_qkv import SplitQKV
from partita.models.torch_functions import resized
from partita.models.transformers_experts import use_gradients

STATES = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))  # (example, token, width)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    return torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, states: Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.head(self.base_model(states)))


@pytest.mark.slow
def test_features_of_a_head() -> None:
    module = Classifier()
    HeadInputs(module)
    out = compiled(lambda: GENERAL.heads["image"](module, {"states": STATES}))()
    torch.testing.assert_close(out.features, module.base_model(STATES).mean(1))


def test_features_are_held_only_while_a_head_runs() -> None:
    """Also in a copy, as for adapters of other ranks."""
    module = Classifier()
    HeadInputs(module)
    for each in (module, copy.deepcopy(module)):
        out = GENERAL.heads["image"](each, {"states": STATES})
        assert torch.equal(out.features, module.base_model(STATES).mean(1))
        each(STATES)
        assert each.head_inputs.first is None


class GradientCheckpointingLayer(nn.Module):  # which makes its subclasses layers
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.25)

    def forward(self, states: Tensor) -> Tensor:
        return self.dropout(states)


class Decoder(nn.Module):
    """Drops by function, and drops whole layers, as BART does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GradientCheckpointingLayer(), GradientCheckpointingLayer()])
        self.dropout, self.layerdrop = 0.5, 0.0

    def forward(self, states: Tensor) -> Tensor:
        states = nn.functional.dropout(states, p=self.dropout, training=self.training)
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            states = layer(states)
        return states


def dropping() -> tuple[Decoder, Any]:
    module = Decoder().eval()
    draws = use_keyed_dropout(module)
    use_layer_forward(module, draws, recomputes=False)
    return module, draws


@pytest.mark.slow
def test_dropout_of_any_number_of_examples() -> None:
    """Also where rows are several times the examples."""
    module, draws = dropping()

    def drop(states: Tensor, seeds: Tensor) -> Tensor:
        with draws.using(seeds):
            return module(states)

    of_all = compiled(drop, dynamic=True)
    for examples in (6, 3):
        seeds = example_seeds([Key(1)], 0, torch.arange(examples))[0]
        assert torch.equal(of_all(STATES, seeds), drop(STATES, seeds))
    assert not torch.equal(drop(STATES, seeds), STATES)


def test_layers_are_compiled_while_torch_has_its_own_functions() -> None:
    """The compiler looks them up when it makes its first program."""
    module, draws = dropping()
    seen = []
    own = functional.dropout, torch.rand

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*parts: Any) -> Any:
            seen.append((functional.dropout, torch.rand))
            return function(*parts)

        return call

    with draws.using(example_seeds([Key(1)], 0, torch.arange(6))[0]):
        plain = module(STATES)
    with draws.using(example_seeds([Key(1)], 0, torch.arange(6))[0]), compiled_layers(compiler):
        assert torch.equal(module(STATES), plain)
    assert seen == [own, own]
    assert (functional.dropout, torch.rand) == own


@pytest.mark.slow
def test_fused_projections_of_any_number_of_examples() -> None:
    """torch before 2.13 has no product for it under vmap."""
    fused = SplitQKV(nn.Linear(8, 24), tuple(torch.arange(24).split(8)))
    params = {name: torch.stack([value, -value]).detach().requires_grad_() for name, value in fused.named_parameters()}
    plain = torch.vmap(partial(functional_call, fused))
    of_all = compiled(plain, dynamic=True)
    for examples in (6, 3):
        states = STATES[:examples].expand(2, -1, -1, -1)
        torch.testing.assert_close(of_all(params, states), plain(params, states))


@pytest.mark.slow
def test_gradients_of_experts() -> None:
    """The compiler does not see how many states each expert has."""
    use_gradients()
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(6, 4, generator=draw, requires_grad=True)
    weight = torch.randn(3, 4, 5, generator=draw, requires_grad=True)
    ends = torch.tensor([2, 2, 6])
    product = torch.compile(torch.ops.transformers.grouped_mm_fallback, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(product(states, weight, ends).square().sum(), (states, weight))
    plain = torch.cat([states[:2] @ weight[0], states[2:] @ weight[2]])
    torch.testing.assert_close(found, torch.autograd.grad(plain.square().sum(), (states, weight)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_resizing_of_position_embeddings() -> None:
    value = STATES[None]
    options = {"mode": "bicubic", "align_corners": False}
    found = compiled(lambda value: resized(value, size=(5, 9), **options))(value)
    torch.testing.assert_close(found, functional.interpolate(value, (5, 9), **options))
