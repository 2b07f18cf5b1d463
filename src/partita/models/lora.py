"""Low-rank adaptation (LoRA) of the linear layers of a transformers module, with PEFT."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita.core import serialization
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.core.torch_private import own_parameters
from partita.models import ModelError
from partita.models.adapter import FunctionalModel, ParameterSlot

FACTORS = ("lora_A", "lora_B")  # (rank, in) and (out, rank)
ADAPTER = "default"  # PEFT's name for a single adapter


@dataclass(frozen=True, eq=False)
class LowRankModel(FunctionalModel):
    """A model whose adapted weights are W + (alpha / rank) B A.

    Attributes:
        base: The model without factors.
        rank: Rank of the factors.
        alpha: Scale of the factors.
        sites: Paths of the adapted linear layers.
    """

    base: FunctionalModel
    rank: int
    alpha: float
    sites: tuple[str, ...]

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.base.module.to(device)  # type: ignore[arg-type]
        self.base.initial.update({name: self.initial[name] for name in self.base.initial})

    def merged(self, params: Tensors) -> Tensors:
        """Add the factors to the weights.

        Returns:
            Parameters with which the base model computes the same function.

        Raises:
            ModelError: If an adapted weight is permanently frozen and not part of the parameters.
        """
        result = {name: params[name] for name in self.base.initial}
        for site in self.sites:
            name = f"{site}.weight"
            if name not in result:
                raise ModelError(f"'{name}' is permanently frozen and cannot be merged; use save_pretrained")
            A, B = (params[f"{site}.{factor}.weight"] for factor in FACTORS)
            result[name] = result[name] + (self.alpha / self.rank) * (B @ A)
        return result

    def save_merged(self, params: Tensors, folder: str | Path) -> None:
        """Write a plain transformers folder, which loads without partita and PEFT."""
        self.base.save_pretrained(self.merged(params), folder)

    def save_pretrained(self, params: Tensors, folder: str | Path) -> None:
        """Write a PEFT folder with the factors and the head. It fits the base model as it was loaded.

        Raises:
            ModelError: If any other parameter has changed.
        """
        # PEFT saves whole modules and would break the tie of tied ones.
        head = {name for name in self._tagged("head") - self._tagged("embedding") if "." in name}
        rest = self.initial.keys() - head - self._tagged("lora")
        if changed := [name for name in sorted(rest) if not torch.equal(params[name], self.initial[name])]:
            raise ModelError(
                f"'{changed[0]}' has changed since {self.name} was loaded, but a PEFT folder holds only the factors "
                "and the head; use save_merged, which writes the whole model"
            )
        config = _config(self.rank, self.alpha, self.sites)
        config.modules_to_save = sorted({name.rpartition(".")[0] for name in head}) or None
        config.base_model_name_or_path = self.module.name_or_path or None
        config.inference_mode = True
        config.save_pretrained(str(folder))
        named = {f"base_model.model.{name}": params[name] for name in sorted(params.keys() - rest)}  # PEFT's names
        (Path(folder) / "adapter_model.safetensors").write_bytes(serialization.save(named, {"format": "pt"}))
        self.save_processor(folder)

    def _tagged(self, tag: str) -> Names:
        return frozenset(name for name, tags in self.tags.items() if tag in tags)


def low_rank(adapted: FunctionalModel, rank: int, alpha: float, roles: tuple[str, ...], key: Key) -> LowRankModel:
    """Return a copy of a model with low-rank factors at the linear layers of the given roles.

    A is drawn as in PEFT and B is zero, so the copy initially computes the same function.

    Args:
        adapted: Model to copy.
        rank: Rank of the factors.
        alpha: Scale; factors are multiplied by alpha / rank.
        roles: Tags of the linear layers to adapt.
        key: Key for the initial values of A.

    Raises:
        ModelError: If the model already has factors, or rank, alpha or roles are invalid.
    """
    if isinstance(adapted, LowRankModel):
        raise ModelError(f"{adapted.name} already has low-rank factors; use the model without them")
    if not alpha > 0:
        raise ModelError(f"alpha is {alpha}; it must be above 0")
    weights = {**dict(adapted.module.named_parameters()), **adapted.initial}  # the module holds the frozen parameters
    every_tag = {**adapted.frozen_tags, **adapted.tags}
    sites = _sites(adapted, every_tag, roles)
    layers: dict[str, Any] = dict(adapted.module.named_modules())
    initial, tags = dict(adapted.initial), dict(adapted.tags)
    for site in sites:
        weight, layer = weights[f"{site}.weight"], layers[site]
        out, into = layer.out_features, layer.in_features  # a quantized weight has another shape
        if not 1 <= rank <= min(out, into):
            raise ModelError(f"rank is {rank}, but '{site}' is {out} x {into}; use a rank from 1 to {min(out, into)}")
        A, B = (f"{site}.{factor}.weight" for factor in FACTORS)
        # In float32 like all trainable parameters, whatever the dtype of the frozen weight.
        initial[A] = _uniform(rank, into, key / A).to(weight.device)
        initial[B] = torch.zeros(out, rank, device=weight.device)
        tags[A] = tags[B] = every_tag[f"{site}.weight"] | {"lora"}
    module, parameter_slots = _injected(adapted, _config(rank, alpha, sites), sites)
    own = {item.name: getattr(adapted, item.name) for item in fields(adapted)}
    changed = {"module": module, "initial": initial, "tags": tags, "parameter_slots": parameter_slots}
    return LowRankModel(**{**own, **changed}, base=adapted, rank=rank, alpha=alpha, sites=sites)


def _sites(adapted: FunctionalModel, tags: Mapping[str, Names], roles: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of the linear layers with these roles. The head is excluded because it trains in full."""
    linear = {
        path: carried
        for path, part in adapted.module.named_modules()
        if isinstance(part, nn.Linear) and "head" not in (carried := tags.get(f"{path}.weight", {"head"}))
    }
    known = {tag for carried in linear.values() for tag in carried if not tag.startswith("layer.")}
    if not roles:
        raise ModelError(f"roles is empty; choose from: {', '.join(sorted(known))}")
    for role in roles:
        if role not in known:
            remedy = closest_match(role, known) if known else "it has no torch.nn.Linear outside its head"
            raise ModelError(f"roles: no linear layer of {adapted.name} is tagged '{role}'; {remedy}")
    return tuple(site for site, carried in linear.items() if not carried.isdisjoint(roles))


