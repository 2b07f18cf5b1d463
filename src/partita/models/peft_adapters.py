"""Adapters of PEFT, such as LoRA, at the linear layers of a transformers module."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from partita.core import serialization
from partita.core.options import closest_match
from partita.core.rng import Key, seeded
from partita.core.tensors import Names, Tensors
from partita.core.torch_private import own_parameters
from partita.models import ModelError, split_qkv
from partita.models.adapter_export import fuse, join, merge
from partita.models.adapter_options import ADAPTER, FACTORS, TABLE, AdapterOptions, factor_name
from partita.models.dropout import DropoutDraws, key_dropout
from partita.models.functional import FunctionalModel, ParameterSlot
from partita.models.given_model import GivenAdapter
from partita.models.layer_forward import layer_forwards, use_layer_forward
from partita.models.vmap_layers import use_vmap_layers

ON_CONV1D = ("lora", "ia3")  # kinds that PEFT also has for the Conv1D of GPT-2
ON_QUANTIZED = ("lora", "ia3")  # kinds that call the layer and do not compute with its weight; DoRA does
ParameterSlots = dict[str, tuple[ParameterSlot, ...]]

# By kind: the class of PEFT's config, and its options beside `target_modules`.
CONFIGS: dict[str, tuple[str, Callable[[AdapterOptions], dict[str, Any]]]] = {
    "lora": ("LoraConfig", lambda own: _lora(own, own.rank, own.alpha)),
    "lokr": ("LoKrConfig", lambda own: {"r": own.rank, "alpha": own.alpha}),
    "hra": ("HRAConfig", lambda own: {"r": own.rank}),
    "miss": ("MissConfig", lambda own: {"r": own.rank}),
    "ia3": ("IA3Config", lambda own: {"feedforward_modules": []}),
}


@dataclass(frozen=True, eq=False)
class AdaptedModel(FunctionalModel):
    """A model with an adapter of PEFT. With "lora", its adapted weights are W + (alpha / rank) B A.

    Attributes:
        options: The options of the adapter.
        sites: Paths of the adapted linear layers.
    """

    options: AdapterOptions
    sites: tuple[str, ...]

    def merged(self, params: Tensors) -> Tensors:
        """Return all parameters of the model without an adapter that computes the same function, frozen ones too.

        Raises:
            ModelError: If an adapted weight is not stored as numbers that can be added to.
        """
        return dict(self._merged_module(params).named_parameters())

    def save_merged(self, params: Tensors, folder: str | Path) -> None:
        """Write a plain transformers folder, which loads without partita and PEFT.

        Raises:
            ModelError: If an adapted weight is not stored as numbers that can be added to.
        """
        plain = FunctionalModel(**{item.name: getattr(self, item.name) for item in fields(FunctionalModel)})
        whole = replace(plain, module=self._merged_module(params), initial={}, tags={}, parameter_slots={})
        whole.save_pretrained({}, folder)

    def save_pretrained(self, params: Tensors, folder: str | Path) -> None:
        """Write a PEFT folder with the adapter and the head. It fits the base model as it was loaded.

        Raises:
            ModelError: If any other parameter has changed, or transformers would run the model differently.
        """
        self.check_saves()
        # PEFT saves whole modules and would break the tie of tied ones.
        head = {name for name in self._tagged("head") - self._tagged("embedding") if "." in name}
        adapter = self._tagged(self.options.kind)
        rest = self.initial.keys() - head - adapter
        if changed := [name for name in sorted(rest) if not torch.equal(params[name], self.initial[name])]:
            raise ModelError(
                f"'{changed[0]}' has changed since {self.name} was loaded, but a PEFT folder holds only the adapter "
                "and the head; use save_merged, which writes the whole model"
            )
        own = {name: params[name] for name in sorted(adapter)}
        if self.options.kind == "lora":
            own, sites = fuse(self.module, self.sites, join(own, self.sites, self.options))
        else:
            sites = dict.fromkeys(self.sites, 1)
        config = _config(self.options, sites, [self.module.get_submodule(site) for site in self.sites])
        config.modules_to_save = sorted({name.rpartition(".")[0] for name in head}) or None
        config.base_model_name_or_path = self.module.name_or_path or None
        config.inference_mode = True
        config.save_pretrained(str(folder))
        own |= {name: params[name] for name in sorted(head)}
        named = {f"base_model.model.{name}": own[name] for name in sorted(own)}  # PEFT's names
        (Path(folder) / "adapter_model.safetensors").write_bytes(serialization.save(named, {"format": "pt"}))
        self.save_processor(folder)

    def _merged_module(self, params: Tensors) -> Any:
        module, slots = _copy(self)
        _fill(slots, {name: torch.nn.Parameter(params[name].detach(), requires_grad=False) for name in slots})
        merge(module, self.sites)
        return module

    def _tagged(self, tag: str) -> Names:
        return frozenset(name for name, tags in self.tags.items() if tag in tags)


def add_adapter(adapted: FunctionalModel, options: AdapterOptions, key: Key) -> AdaptedModel:
    """Return a copy of a model with an adapter, in which everything but the adapter and the head is frozen for good.

    The copy initially computes the same function. It shares the frozen values with the model, unless it needs them in
    another dtype.

    Args:
        adapted: Model to copy.
        options: Options of the adapter.
        key: Key for the adapter's initial values.

    Raises:
        ModelError: If the model has an adapter, or the options do not fit it.
    """
    kept = frozenset(name for name, tags in adapted.tags.items() if options.head and _is_task_head(adapted, tags))
    return _adapted(adapted, options, key, kept)


def add_given(adapted: FunctionalModel, adapter: GivenAdapter, key: Key) -> AdaptedModel:
    """Return a copy of a model with the adapter that its module had when it was handed over.

    An adapter at a fused query-key-value projection becomes three, at its parts, which compute the same.

    Args:
        adapted: The model of the module without the adapter.
        adapter: The adapter.
        key: Key for draws, none of which are kept.

    Raises:
        ModelError: If it adapts layers that are not linear.
    """
    kept = frozenset(adapted.initial)
    made = _adapted(adapted, adapter.options, key, kept, paths=frozenset(adapter.values))
    initial = dict(made.initial)
    for site, values in adapter.values.items():
        part = made.module.get_submodule(site)
        for leaf, value in values.items():
            if not isinstance(part, split_qkv.SplitQKV):
                initial[f"{site}.{leaf}"] = value
                continue
            rows = [value] * len(split_qkv.PARTS)
            if not leaf.startswith("lora_A"):
                ordered = value if part.order is None else value.index_select(0, torch.argsort(part.order))
                rows = list(ordered.split(list(part.outputs.values())))
            initial |= {f"{site}.{name}.{leaf}": row.clone() for name, row in zip(part.outputs, rows, strict=True)}
    if initial.keys() != made.initial.keys():
        unknown = sorted(initial.keys() ^ made.initial.keys())[0]
        raise ModelError(f"the adapter's parameter '{unknown}' is not one that partita has; use LoRA at linear layers")
    return replace(made, initial=initial)


def low_rank(adapted: FunctionalModel, rank: int, alpha: float, roles: tuple[str, ...], key: Key) -> AdaptedModel:
    """Return a copy of a model with low-rank factors beside its weights, none of which is frozen.

    Args:
        adapted: Model to copy.
        rank: Rank of the factors.
        alpha: Scale; factors are multiplied by alpha / rank.
        roles: Tags of the linear layers to adapt.
        key: Key for the initial values of A.

    Raises:
        ModelError: If the model already has an adapter, or rank, alpha or roles are invalid.
    """
    if not alpha > 0:
        raise ModelError(f"alpha is {alpha}; it must be above 0")
    return _adapted(
        adapted, AdapterOptions("lora", rank, alpha, roles), key, frozenset(adapted.initial), (torch.nn.Linear,)
    )


def _adapted(
    adapted: FunctionalModel,
    options: AdapterOptions,
    key: Key,
    trainable: Names,
    types: tuple[type[torch.nn.Module], ...] = (torch.nn.Linear, Conv1D),
    paths: Names | None = None,
) -> AdaptedModel:
    if isinstance(adapted, AdaptedModel):
        raise ModelError(
            f"{adapted.name} already has an adapter; leave [{TABLE}] out, or use a method that adds none, such as "
            "'fedavg' in place of 'lora'"
        )
    every_tag = {**adapted.frozen_tags, **adapted.tags}
    module, slots = _copy(adapted)
    sites = _sites(adapted.name, module, every_tag, options, types, paths)
    _freeze(slots, adapted, adapted.initial.keys() - trainable)
    parameter_slots = {name: slots[name] for name in slots if name in trainable}
    _fill(parameter_slots, adapted.initial)  # PEFT reads the weights
    known = {id(value) for value in module.parameters()}
    _inject(module, options, sites, key)
    initial = {name: value for name, value in adapted.initial.items() if name in trainable}
    tags = {name: adapted.tags[name] for name in initial}
    for path, value in list(module.named_parameters()):
        if id(value) in known:
            continue
        name = re.sub(rf"\.{ADAPTER}(?=\.|$)", "", path)
        owner, _, leaf = path.rpartition(".")
        parameter_slots[name] = ((own_parameters(module.get_submodule(owner)), leaf),)
        site = next(site for site in sites if path.startswith(f"{site}."))
        tags[name] = every_tag[f"{site}.weight"] | _own_tags(name.removeprefix(f"{site}."), options)
        # In float32 like all trainable parameters, whatever the dtype of the frozen weight.
        initial[name] = value.detach().to(torch.float32 if adapted.dtype is not None else None, copy=True)
    if options.kind == "lora":
        initial |= _lora_values(initial, sites, options, key)
    _fill(parameter_slots, dict.fromkeys(parameter_slots))
    own = {item.name: getattr(adapted, item.name) for item in fields(FunctionalModel)}
    frozen = {name: adapted.tags[name] for name in adapted.initial if name not in trainable}
    changed = {
        "module": module,
        "initial": initial,
        "tags": tags,
        "parameter_slots": parameter_slots,
        "frozen_tags": {**adapted.frozen_tags, **frozen},
        "draws": _keyed_dropout(module, adapted.draws) if options.dropout else adapted.draws,
    }
    return AdaptedModel(**{**own, **changed}, options=options, sites=tuple(sites))


def _is_task_head(adapted: FunctionalModel, tags: Names) -> bool:
    return "head" in tags and "embedding" not in tags and adapted.kind.outputs != "vocabulary"


def _copy(adapted: FunctionalModel) -> tuple[Any, ParameterSlots]:
    """Return a copy of the module and its slots, in which the frozen values are not copied."""
    shared: dict[int, Any] = {id(value): value for value in (*adapted.module.parameters(), *adapted.module.buffers())}
    shared[id(adapted.draws)] = adapted.draws  # the copy's dropout layers read the seeds that the model sets
    module, slots = copy.deepcopy((adapted.module, dict(adapted.parameter_slots)), shared)
    return module, slots


def _sites(
    model: str,
    module: torch.nn.Module,
    tags: Mapping[str, Names],
    options: AdapterOptions,
    types: tuple[type[torch.nn.Module], ...],
    paths: Names | None = None,
) -> dict[str, torch.nn.Module]:
    """Return the linear layers at these paths, or with the roles of the options, by path.

    The head is excluded because it trains in full. The parts of a split query-key-value projection become layers of
    their own.
    """
    if Conv1D in types and options.kind == "lora" and not options.dora:
        types = (*types, split_qkv.Part)
    elif options.kind not in ON_CONV1D:
        types = (torch.nn.Linear,)
    linear = {
        path: (part, carried)
        for path, part in module.named_modules()
        if isinstance(part, types) and "head" not in (carried := tags.get(f"{path}.weight", {"head"}))
    }
    known = {tag for _, carried in linear.values() for tag in carried}
    roles = {tag for tag in known if not tag.startswith("layer.")}
    if not options.roles:
        raise ModelError(f"roles is empty; choose from: {', '.join(sorted(roles))}")
    for role in options.roles if paths is None else ():
        if role not in known:
            remedy = closest_match(role, roles) if roles else "it has no linear layer outside its head"
            raise ModelError(f"roles: no linear layer of {model} is tagged '{role}'; {remedy}")
    if paths is None:
        sites = {path: part for path, (part, carried) in linear.items() if not carried.isdisjoint(options.roles)}
    else:
        sites = {path: part for path, (part, _) in linear.items() if {path, path.rpartition(".")[0]} & paths}
        found = {path for path in paths if path in sites or any(each.startswith(f"{path}.") for each in sites)}
        if missing := sorted(paths - found):
            raise ModelError(
                f"the adapter is at '{missing[0]}', which is no linear layer outside the head; leave it out"
            )
    for path, part in sites.items():
        out, into = _size(part)
        if options.kind != "ia3" and not 1 <= options.rank <= min(out, into):
            raise ModelError(
                f"rank is {options.rank}, but '{path}' is {out} x {into}; use a rank from 1 to {min(out, into)}"
            )
    if options.dora or options.kind not in ON_QUANTIZED:
        what = "dora" if options.dora else f"kind = '{options.kind}'"
        for path, value in module.named_parameters():
            if path.removesuffix(".weight") in sites and not value.is_floating_point():
                raise ModelError(f"{what} needs the weights, but '{path}' is quantized; leave model.quantize out")
    for part in module.modules():
        if isinstance(part, split_qkv.SplitQKV) and any(
            part.get_submodule(name) in sites.values() for name in split_qkv.PARTS
        ):
            part.separate()
    return sites


def _size(part: Any) -> tuple[int, int]:
    """Return the number of outputs and inputs of a linear layer."""
    if isinstance(part, torch.nn.Linear):
        return part.out_features, part.in_features
    return (part.nf, part.nx) if isinstance(part, Conv1D) else part.size


def _freeze(slots: ParameterSlots, adapted: FunctionalModel, names: Iterable[str]) -> None:
    """Move values into the module for good, in the dtype of the forward pass."""
    for name in names:
        value = torch.nn.Parameter(adapted.initial[name].detach().to(adapted.dtype), requires_grad=False)
        for owner, leaf in slots[name]:
            owner[leaf] = value


def _fill(parameter_slots: Mapping[str, tuple[ParameterSlot, ...]], values: Mapping[str, torch.Tensor | None]) -> None:
    for name, slots in parameter_slots.items():
        for owner, leaf in slots:
            owner[leaf] = values[name]


def _inject(module: Any, options: AdapterOptions, sites: Mapping[str, torch.nn.Module], key: Key) -> None:
    """Wrap the layers in PEFT's. PEFT does not change a wrapped layer, so the slots of its parameters stay valid."""
    config, names = _config(options, dict.fromkeys(sites, 1), sites.values()), options.pieces
    with warnings.catch_warnings(), seeded(key / "values"):  # PEFT draws from the global generator
        warnings.simplefilter("ignore")  # about Conv1D, for which it chooses the right setting
        for name, width in names.items():
            piece = copy.copy(config)
            if options.kind == "lora":
                piece.r, piece.use_rslora, piece.lora_alpha = width, False, width * options.scale
            _peft().inject_adapter_in_model(piece, module, name)
    for layer in _tuner_layers(module):
        layer.set_adapter(list(names))
        layer.train(False)  # LoKr draws from the global generator otherwise
    module.requires_grad_(False)
    use_vmap_layers(module)


