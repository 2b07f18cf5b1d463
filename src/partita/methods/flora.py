"""FLoRA: clients train low-rank factors; the server adds the mean of their products to the base weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import Count, Positive, Seed
from partita.core.plan import Plan, RoundInfo, share
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule, average
from partita.core.tensors import Names, Slots, Tensors, add
from partita.core.update import Aggregate, Update
from partita.methods.lora import factors

A, B, W = ".lora_A.weight", ".lora_B.weight", ".weight"  # (rank, in), (out, rank), (out, in)


def flora(
    rank: Count = 8,
    alpha: Positive = 16.0,
    roles: tuple[str, ...] = ("query", "value"),
    head: bool = True,
    seed: Seed = 0,
) -> Method:
    """Build FLoRA: like lora, but each round starts with new factors. B is zero and A is drawn at random.

    Args:
        rank: Rank of the factors.
        alpha: Scale of the product, which is multiplied by alpha / rank.
        roles: Tags of the linear layers that get factors.
        head: Also train and send the task's head.
        seed: Seed of the draws of A.
    """

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        train = factors(model, head)
        return share(train, down=train | {layer + W for layer in layers(train)})

    rule = FloraServer(alpha, seed)
    return Method(
        "flora", plan=plan, server_rule=rule, extend=lambda model, key: model.low_rank(rank, alpha, roles, key)
    )


def layers(names: Iterable[str]) -> list[str]:
    """Return the layers that have a factor among the names."""
    return sorted({name.removesuffix(A).removesuffix(B) for name in names if name.endswith((A, B))})


@dataclass(frozen=True)
class FloraServer(ServerRule):
    """Fold the clients' factors into the base weights.

    The server's B is always zero, so a client's factors add exactly their product to a weight.

    Attributes:
        alpha: The scale of the product, which is multiplied by alpha / rank.
        seed: The seed of the draws of A.
    """

    alpha: float
    seed: int

    def init(self, model: Model) -> Slots:
        return {"flora": {"rounds": torch.tensor(0)}}

    def affected_names(self, model: Model, trained: Names) -> Names:
        return trained | {layer + W for layer in layers(trained)}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        def multiplied(delta: Mapping[str, torch.Tensor]) -> Tensors:
            after, rest = add(server.params, delta), {name: delta[name] for name in delta if not name.endswith((A, B))}
            factors = {layer: (after[layer + B], after[layer + A]) for layer in layers(delta)}
            return rest | {layer + W: self.alpha / len(down) * (up @ down) for layer, (up, down) in factors.items()}

        return average(replace(update, delta=multiplied(update.delta)) for update in updates)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        params, done = super().apply(server, aggregate).params, server.state["flora"]["rounds"]
        for name in (layer + A for layer in layers(params) if layer + W in aggregate.delta):
            numbers = torch.rand(params[name].shape, generator=(Key(self.seed) / int(done) / name).generator())
            params[name] = ((2 * numbers - 1) / numbers.shape[1] ** 0.5).to(params[name])  # as PEFT draws it
        return replace(server, params=params, state={"flora": {"rounds": done + 1}})
