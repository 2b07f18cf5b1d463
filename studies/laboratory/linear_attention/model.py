"""Adapters that run the laboratory's federations on the core: linear attention as a model, clients as a population."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from linear_attention.synthetic import Federation
from linear_attention.theory import Data, Features, Kernel, LabError, attend
from partita.core.client_rule import ClientRule, Context
from partita.core.data import Batch, ClientData
from partita.core.method import Method
from partita.core.model import Model, Output
from partita.core.tensors import Tensors


class LinearAttention(Model):
    """Model Z(H) W. The loss is half the squared error over an example's tokens. `federation` has initial values."""

    name = "linear attention"

    def __init__(self, federation: Federation, features: Features) -> None:
        self.features = features
        self.initial = {
            "query.weight": federation.kernel.query,
            "key.weight": federation.kernel.key,
            "value.weight": federation.value,
        }
        # The value weights are the last layer, so they are also tagged as the head.
        self.tags = {
            "query.weight": frozenset({"query", "layer.0"}),
            "key.weight": frozenset({"key", "layer.0"}),
            "value.weight": frozenset({"value", "head", "layer.0"}),
        }

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        kernel = Kernel(params["query.weight"], params["key.weight"])
        mixed = attend(inputs["h"], kernel, self.features)  # (example, token, width)
        return Output(mixed @ params["value.weight"], mixed.mean(-2))

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        return (out.logits - targets).square().sum((-1, -2)) / 2


@dataclass(frozen=True)
class Ridge(ClientRule):
    """Penalty strength / 2 · |W|² on the value weights. Weight decay would also affect the kernel."""

    strength: float

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> torch.Tensor:
        return self.strength * params["value.weight"].square().sum() / 2


def ridge(strength: float) -> Method:
    """Build a method to compose with others: `compose(fedfrozen(10), ridge(0.01))`."""
    return Method("ridge", client_rules=(Ridge(strength),))


@dataclass(frozen=True)
class Part:
    """Examples of one client."""

    inputs: torch.Tensor  # (example, token, width)
    targets: torch.Tensor  # (example, token, output)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: torch.Tensor) -> Batch:
        return Batch({"h": self.inputs[indices]}, self.targets[indices])


class LabPopulation:
    """The clients of one federation. A client's weight is its number of examples, as in the core.

    Raises:
        LabError: If the data is a batch of federations.
    """

    def __init__(self, data: Data) -> None:
        if data.inputs.dim() != 4:
            raise LabError(f"a population is one federation, not {len(data.inputs)} in a batch; give one of them")
        self.data = data
        self.clients = tuple(f"c{number}" for number in range(len(data.weight)))

    def __getitem__(self, client: str) -> ClientData:
        number = int(client[1:])
        present = self.data.share[number] > 0
        part = Part(self.data.inputs[number][present], self.data.targets[number][present])
        return ClientData(part, part, part)