def _own_tags(leaf: str, options: AdapterOptions) -> Names:
    """Return the tags of an adapter's parameter beside those of its layer: for "lora_A.rank8.weight" also "rank.8"."""
    first, *more = leaf.split(".")
    found = re.fullmatch(r"rank(\d+)", more[0]) if more and len(options.bounds) > 1 else None
    return frozenset({options.kind, first, *([f"rank.{found[1]}"] if found else [])})


def _lora_values(initial: Tensors, sites: Iterable[str], options: AdapterOptions, key: Key) -> Tensors:
    """Draw A as PEFT does, from a key of its own for each layer, whatever the pieces."""
    values = {}
    for site in sites:
        shape = initial[factor_name(site, FACTORS[0], next(iter(options.pieces)))].shape
        whole = _uniform(options.rank, shape[1], key / f"{site}.lora_A.weight")
        for piece, rows in zip(options.pieces, whole.split(list(options.pieces.values())), strict=True):
            A, B = (factor_name(site, factor, piece) for factor in FACTORS)
            values[A] = rows.clone().to(initial[A].device)
            values[B] = torch.zeros_like(initial[B])
    return values


def _uniform(rank: int, into: int, key: Key) -> torch.Tensor:
    """Draw from the uniform distribution on ±1 / √in, as PEFT does."""
    return torch.nn.init.kaiming_uniform_(torch.empty(rank, into), a=math.sqrt(5), generator=key.generator())


