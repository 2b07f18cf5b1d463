"""Any other Transformer: the layers and roles of its parameters by naming patterns, and its own forward function.

The names are those of transformers' models, of their tensor-parallel plans and of PEFT's tables of target modules. A
parameter that matches no pattern has the role "other".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from partita.core.model import Output
from partita.core.tensors import Names, Tensors
from partita.models.architectures.decoders import last_token
from partita.models.architectures.spec import Architecture

OTHER = "other"
# The patterns match a part of a parameter's path inside an attention block, from the last part to the first.
PROJECTIONS = {
    r"(pos_)?(q|query|queries)(_(proj|lin|dense|layer|linear|[ab]_proj|conv))?|wq|to_q|linear_q": "query",
    r"(pos_)?(k|key|keys)(_(proj|lin|dense|layer|linear|conv))?|wk|to_k|linear_k": "key",
    r"(v|value|values)(_(proj|lin|dense|layer|linear|conv))?|wv|to_v|linear_v": "value",
    r"(o|out|output)(_(proj|lin|dense|layer|[ab]_proj))?|wo|to_out|dense|c_proj|proj|projection|linear_out": "output",
}
# One parameter for queries, keys and values together. A plan cannot take it apart, so it has the role "other".
FUSED = r"qkv(_proj)?|wqkv|query_key_value|c_attn|in_proj(_weight|_bias)?|kv(_proj)?|attn_qkv|key_value|kv_[ab]_proj.*"
MIXED = "bottleneck"  # MobileBERT's projection before the queries and keys, and the feed-forward blocks
# What else sets attention scores is frozen with queries and keys: their norms and scales, and biases of the scores.
SCORES = {
    r"(q|query)(_a)?_(layer_?norm|norm|ln)|norm_q|logit_scale|q_scale": "query",
    r"(k|key)_(layer_?norm|norm|ln)|norm_k|k_scale|sinks?": "key",
    r"relative_.*bias.*|rel_pos.*|attention_biases|.*position_bias.*|distance_embedding|pos_proj|linear_pos": "key",
}
SHARED_BIAS = r"relative_(attention|position)_bias.*"  # one for all layers in MPNet and BEiT
IS_ATTENTION = r".*(attn|attention|selfattention).*|self|mha|temporal_block"
IS_NORM = r".*(norm|layrnorm).*|ln(_.+|\d+)?|.+_ln"
# A scale of a block's output, such as DINOv2's, has the role of what it scales.
SCALES = {r"(layer_?scale|lambda|gamma|ls)_?1": "output", r"(layer_?scale|lambda|gamma|ls)_?2": "mlp"}
IS_EMBEDDING = r".*(embed|wte|wpe|shared|token|position).*|stem"
IS_HEAD = r"pooler|.*(classifier|score|lm_head|head|predictor|predictions|projection|qa_outputs|logit_).*|cls"
TOWERS = {"vision_model": "vision", "text_model": "text", "encoder": "encoder", "decoder": "decoder"}


@dataclass(frozen=True)
class Layer:
    """One layer of a module.

    Attributes:
        paths: Paths of its submodules. Most layers are one submodule.
        number: Its number, from the input to the output.
    """

    paths: tuple[str, ...]
    number: int


def general_tags(module: torch.nn.Module) -> dict[str, Names]:
    """Return the tags of every parameter: exactly one role, "layer.N" inside a layer, "pooler" in one, and the tower.

    Args:
        module: A transformers module. It may be on the meta device.
    """
    paths = [path for path, _ in module.named_parameters(remove_duplicate=False)]
    inside = {path: layer for layer in find_layers(module) for path in layer.paths}
    body, towers = _body_path(module), _towers(paths)
    tags = {}
    for path in paths:
        start = next((part for part in _prefixes(path) if part in inside), None)
        tower = towers.get(_tower(path), ())
        if start is None:
            pooler = {"pooler"} & set(path.split("."))
            tags[path] = frozenset({_outer_role(module, path, body), *pooler, *tower})
        else:
            # In XLM, a layer has a part of each of several lists, whose names say what the parts are.
            within = path.removeprefix(f"{start}." if len(inside[start].paths) == 1 else f"{_stem(_stem(start))}.")
            role = _layer_role(module, path, within)
            tags[path] = frozenset({role, f"layer.{inside[start].number}", *tower})
    return tags


def find_layers(module: torch.nn.Module) -> list[Layer]:
    """Find the layers of a module: the smallest numbered submodules with attention and something else, in order.

    A T5 block is a list with an attention block and a feed-forward block, so the block is the layer. A Swin stage is a
    list of layers, so these are. XLM has parallel lists of attention and feed-forward blocks; layer N is number N of
    each. A module without attention, such as FNet, has its outermost numbered submodules.
    """
    names = [path for path, _ in module.named_parameters(remove_duplicate=False)]
    numbered = [path for path, _ in module.named_modules() if re.fullmatch(r"(.*\.)?\d+", path)]
    attention, rest = set[str](), set[str]()
    for name in names:
        if _in_attention(name):
            attention.update(_prefixes(name) if _projects(name) else ())
        elif not any(_matches(IS_NORM, part) for part in name.split(".")):
            rest.update(_prefixes(name))
    whole = [path for path in numbered if path in attention and path in rest]
    layers = [path for path in whole if not any(other.startswith(f"{path}.") for other in whole)]
    if layers:
        return _number(module, [(path,) for path in layers])
    parts = [path for path in numbered if path in attention]
    parts = [path for path in parts if not any(path.startswith(f"{other}.") for other in parts)]
    outer = parts or [path for path in numbered if sum(part.isdigit() for part in path.split(".")) == 1]
    columns: dict[tuple[str, int], list[str]] = {}
    lengths = {stem: sum(path.rpartition(".")[0] == stem for path in numbered) for stem in map(_stem, outer)}
    beside = {_stem(_stem(path)): lengths[_stem(path)] for path in outer}  # lists with as many parts as the layers
    for path in numbered:
        stem, _, number = path.rpartition(".")
        length = sum(other.rpartition(".")[0] == stem for other in numbered)
        if beside.get(_stem(stem)) == length:
            columns.setdefault((_stem(stem), int(number)), []).append(path)
    return _number(module, [tuple(column) for column in columns.values()])


def _number(module: torch.nn.Module, layers: Iterable[tuple[str, ...]]) -> list[Layer]:
    """Number the layers. The towers of a vision-language model have numbers of their own; a decoder's go on."""
    order = {path: place for place, (path, _) in enumerate(module.named_modules())}
    layers = sorted(layers, key=lambda paths: order[paths[0]])
    towers = _towers([path for paths in layers for path in paths])
    counts: dict[str, int] = {}
    numbered = []
    for paths in layers:
        tower = next(iter(towers.get(_tower(paths[0]), {""})))
        tower = tower if tower in ("vision", "text") else ""
        numbered.append(Layer(paths, counts.get(tower, 0)))
        counts[tower] = counts.get(tower, 0) + 1
    return numbered