def _uniform(rank: int, into: int, key: Key) -> Tensor:
    """Draw from the uniform distribution on ±1 / √in, as PEFT does."""
    return nn.init.kaiming_uniform_(torch.empty(rank, into), a=math.sqrt(5), generator=key.generator())


def _injected(
    adapted: FunctionalModel, config: Any, sites: Sequence[str]
) -> tuple[Any, dict[str, tuple[ParameterSlot, ...]]]:
    """Return a copy of the module with PEFT's layers, and the parameter slots of the copy.

    PEFT wraps a layer without changing it, so the slots of its parameters stay valid.
    """
    shared: dict[int, Any] = {id(value): value for value in adapted.module.parameters()}  # not frozen parameters
    shared[id(adapted.draws)] = adapted.draws  # the copy's dropout layers read the seeds that the model sets
    module, parameter_slots = copy.deepcopy((adapted.module, dict(adapted.parameter_slots)), shared)
    _fill(parameter_slots, adapted.initial)  # PEFT reads the weights
    with torch.random.fork_rng(devices=[]):  # PEFT draws its own factors from the global generator
        _peft().inject_adapter_in_model(config, module, ADAPTER)
    for site in sites:
        for factor in FACTORS:
            owner = own_parameters(module.get_submodule(f"{site}.{factor}.{ADAPTER}"))
            parameter_slots[f"{site}.{factor}.weight"] = ((owner, "weight"),)
    _fill(parameter_slots, dict.fromkeys(parameter_slots))
    return module, parameter_slots


def _fill(parameter_slots: Mapping[str, tuple[ParameterSlot, ...]], values: Mapping[str, Tensor | None]) -> None:
    for name, slots in parameter_slots.items():
        for owner, leaf in slots:
            owner[leaf] = values[name]


def _config(rank: int, alpha: float, sites: Sequence[str]) -> Any:
    return _peft().LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(sites), lora_dropout=0.0)


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ModelError("low-rank factors need the package 'peft': pip install 'partita[lora]'") from error
    return peft
