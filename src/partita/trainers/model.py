"""The model of a Trainer: the names, tags and initial values of its parameters, without a forward pass."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from partita.core.model import Model, Output, TagError
from partita.core.tensors import Names, Tensors
from partita.models import ModelError, split_qkv
from partita.models.architectures import tags_of

ATTENTION = ("query", "key", "value")
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # of activation checkpointing and of torch.compile


class TrainerModel(Model):
    """Names and tags the parameters of a module. Those that require gradients can train and travel.

    Names are those of the module. For a model of PEFT they are those that partita gives its own adapters: without
    `base_model.model` and the name of the adapter.

    Args:
        module: The module that the Trainer trains.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        config, self.module = getattr(module, "config", None), module
        self.name = getattr(config, "name_or_path", "") or type(_base(module)).__name__
        self.parameters = named_parameters(module)
        tags = _tags(module, self.parameters)
        free = [name for name, value in self.parameters.items() if value.requires_grad]
        self.initial = {name: self.parameters[name].detach().to("cpu", copy=True) for name in free}
        self.tags = {name: tags[name] for name in free}
        self.frozen_tags = {name: own for name, own in tags.items() if name not in self.tags}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        raise TagError(f"{self.name} belongs to a Trainer, which runs it; partita cannot call it")

    def trained(self, params: Tensors) -> torch.nn.Module:
        """Return a copy of the module with these parameters."""
        module = copy.deepcopy(self.module).eval()
        named = named_parameters(module)
        with torch.no_grad():
            for name, value in params.items():
                named[name].copy_(value)
        return module

    def frozen_weights(self) -> Tensors:
        return {name: self.parameters[name].detach().cpu() for name in self.frozen_tags}


class TakenApart(Model):
    """A model in which each fused projection has three parameters, to see whether a plan treats them alike."""

    def __init__(self, model: Model) -> None:
        self.name, self.initial, self.tags, self.frozen_tags = model.name, {}, {}, model.frozen_tags
        self.parts: dict[str, Names] = {}
        for name, value in model.initial.items():
            roles = [role for role in ATTENTION if role in model.tags[name]]
            names = {f"{name} ({role})": role for role in roles} if len(roles) > 1 else {name: ""}
            for each, role in names.items():
                self.initial[each] = torch.empty_like(value, device="meta")
                self.tags[each] = model.tags[name] - {*roles} | {role} if role else model.tags[name]
            if len(names) > 1:
                self.parts[name] = frozenset(names)


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by the names that the federation uses, in the module's order."""
    named = dict(module.named_parameters())
    plain = {path: _plain_name(module, path) for path in named}
    counts = list(plain.values())
    return {plain[path] if counts.count(plain[path]) == 1 else path: value for path, value in named.items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU. Of a tensor that is sharded, all processes call this together, in the same order."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().to("cpu", copy=True)


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor, which all processes hold whole, on the device of another; sharded like it if shapes agree."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value.to(like.device)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _adapters(module: torch.nn.Module) -> dict[str, str]:
    """Return the kind of each adapter of PEFT by its name: "lora"."""
    found = getattr(module, "peft_config", None) or {}
    return {name: str(getattr(each.peft_type, "value", each.peft_type)).lower() for name, each in found.items()}


def _base(module: Any) -> torch.nn.Module:
    base: torch.nn.Module = module.get_base_model() if hasattr(module, "get_base_model") else module
    return base


def _plain_name(module: torch.nn.Module, path: str) -> str:
    adapters = _adapters(module)
    path = ".".join(part for part in path.split(".") if part not in WRAPPERS)
    if not adapters:
        return path
    path = path.removeprefix("base_model.model.")
    for name, kind in adapters.items():
        path = re.sub(rf"\.({kind}_\w+|modules_to_save)\.{re.escape(name)}(?=\.|$)", r".\1", path)
    return re.sub(r"\.(base_layer|modules_to_save)(?=\.)", "", path)


def _tags(module: torch.nn.Module, names: dict[str, torch.nn.Parameter]) -> dict[str, Names]:
    known, kinds = _known_tags(_base(module)), {*_adapters(module).values()}
    tags = {}
    for name in names:
        site, kind, leaf = next(
            (found.groups() for each in kinds if (found := re.match(rf"(.*)\.({each})(_.*)", name))), (None, "", "")
        )
        if site is None:
            tags[name] = known.get(name) or _plain_tags(name)
        else:
            weight = f"{site}.weight"
            own = frozenset({kind, f"{kind}{leaf}".partition(".")[0]})
            tags[name] = (known.get(weight) or _plain_tags(weight)) | own
    return tags


def _known_tags(base: torch.nn.Module) -> dict[str, Names]:
    """Return the tags of a transformers module, with all roles of a fused projection; empty for other modules."""
    if not isinstance(base, PreTrainedModel):
        return {}
    with torch.device("meta"):
        skeleton: Any = type(base)(copy.deepcopy(base.config))
    try:
        split_qkv.split(skeleton)
        tags = tags_of(skeleton)
    except ModelError:  # a class of the user's own
        return {}
    joined: dict[str, Names] = {}
    for name, own in tags.items():
        fused = split_qkv.fused_name(skeleton, name)
        joined[fused] = joined.get(fused, frozenset()) | own
    return joined


def _plain_tags(name: str) -> Names:
    layer = next((part for part in name.split(".") if part.isdigit()), None)
    return frozenset({"other", *([] if layer is None else [f"layer.{layer}"])})