def _layer_role(module: torch.nn.Module, path: str, within: str) -> str:
    """Return the role of a parameter inside a layer. `within` is the path from the layer on."""
    parts = within.split(".")
    if any(_matches(MIXED, part) for part in parts):
        return OTHER
    in_attention = any(_matches(IS_ATTENTION, part) for part in parts)
    if in_attention and (role := next(filter(None, (_first_match(SCORES, part) for part in reversed(parts))), None)):
        return role
    if role := next(filter(None, (_first_match(SCALES, part) for part in parts)), None):
        return role
    if _is_norm(module, path, parts):
        return "norm"
    if not in_attention:
        return "mlp"
    for part in reversed(parts):
        if _matches(FUSED, part):
            return OTHER
        if role := _first_match(PROJECTIONS, part):
            return role
    return OTHER


def _outer_role(module: torch.nn.Module, path: str, body: str) -> str:
    """Return the role of a parameter outside all layers. What is outside the body belongs to the head."""
    parts = path.split(".")
    if any(_matches(SHARED_BIAS, part) for part in parts):
        return "key"
    if body and not path.startswith(f"{body}."):
        return "head"
    is_embedding = any(_matches(IS_EMBEDDING, part) for part in parts)
    if not is_embedding and any(_matches(IS_HEAD, part) for part in parts):
        return "head"
    if _is_norm(module, path, parts):
        return "norm"
    return "embedding" if is_embedding or isinstance(module.get_submodule(_stem(path)), torch.nn.Embedding) else OTHER


def _is_norm(module: torch.nn.Module, path: str, parts: Iterable[str]) -> bool:
    owner = type(module.get_submodule(_stem(path))).__name__
    return _matches(IS_NORM, owner) or any(_matches(IS_NORM, part) for part in parts)