def _keyed_dropout(module: torch.nn.Module, draws: DropoutDraws | None) -> DropoutDraws:
    """Let the adapter's dropout draw from the seeds of the examples, as all other dropout of the module does."""
    known, draws = draws, draws or DropoutDraws()
    for path, part in module.named_modules():
        if type(part) is torch.nn.Dropout and part.p > 0:
            key_dropout(part, draws, path)
    for layer in _tuner_layers(module):
        layer.training = True  # DoRA drops nothing otherwise; KeyedDropout and the other layers do not read it
    if known is None and (forwards := layer_forwards(module)):  # recomputed layers must draw the same masks again
        use_layer_forward(module, draws, any(forward.recomputes for forward in forwards))
    return draws


def _tuner_layers(module: torch.nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [part for part in module.modules() if isinstance(part, BaseTunerLayer)]


def _lora(options: AdapterOptions, rank: int, alpha: float) -> dict[str, Any]:
    return {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": options.dropout,
        "use_dora": options.dora,
        "use_rslora": options.rslora,
    }


def _config(options: AdapterOptions, times: Mapping[str, int], layers: Iterable[Any]) -> Any:
    """Return PEFT's config.

    Args:
        options: The options of the adapter.
        times: The adapted layers by path, and how many times the rank each has.
        layers: The layers.
    """
    kind, build = CONFIGS[options.kind]
    config = getattr(_peft(), kind)(target_modules=list(times), **build(options))
    if options.kind in ON_CONV1D:
        config.fan_in_fan_out = any(isinstance(_plain(layer), Conv1D) for layer in layers)
    larger = {path: count for path, count in times.items() if count > 1}
    if larger:
        power = 0.5 if options.rslora else 1
        config.rank_pattern = {path: count * options.rank for path, count in larger.items()}
        config.alpha_pattern = {path: count**power * options.alpha for path, count in larger.items()}
    return config


def _plain(layer: Any) -> Any:
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ModelError("adapters need the package 'peft': pip install 'partita[lora]'") from error
    return peft
