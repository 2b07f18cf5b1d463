"""A toy federation for tests: two attention layers, six clients, milliseconds per round."""

from __future__ import annotations

import math
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from partita.core import tensors
from partita.core.data import Batch, ClientData, Examples, Population
from partita.core.model import Model, Output, TokenChoice
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors


class ToyTransformer(Model):
    """Softmax attention over four tokens, with all tags that methods use.

    Args:
        width: Size of a token's vector.
        layers: Number of layers.
        classes: Number of classes.
        key: Seeds the initial parameters.
    """

    name = "tiny attention"

    def __init__(self, width: int = 6, layers: int = 2, classes: int = 3, key: Key = Key(0)) -> None:  # noqa: B008
        self.width, self.layers = width, tuple(range(layers))  # indices of the layers that are not skipped
        shapes: dict[str, tuple[tuple[int, ...], Names]] = {"embed.weight": ((4, width), frozenset({"embedding"}))}
        for layer in self.layers:
            for role in ("query", "key", "value", "output", "mlp"):
                tags = frozenset({role, f"layer.{layer}"})
                shapes[f"layers.{layer}.{role}.weight"] = ((width, width), tags)
                shapes[f"layers.{layer}.{role}.bias"] = ((width,), tags)
            shapes[f"layers.{layer}.norm.weight"] = ((width,), frozenset({"norm", f"layer.{layer}"}))
        shapes["head.weight"] = ((classes, width), frozenset({"head"}))
        self.tags = {name: tags for name, (_, tags) in shapes.items()}
        self.initial = {
            name: torch.randn(shape, generator=(key / name).generator()) / math.sqrt(shape[-1])
            for name, (shape, _) in shapes.items()
        }

    def to(self, device: torch.device) -> None:
        self.initial = tensors.to(self.initial, device)

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return self._run(params, inputs)[0]

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, torch.Tensor]:
        """Return the attention to the first token for each layer. `tokens` is ignored."""
        with torch.no_grad():
            maps = self._run(params, batch.inputs)[1]
        return {
            f"layer.{layer}": weights[..., 0].mean(-1, keepdim=True)
            for layer, weights in zip(self.layers, maps, strict=True)
        }

    def skip_layers(self, without: Names) -> ToyTransformer:
        other = copy(self)
        other.layers = tuple(layer for layer in self.layers if f"layer.{layer}" not in without)
        return other

    def head_dimensions(self) -> dict[str, tuple[int, int]]:
        """Return (dimension, number of heads) of each projection: one head along dimension 0."""
        return dict.fromkeys(self.names("query", "key", "value"), (0, 1))

    def _run(self, params: Tensors, inputs: Tensors) -> tuple[Output, list[torch.Tensor]]:
        """Return the output and the attention of each layer: (example, query, key)."""
        maps = []
        state = inputs["x"] @ params["embed.weight"]  # (example, token, width)
        for layer in self.layers:

            def linear(role: str, value: torch.Tensor, layer: int = layer) -> torch.Tensor:
                name = f"layers.{layer}.{role}"
                return functional.linear(value, params[f"{name}.weight"], params[f"{name}.bias"])

            normed = functional.layer_norm(state, (self.width,), params[f"layers.{layer}.norm.weight"])
            scores = linear("query", normed) @ linear("key", normed).transpose(-1, -2) / math.sqrt(self.width)
            maps.append(scores.softmax(-1))
            state = state + linear("output", maps[-1] @ linear("value", normed))
            state = state + linear("mlp", torch.tanh(state))
        features = state.mean(-2)
        return Output(functional.linear(features, params["head.weight"]), features), maps

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(out.logits, targets, reduction="none")


@dataclass(frozen=True)
class ToyExamples:
    """Examples in memory."""

    x: torch.Tensor  # (example, token, feature)
    y: torch.Tensor  # (example,)

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: torch.Tensor) -> Batch:
        return Batch({"x": self.x[indices]}, self.y[indices])


class ToyPopulation:
    """Six clients of different sizes, each with its own shift of the inputs."""

    clients = tuple(f"c{number}" for number in range(6))

    def __getitem__(self, client: str) -> ClientData:
        number = int(client[1:])
        draw = (Key(3) / client).generator()
        x = torch.randn(4 + 3 * number, 4, 4, generator=draw) + 0.05 * number
        y = (x.sum((1, 2)) > 0).long() + (x[:, 0, 0] > 0.5).long()
        part = ToyExamples(x, y)
        return ClientData(part, part, part)


class Float64Model(Model):
    """Wraps a model, with its parameters in float64, frozen ones too."""

    def __init__(self, model: Model) -> None:
        self.model, self.name, self.tags = _with_wide_module(model), f"{model.name} in float64", model.tags
        self.initial = {name: value.double() for name, value in model.initial.items()}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return self.model(params, inputs)

    def personal(self, params: Tensors) -> Tensors:
        return self.model.personal(params)

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, torch.Tensor]:
        return self.model.attention(params, batch, tokens)

    def skip_layers(self, without: Names) -> Float64Model:
        return Float64Model(self.model.skip_layers(without))

    def head_dimensions(self) -> dict[str, tuple[int, int]]:
        return self.model.head_dimensions()

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        return self.model.losses(out, targets)


def _with_wide_module(model: Model) -> Model:
    """Return a copy whose frozen parameters are in float64; the model itself if it has none in a module."""
    inner = getattr(model, "base", model)  # of a model with personal copies
    module = getattr(inner, "module", None)
    if not isinstance(module, torch.nn.Module) or next(module.parameters(), None) is None:
        return model
    wide = deepcopy(model)
    inside: Any = getattr(wide, "base", wide)
    inside.module.double()
    return wide


@dataclass(frozen=True)
class Float64Examples:
    """Wraps examples, with their inputs in float64."""

    examples: Examples

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, indices: torch.Tensor) -> Batch:
        batch = self.examples.take(indices)
        wide = {name: value.double() if value.is_floating_point() else value for name, value in batch.inputs.items()}
        return Batch(wide, batch.targets)


class Float64Population:
    """Wraps a population, with all inputs in float64."""

    def __init__(self, population: Population) -> None:
        self.population, self.clients = population, population.clients

    def __getitem__(self, client: str) -> ClientData:
        data = self.population[client]
        return ClientData(Float64Examples(data.train), Float64Examples(data.validation), Float64Examples(data.test))


@dataclass(frozen=True)
class PooledExamples:
    """All examples of a batch in memory."""

    batch: Batch

    def __len__(self) -> int:
        return len(self.batch.targets)

    def take(self, indices: torch.Tensor) -> Batch:
        inputs = {name: value[indices] for name, value in self.batch.inputs.items()}
        return Batch(inputs, self.batch.targets[indices])


class PooledPopulation:
    """The training data of all clients, pooled into a single client."""

    clients = ("pooled",)

    def __init__(self, population: Population) -> None:
        parts = [
            population[client].train.take(torch.arange(len(population[client].train))) for client in population.clients
        ]
        inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs}
        part = PooledExamples(Batch(inputs, torch.cat([part.targets for part in parts])))
        self.data = ClientData(part, part, part)

    def __getitem__(self, client: str) -> ClientData:
        return self.data