def _towers(paths: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the tag of each tower, if the module has two of them."""
    found = {_tower(path) for path in paths} - {""}
    return {name: (TOWERS[name],) for name in found} if len(found) > 1 else {}


def _tower(path: str) -> str:
    """Return the part of the path that names a tower, "" for a parameter outside the towers."""
    return next((part for part in path.split(".") if part in TOWERS), "")


def _in_attention(path: str) -> bool:
    return any(_matches(IS_ATTENTION, part) for part in path.split("."))


def _projects(path: str) -> bool:
    """Return whether a parameter is a projection of an attention block."""
    parts = path.split(".")
    return any(_matches(FUSED, part) or _first_match(PROJECTIONS, part) for part in parts)


def _body_path(module: Any) -> str:
    """Return the path of the Transformer body; "" if the module is one itself."""
    body = getattr(module, "base_model", module)
    return next((path for path, part in module.named_modules() if part is body), "")


def _prefixes(path: str) -> list[str]:
    """Return the paths of the submodules that hold a parameter, the outermost first."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _stem(path: str) -> str:
    return path.rpartition(".")[0]


def _first_match(table: Mapping[str, str], part: str) -> str | None:
    return next((role for pattern, role in table.items() if _matches(pattern, part)), None)


def _matches(pattern: str, part: str) -> bool:
    return re.fullmatch(pattern, part, re.IGNORECASE) is not None


# Forward functions


def _logits(module: Any, inputs: Tensors) -> Output:
    """Run the module's own forward function. Features are the mean of what enters the head."""
    with module.head_inputs.recorded():
        logits = module(**inputs, **_without_cache(module)).logits
        return Output(logits, module.head_inputs.pooled(inputs.get("attention_mask")))


def _classes(module: Any, inputs: Tensors) -> Output:
    """Classify texts. A decoder's own function looks for the padding token, but partita marks padding by the mask."""
    if not hasattr(module, "score"):
        return _logits(module, inputs)
    state = module.base_model(**inputs, **_without_cache(module.base_model)).last_hidden_state
    features = last_token(state, inputs)
    return Output(module.score(features), features)


def _next_answer_tokens(module: Any, inputs: Tensors) -> Output:
    """Run an encoder-decoder. Features are the mean of the encoder's states, which do not depend on the answer."""
    out = module(**inputs, **_without_cache(module))
    weights = inputs["attention_mask"].to(out.logits).unsqueeze(-1)  # (example, token, 1)
    state = out.encoder_last_hidden_state
    return Output(out.logits, (state * weights).sum(1) / weights.sum(1).clamp(min=1))


def _pixels(module: Any, inputs: Tensors) -> Output:
    """Classify pixels. Logits of fewer pixels are enlarged to the image, as transformers does to compute its loss."""
    out = _logits(module, inputs)
    size = inputs["pixel_values"].shape[-2:]
    logits = torch.nn.functional.interpolate(out.logits, size=size, mode="bilinear", align_corners=False)
    return Output(logits, out.features)  # (example, class, height, width)


class HeadInputs:
    """Records the first tensor that enters a part of a module's head.

    The hooks stay in the module, because the compiler cannot follow their registration.
    """

    def __init__(self, module: Any) -> None:
        self.first: torch.Tensor | None = None
        self.recording = False
        body = _body_path(module).partition(".")[0]
        for name, part in module.named_children():
            if name != body if body else _matches(IS_HEAD, name):
                part.register_forward_pre_hook(self._record)
        module.head_inputs = self

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record inside the block."""
        self.recording = True
        try:
            yield
        finally:
            self.recording, self.first = False, None

    def _record(self, part: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.recording and self.first is None and inputs and isinstance(inputs[0], torch.Tensor):
            self.first = inputs[0]

    def pooled(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the mean over tokens that are not padding, or over pixels, (example, width); None if unknown."""
        state = self.first
        if state is None or state.ndim == 2:
            return state
        if state.ndim == 4:
            return state.mean((2, 3))  # (example, width, row, column)
        if mask is None or mask.shape != state.shape[:2]:
            return state.mean(1)  # (example, token, width)
        weights = mask.to(state).unsqueeze(-1)
        return (state * weights).sum(1) / weights.sum(1).clamp(min=1)


def _without_cache(module: torch.nn.Module) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in signature(module.forward).parameters else {}


GENERAL = Architecture(
    roles=(),
    heads={
        "image": _logits,
        "text": _classes,
        "tokens": _logits,
        "lm": _logits,
        "seq2seq": _next_answer_tokens,
        "segmentation": _pixels,
    },
)
