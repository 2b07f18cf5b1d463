"""FedTP: a hypernetwork on the server generates each client's query, key and value weights; the rest is shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from partita.core.memory import require
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.options import Count, NotNegative, Seed, Whole
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Mean, Names, Slots, Tensors, add, scale
from partita.core.update import Aggregate, Update


@dataclass(frozen=True)
class HypernetworkServer(ServerRule):
    """Generate each weight as w_i = w_start + H f(z_i) + b, with z_i the client's embedding and f a small network.

    A client's delta serves as the negative gradient of its generated weights. The chain rule carries it to H, b, f and
    z_i.

    Attributes:
        lr: The learning rate of the hypernetwork and the embeddings.
        embedding: The size of z_i.
        hidden: The width of f.
        seed: The seed of their initial values.
    """

    lr: float
    embedding: int
    hidden: int
    seed: int

    def init(self, model: Model) -> Slots:
        generated, key = sorted(model.names("query", "key", "value")), Key(self.seed) / "fedtp"
        numbers = self.hidden * (self.embedding + self.hidden + sum(model.initial[name].numel() for name in generated))
        require(4 * numbers, "the hypernetwork of fedtp", "lower method.hidden or method.embedding")
        sizes = {"in": (self.hidden, self.embedding), "out": (self.hidden, self.hidden)}
        trunk = {f"{part}.bias": torch.zeros(self.hidden) for part in sizes}
        for part, size in sizes.items():
            drawn = torch.randn(size, generator=(key / part).generator())
            trunk[f"{part}.weight"] = drawn / size[1] ** 0.5
        return {
            "trunk": trunk,
            # Zero, so that every client starts from the loaded model, pretrained or not.
            "maps": {
                name: model.initial[name].new_zeros(model.initial[name].numel(), self.hidden) for name in generated
            },
            "shift": {name: torch.zeros_like(model.initial[name]) for name in generated},
        }

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        params, _ = super().send(server, client, names)
        features = _features(server.state["trunk"], self._embedding(server, client))
        for name in server.state["maps"].keys() & names:
            generated = (server.state["maps"][name] @ features.to(params[name])).view_as(params[name])
            params[name] = params[name] + (generated + server.state["shift"][name])
        return params, {}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        maps, trunk = server.state["maps"], server.state["trunk"]
        shared, embedding_steps, moved = Mean(), Mean(), {"maps": Mean(), "shift": Mean(), "trunk": Mean()}
        for update in updates:
            own = {name: value for name, value in update.delta.items() if name in maps}
            shared.add({name: value for name, value in update.delta.items() if name not in maps}, update.weight)
            leaves = {**trunk, "z": self._embedding(server, update.client)}
            leaves = {name: value.detach().requires_grad_() for name, value in leaves.items()}
            features = _features(leaves, leaves["z"])
            feature_grad = torch.zeros_like(features)
            for name, value in own.items():
                feature_grad += (maps[name].T @ value.flatten()).to(features)
            grads = torch.autograd.grad(features, list(leaves.values()), feature_grad)
            steps = dict(zip(leaves, grads, strict=True))
            embedding_steps.add({update.client: steps.pop("z")}, update.weight)
            outer = {name: torch.outer(value.flatten(), features.detach().to(value)) for name, value in own.items()}
            moved["maps"].add(outer, update.weight)
            moved["shift"].add(own, update.weight)
            moved["trunk"].add(steps, update.weight)
        total = sum(embedding_steps.weight.values()) or 1.0
        slots = {slot: mean.value for slot, mean in moved.items()}
        slots["embedding"] = embedding_steps.over(total)
        return Aggregate(shared.value, slots, len(embedding_steps.weight))

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        known = {client: self._embedding(server, client) for client in aggregate.slots["embedding"]}
        state = {**server.state, "embedding": {**server.state.get("embedding", {}), **known}}
        state = {slot: add(part, scale(aggregate.slots[slot], self.lr)) for slot, part in state.items()}
        return replace(super().apply(server, aggregate), state=state)

    def _embedding(self, server: Server, client: str) -> torch.Tensor:
        if client in (known := server.state.get("embedding", {})):
            return known[client]
        drawn = torch.randn(self.embedding, generator=(Key(self.seed) / "fedtp" / "client" / client).generator())
        return drawn.to(server.state["trunk"]["in.bias"])


def _features(trunk: Tensors, embedding: torch.Tensor) -> torch.Tensor:
    inner = torch.nn.functional.relu(torch.nn.functional.linear(embedding, trunk["in.weight"], trunk["in.bias"]))
    return torch.nn.functional.linear(inner, trunk["out.weight"], trunk["out.bias"])


def fedtp(lr: NotNegative = 0.05, embedding: Count = 8, hidden: Whole = 32, seed: Seed = 0) -> Method:
    """Build FedTP.

    Args:
        lr: Learning rate of the hypernetwork.
        embedding: Size of a client's embedding.
        hidden: Width of the hypernetwork.
        seed: Seed of the initial hypernetwork and embeddings.

    Raises:
        MethodError: If `embedding` is below 1 or `hidden` is below 0.
    """
    if embedding < 1 or hidden < 0:
        raise MethodError(f"method.embedding is {embedding} and method.hidden {hidden}; give 1 or more, and 0 or more")
    return Method("fedtp", server_rule=HypernetworkServer(lr, embedding, hidden, seed))
