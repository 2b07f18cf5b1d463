"""Models from objects: modules of transformers, also with an adapter of PEFT, that a program hands over."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from partita.core import tensors
from partita.core.given import Given, given, hand_over, unchanged
from partita.core.tensors import Names, Tensors
from partita.models import ModelError
from partita.models.adapter_options import AdapterOptions, frozen_part
from partita.models.architectures import head_names

KINDS = {"LORA": "lora", "IA3": "ia3"}  # PEFT's names of the adapters that can be handed over


@dataclass(frozen=True)
class GivenAdapter:
    """The adapter of a module that was handed over.

    Attributes:
        options: Its options.
        values: Its values by the path of the adapted layer and PEFT's name of the parameter in it.
        head: Names of the parameters of the base that train too (PEFT's `modules_to_save`).
    """

    options: AdapterOptions
    values: dict[str, Tensors]
    head: Names

    def frozen(self, module: Any) -> tuple[str, ...]:
        """Return the tags and names of all that does not train.

        Args:
            module: The base.

        Raises:
            ModelError: If more of the base trains than the task's head.
        """
        of_head = head_names(module)
        if odd := sorted(self.head - of_head):
            raise ModelError(f"'{odd[0]}' trains beside the adapter, but is no part of the head; leave it frozen")
        return frozen_part(bool(self.head), "classes"), *sorted(of_head - self.head if self.head else ())


def hand_over_model(module: Any) -> Given:
    """Let configs name a module of transformers or PEFT by the digest of its weights.

    Raises:
        ModelError: If it is no such module, or its weights are quantized.
    """
    base = module.get_base_model() if _peft_of(module) else module
    if not isinstance(base, PreTrainedModel):
        raise ModelError(f"the model is a {type(base).__name__}; give a PreTrainedModel of transformers")
    if getattr(base, "hf_quantizer", None) is not None or getattr(base, "is_quantized", False):
        raise ModelError(
            "the model's weights are quantized, and cannot be read as numbers; hand it over unquantized, and let "
            "partita store frozen weights in 4 bits under an adapter: model={'quantize': '4bit', 'adapter': {...}}"
        )
    return hand_over(module, _digest_of, changes=True)


def _digest_of(module: Any) -> str:
    peft = _peft_of(module)
    base = module.get_base_model() if peft else module
    state = hashlib.blake2b(digest_size=16)
    about = {key: value for key, value in base.config.to_dict().items() if not key.startswith("_")}
    state.update(f"{type(base).__name__}|{json.dumps(about, sort_keys=True, default=str)}".encode())
    if peft:
        state.update(json.dumps(module.active_peft_config.to_dict(), sort_keys=True, default=sorted).encode())
    state.update(tensors.digest({name: value.detach() for name, value in module.state_dict().items()}).encode())
    return state.hexdigest()


def given_config(path: str) -> Any:
    """Return a copy of the config of a module that was handed over."""
    module = given(path).value
    return copy.deepcopy(module.get_base_model().config if _peft_of(module) else module.config)


def copy_of_given(path: str, config: Any, wanted: type[Any]) -> Any:
    """Return a copy of a module that was handed over, in float32 and without its adapter.

    Args:
        path: The name of the module.
        config: The config for the task, which the copy gets.
        wanted: The class that the task needs.

    Raises:
        ModelError: If it has another class or another number of outputs.
    """
    module = unchanged(path)
    base = module.get_base_model() if _peft_of(module) else module
    if not isinstance(base, wanted):
        raise ModelError(
            f"the model is a {type(base).__name__}, but the task needs a {wanted.__name__}; load it as one"
        )
    before = base.config
    if config.num_labels != before.num_labels and config.id2label:
        raise ModelError(
            f"the model's head has {before.num_labels} outputs, but the task has {config.num_labels} classes; load the "
            f"model with num_labels={config.num_labels}"
        )
    if _peft_of(module):
        with torch.no_grad():
            base = copy.deepcopy(module).unload()
    else:
        base = copy.deepcopy(module)
    base.config = config
    for part in base.modules():
        if getattr(part, "config", None) is before:
            part.config = config
    return base.to(device="cpu", dtype=torch.float32)


def given_adapter(path: str) -> GivenAdapter | None:
    """Return the adapter of a module that was handed over; None if it has none.

    Raises:
        ModelError: If it is of a type that partita cannot train.
    """
    module = given(path).value
    if not _peft_of(module):
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    name, config = module.active_adapter, module.active_peft_config
    kind = KINDS.get(str(getattr(config.peft_type, "value", config.peft_type)))
    if kind is None:
        raise ModelError(
            f"the model has an adapter of type {config.peft_type}; {' and '.join(KINDS)} can be handed over, or hand "
            "over the base, and let [model.adapter] add one"
        )
    if len(module.peft_config) > 1:
        raise ModelError("the model has several adapters; delete all but one: model.delete_adapter(name)")
    refused = ("rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters")
    for option in refused:
        if getattr(config, option, None):
            raise ModelError(f"the model's adapter has {option}, which partita does not have; leave it out")
    if getattr(config, "bias", "none") != "none":
        raise ModelError("the model's adapter trains biases; use bias='none'")
    base = module.get_base_model()
    values: dict[str, Tensors] = {}
    for site, layer in base.named_modules():
        if isinstance(layer, BaseTunerLayer):
            named: Any = layer
            own = {path.replace(f".{name}", "", 1): value for path, value in named.named_parameters()}
            values[site] = {
                leaf: value.detach().float().cpu().clone()
                for leaf, value in own.items()
                if not leaf.startswith("base_layer.")
            }
    saved = re.compile(rf"\.modules_to_save\.{re.escape(name)}(?=\.)")
    head = frozenset(saved.sub("", path) for path, _ in base.named_parameters() if saved.search(path))
    more: dict[str, Any] = {"kind": kind, "head": bool(head)}
    if kind == "lora":
        more |= {
            "rank": config.r,
            "alpha": float(config.lora_alpha),
            "dropout": float(config.lora_dropout),
            "dora": bool(config.use_dora),
            "rslora": bool(config.use_rslora),
        }
    return GivenAdapter(AdapterOptions(**more), values, head)


def _peft_of(module: Any) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)
