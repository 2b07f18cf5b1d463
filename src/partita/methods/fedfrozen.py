"""FedFrozen: full training as a warm-up, then freeze the query and key weights, which define the attention kernel."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import ADAPTERS, Model
from partita.core.options import Count, Positive, Seed, Share, Whole
from partita.core.plan import Plan, RoundInfo, share, share_everything
from partita.core.rng import Key
from partita.core.tensors import Names
from partita.methods.auto_warmup import AutoWarmup

Frozen = Literal["kernel", "value", "mlp", "random"]


def fedfrozen(
    warmup: Whole | Share | Literal["auto"] = 0.3,
    scope: Literal["rest", "value"] = "rest",
    freeze: Frozen = "kernel",
    seed: Seed = 0,
    threshold: Positive | Literal["clients"] = "clients",
    patience: Count = 3,
    max_warmup: Share = 1.0,
) -> Method:
    """Build FedFrozen.

    Args:
        warmup: Length of the warm-up: rounds (int), a fraction of the rounds (float; 1.0 never freezes), or "auto".
        scope: What trains afterwards: "rest" is everything except the frozen set; "value" is only the value
            projections and the head.
        freeze: The frozen set. Values other than "kernel" are for ablations; "random" draws as many parameters of
            the same shapes.
        seed: Seed of the draw for freeze "random".
        threshold: For "auto": freeze when the clients' disagreement on the set exceeds its progress by this factor.
            "clients": 10 (n - 1)^(1/4) for an effective number n of clients in the mean.
        patience: For "auto": number of consecutive rounds above the threshold before freezing.
        max_warmup: For "auto": freeze at the latest after this fraction of the rounds.

    Raises:
        MethodError: If an option is out of range, or if `scope` and `freeze` contradict each other.
    """
    if isinstance(warmup, str):
        if warmup != "auto":
            raise MethodError(f"method.warmup is '{warmup}'; give rounds, a fraction from 0.0 to 1.0, or 'auto'")
    elif warmup < 0 or (isinstance(warmup, float) and warmup > 1):
        raise MethodError(f"method.warmup is {warmup}; give rounds as 0, 1, 2, ... or a fraction from 0.0 to 1.0")
    if scope == "value" and freeze != "kernel":
        raise MethodError(f"method.scope 'value' already says what trains; it cannot go with freeze '{freeze}'")
    if isinstance(threshold, str) and threshold != "clients":
        raise MethodError(f"method.threshold is '{threshold}'; give a number above 0, or 'clients'")
    factor = None if isinstance(threshold, str) else float(threshold)
    if (factor is not None and not factor > 0) or patience < 1 or not 0 <= max_warmup <= 1:
        raise MethodError(
            f"method.threshold, patience and max_warmup are {threshold}, {patience} and {max_warmup}; "
            "give a number above 0, at least one round, and a fraction from 0.0 to 1.0"
        )

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        if warmup == "auto":
            warm = not round_info.signal.get("frozen", 0.0) and round_info.round < round(max_warmup * round_info.rounds)
        else:
            warm = round_info.round < (round(warmup * round_info.rounds) if isinstance(warmup, float) else warmup)
        if warm:
            return share_everything(model, round_info)
        train = (
            _names(model, "value", "head")
            if scope == "value"
            else model.all_names() - frozen_names(model, freeze, seed)
        )
        if not train:
            raise MethodError(
                f"fedfrozen: nothing of {model.name} would train after the warm-up; add other roles to "
                "model.adapter.roles, or freeze less"
            )
        return share(train, down=model.all_names())

    if warmup != "auto":
        return Method("fedfrozen", plan=plan)
    rule = AutoWarmup(lambda model: frozen_names(model, freeze, seed), factor, patience)
    return Method("fedfrozen", plan=plan, server_rule=rule)


def frozen_names(model: Model, freeze: Frozen, seed: int) -> Names:
    """Return the names of the parameters that `freeze` stands for; `seed` is for "random"."""
    kernel = _names(model, "query", "key")
    if freeze == "kernel":
        return kernel
    if freeze != "random":
        return model.names(freeze)
    # Draw shape by shape, so that the ablation freezes exactly as many elements as the kernel has.
    chosen: set[str] = set()
    shapes = {model.initial[name].shape for name in kernel}
    for shape in sorted(shapes, key=tuple):
        candidates = sorted(name for name, value in model.initial.items() if value.shape == shape)
        count = sum(model.initial[name].shape == shape for name in kernel)
        chosen.update((Key(seed) / "freeze" / str(tuple(shape))).sample(candidates, count))
    return frozenset(chosen)


def _names(model: Model, *tags: str) -> Names:
    """Return the names with one of these tags. A model with an adapter may have some of them only."""
    adapted = any(carried & ADAPTERS for carried in model.tags.values())
    found = [tag for tag in tags if adapted and any(tag in carried for carried in model.tags.values())]
    return model.names(*(found or tags))
