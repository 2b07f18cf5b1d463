"""A personal copy of parameters, which trains and stays with the client while the shared values travel.

For a parameter x the copy is a parameter of its own, `personal.x`. So plans, byte counts, storage and reports treat it
like every other parameter that a client keeps. Forward passes read the shared values; `Model.personal` puts the copy in
their place when a client's own model is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from partita.core import tensors
from partita.core.data import Batch
from partita.core.model import TOWERS, Model, Output, TagError, TokenChoice, layer_tag
from partita.core.plan import Phase, Plan, PlanError, Planner, RoundInfo, share_everything
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors

PERSONAL = "personal"  # the tag of copies, and the first part of their names
PREFIX = PERSONAL + "."


def copy_name(name: str) -> str:
    """Return the name of a parameter's personal copy."""
    return PREFIX + name


def original_name(name: str) -> str:
    """Return the name of the parameter of which `name` is the personal copy; `name` itself if it is none."""
    return name.removeprefix(PREFIX)


def personal_values(params: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the values of the personal copies under the names of their originals."""
    return {name: params[copy] for name in params if (copy := copy_name(name)) in params}


@dataclass(frozen=True, eq=False)
class PersonalCopyModel(Model):
    """A model with personal copies. Forward passes read the shared values.

    A copy has the tag "personal" and the layer and tower of its original, but not its role. So `names("head")` are the
    shared parameters of the head, and a plan that selects by role does not move a copy.

    Attributes:
        base: The model without copies.
        name: The name for messages and records.
        initial: The initial values. A copy starts as its original, in the same memory.
        tags: The tags by name.
    """

    base: Model
    name: str
    initial: Tensors
    tags: Mapping[str, Names]

    def shared(self, params: Tensors) -> Tensors:
        """Return the parameters of the base model: the shared values."""
        return {name: params[name] for name in self.base.initial}

    def personal(self, params: Tensors) -> Tensors:
        return {**params, **personal_values(params)}

    def uses_dropout(self) -> bool:
        return self.base.uses_dropout()

    def compute_in_float32(self, error: BaseException) -> str:
        return self.base.compute_in_float32(error)

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return self.base(self.shared(params), inputs)

    def frozen_weights(self) -> Tensors:
        return self.base.frozen_weights()

    def why_one_by_one(self, inputs: Tensors) -> str:
        return self.base.why_one_by_one(inputs)

    def compiles_by_layer(self) -> bool:
        return self.base.compiles_by_layer()

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        return self.base.losses(out, targets)

    def class_losses(
        self, out: Output, targets: torch.Tensor, label_smoothing: float, class_weights: Sequence[float]
    ) -> torch.Tensor:
        return self.base.class_losses(out, targets, label_smoothing, class_weights)

    def to(self, device: torch.device) -> None:
        self.base.to(device)
        moved = tensors.to(
            {name: value for name, value in self.initial.items() if name not in self.base.initial}, device
        )
        copies = {copy: self.base.initial[name] for name in self.base.initial if (copy := copy_name(name)) in moved}
        self.initial.update({**self.base.initial, **moved, **copies})

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, torch.Tensor]:
        return self.base.attention(self.shared(params), batch, tokens)

    def generate(self, params: Tensors, inputs: Tensors, max_new_tokens: int) -> list[str]:
        return self.base.generate(self.shared(params), inputs, max_new_tokens)

    def decode(self, tokens: torch.Tensor) -> list[str]:
        return self.base.decode(tokens)

    def head_dimensions(self) -> dict[str, tuple[int, int]]:
        return self.base.head_dimensions()

    def skip_layers(self, without: Names) -> PersonalCopyModel:
        return replace(self, base=self.base.skip_layers(without))

    def for_classes(self, classes: tuple[str, ...]) -> PersonalCopyModel:
        return replace(self, base=self.base.for_classes(classes))

    def low_rank(self, rank: int, alpha: float, roles: tuple[str, ...], key: Key) -> Model:
        raise TagError(
            f"{self.name} cannot get low-rank factors, because they need copies too; name the factors first, as in "
            "'lora+ditto'"
        )

    def adapted(self, kind: str, key: Key, **options: Any) -> Model:
        raise TagError(
            f"{self.name} cannot get an adapter, because it needs a copy too; name the adapter first, as in "
            "'lora+ditto', or set [model.adapter]"
        )

    def prompted(self, kind: str, key: Key, **options: Any) -> Model:
        raise TagError(
            f"{self.name} cannot get prompts, because they need copies too; name the prompts first, as in "
            "'promptfl+ditto'"
        )


def add_personal_copy(model: Model, tags: tuple[str, ...] = ()) -> PersonalCopyModel:
    """Return the model with a personal copy of its parameters, which starts with the same values.

    Args:
        model: The model.
        tags: The tags of the parameters to copy. Empty: all parameters.

    Raises:
        TagError: If no parameter has one of the tags, or if the model has a personal copy already.
    """
    if any(PERSONAL in own for own in model.tags.values()):
        raise TagError(f"{model.name} has personal parameters already; use one method that adds them")
    names = model.names(*tags) if tags else model.all_names()
    copied = [name for name in model.initial if name in names]
    return PersonalCopyModel(
        base=model,
        name=f"{model.name} with a personal copy",
        initial={**model.initial, **{copy_name(name): model.initial[name] for name in copied}},
        tags={**model.tags, **{copy_name(name): _copy_tags(model.tags[name]) for name in copied}},
    )


def _copy_tags(tags: Names) -> Names:
    layer = layer_tag(tags)
    return (tags & TOWERS) | {PERSONAL} | ({layer} if layer else set())


@dataclass(frozen=True)
class PlanWithCopy:
    """A planner that adds the personal copies to the plan of the shared parameters.

    A copy trains in the phases of its original and stays with the client. Personal parameters without an original train
    in all phases.

    Attributes:
        shared: The planner of the shared parameters. It does not see the copies.
    """

    shared: Planner = share_everything

    def __call__(self, model: Model, round_info: RoundInfo) -> Plan:
        view = _SharedNames(model)
        if not (copies := model.all_names() - view.all_names()):
            raise PlanError(f"{model.name} has no personal copy; call method.extend(model, key) before the run")
        without_original = copies - {copy_name(name) for name in view.initial}
        return _add_copies(self.shared(view, round_info), copies, without_original)


class _SharedNames(Model):
    """The names of a model without its personal copies, for a planner."""

    def __init__(self, model: Model) -> None:
        self.name = model.name
        self.tags = {name: tags for name, tags in model.tags.items() if PERSONAL not in tags}
        self.initial = {name: model.initial[name] for name in self.tags}


@lru_cache(maxsize=64)  # clients with equal plans then share one object, as in `plan.share`
def _add_copies(plan: Plan, copies: Names, without_original: Names) -> Plan:
    def names(phase: Phase) -> Names:
        return phase.names | (copies & {copy_name(name) for name in phase.names}) | without_original

    phases = tuple(Phase(names(phase), phase.epochs) for phase in plan.phases)
    return Plan(phases, plan.up, plan.down, plan.keep | copies)
