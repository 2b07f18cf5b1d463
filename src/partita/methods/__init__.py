"""Federated methods, one file and one card each. To add one: file, card, reduction, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from partita.core.method import Method, compose
from partita.core.options import OptionError, format_name, import_from_registry, validate_options

INDEX = {
    "fedavg": "partita.methods.fedavg:fedavg",
    "fedprox": "partita.methods.fedprox:fedprox",
    "scaffold": "partita.methods.scaffold:scaffold",
    "fednova": "partita.methods.fednova:fednova",
    "feddyn": "partita.methods.feddyn:feddyn",
    "moon": "partita.methods.moon:moon",
    "fedavgm": "partita.methods.fedavgm:fedavgm",
    "fedadam": "partita.methods.fedopt:fedadam",
    "fedyogi": "partita.methods.fedopt:fedyogi",
    "fedadagrad": "partita.methods.fedopt:fedadagrad",
    "fedfrozen": "partita.methods.fedfrozen:fedfrozen",
    "fedpart": "partita.methods.fedpart:fedpart",
    "layer-skipping": "partita.methods.layer_skipping:layer_skipping",
    "safl": "partita.methods.safl:safl",
    "prune": "partita.compression.prune:prune",
    "quantize": "partita.compression.quantize:quantize",
    "lora": "partita.methods.lora:lora",
    "flora": "partita.methods.flora:flora",
    "fedper": "partita.methods.fedper:fedper",
    "fedrep": "partita.methods.fedrep:fedrep",
    "fedbabu": "partita.methods.fedbabu:fedbabu",
    "fedtp": "partita.methods.fedtp:fedtp",
    "pfeddc": "partita.methods.pfeddc:pfeddc",
    "promptfl": "partita.methods.promptfl:promptfl",
    "vpfl": "partita.methods.vpfl:vpfl",
    "coop": "partita.methods.coop:coop",
    "fedotp": "partita.methods.fedotp:fedotp",
    "fedpgp": "partita.methods.fedpgp:fedpgp",
    "fedclip": "partita.methods.fedclip:fedclip",
    "zero-shot": "partita.methods.zero_shot:zero_shot",
    "local-only": "partita.methods.local_only:local_only",
    "centralized": "partita.methods.centralized:centralized",
}

# These learn beside a frozen pair of towers, the model "clip", and take no other.
NEEDS_DUAL_ENCODER = ("pfeddc", "promptfl", "vpfl", "coop", "fedotp", "fedpgp", "fedclip")

# Compositions that are called supported: conformance runs over each. Others may work, and none is refused by name.
COMPOSITIONS = (
    "fedfrozen+fedprox",
    "fedfrozen+scaffold",
    "fedfrozen+feddyn",
    "fedfrozen+fednova",
    "fedfrozen+moon",
    "fedfrozen+fedadam",
    "fedfrozen+fedprox+fedavgm",
    "fedper+moon+fedadam",
    "fedper+scaffold",
    "fedrep+fedprox+fedyogi",
    "fedbabu+feddyn",
    "fedpart+scaffold",
    "fedpart+moon+fedadagrad",
    "layer-skipping+fedprox+fedadam",
    "safl+fedprox",
    "safl+fedadam",
    "safl+prune",
    "safl+quantize",
    "safl+prune+quantize",
    "fedfrozen+safl",
    "lora+fedprox+fedadam",
    "lora+scaffold",
    "pfeddc+fedprox",
    "promptfl+fedadam",
)


def build(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """A method by name; "a+b" composes two, and each option goes to the part that takes it."""
    options = options or {}
    parts = {part: import_from_registry(INDEX, part, "method") for part in name.split("+")}
    if len(parts) < name.count("+") + 1:
        raise OptionError(f"'{name}' names a method twice; name each once")
    if len(parts) == 1:
        return _make(parts[name], options)
    for key in options:
        takers = [part for part, function in parts.items() if key in signature(function).parameters]
        if len(takers) != 1:
            problem = f"is taken by both {' and '.join(takers)}" if takers else "is taken by none of its parts"
            raise OptionError(
                f"{format_name(f'method.{key}')} {problem} in '{name}'; compose them in Python with partita.compose"
            )
    shares = [{key: options[key] for key in signature(part).parameters if key in options} for part in parts.values()]
    return compose(*(_make(part, share) for part, share in zip(parts.values(), shares, strict=True)))


def _make(function: Callable[..., Method], options: Mapping[str, Any]) -> Method:
    return function(**validate_options(function, options, "method"))
