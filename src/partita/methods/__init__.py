"""Registry of federated methods.

Each method has one file and one card. To add a method, write both, add a reduction test and an entry in `INDEX`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from partita.core.options import OptionError, format_name, unknown_key
from partita.core.registry import make, options_by_name

if TYPE_CHECKING:
    from partita.core.method import Method

INDEX = {
    "fedavg": "partita.methods.fedavg:fedavg",
    "fedprox": "partita.methods.fedprox:fedprox",
    "scaffold": "partita.methods.scaffold:scaffold",
    "fednova": "partita.methods.fednova:fednova",
    "feddyn": "partita.methods.feddyn:feddyn",
    "moon": "partita.methods.moon:moon",
    "fedsam": "partita.methods.fedsam:fedsam",
    "fedlesam": "partita.methods.fedlesam:fedlesam",
    "fedavgm": "partita.methods.fedavgm:fedavgm",
    "fedadam": "partita.methods.fedopt:fedadam",
    "fedyogi": "partita.methods.fedopt:fedyogi",
    "fedadagrad": "partita.methods.fedopt:fedadagrad",
    "fedadamw": "partita.methods.fedadamw:fedadamw",
    "median": "partita.methods.robust:median",
    "trimmed-mean": "partita.methods.robust:trimmed_mean",
    "krum": "partita.methods.robust:krum",
    "geometric-median": "partita.methods.robust:geometric_median",
    "fedfrozen": "partita.methods.fedfrozen:fedfrozen",
    "fedpart": "partita.methods.fedpart:fedpart",
    "layer-skipping": "partita.methods.layer_skipping:layer_skipping",
    "safl": "partita.methods.safl:safl",
    "prune": "partita.compression.prune:prune",
    "quantize": "partita.compression.quantize:quantize",
    "lora": "partita.methods.lora:lora",
    "flora": "partita.methods.flora:flora",
    "ffa-lora": "partita.methods.ffa_lora:ffa_lora",
    "fedsa-lora": "partita.methods.fedsa_lora:fedsa_lora",
    "fedper": "partita.methods.fedper:fedper",
    "fedrep": "partita.methods.fedrep:fedrep",
    "fedbabu": "partita.methods.fedbabu:fedbabu",
    "fedtp": "partita.methods.fedtp:fedtp",
    "fedala": "partita.methods.fedala:fedala",
    "ditto": "partita.methods.ditto:ditto",
    "apfl": "partita.methods.apfl:apfl",
    "pfedme": "partita.methods.pfedme:pfedme",
    "pfeddc": "partita.methods.pfeddc:pfeddc",
    "promptfl": "partita.methods.promptfl:promptfl",
    "vpfl": "partita.methods.vpfl:vpfl",
    "coop": "partita.methods.coop:coop",
    "fedotp": "partita.methods.fedotp:fedotp",
    "fedpgp": "partita.methods.fedpgp:fedpgp",
    "fedclip": "partita.methods.fedclip:fedclip",
    "pfedprompt": "partita.methods.pfedprompt:pfedprompt",
    "zero-shot": "partita.methods.zero_shot:zero_shot",
    "local-only": "partita.methods.local_only:local_only",
    "centralized": "partita.methods.centralized:centralized",
}

# These methods train next to a frozen dual encoder and accept only the model "clip".
NEEDS_DUAL_ENCODER = ("pfeddc", "promptfl", "vpfl", "coop", "fedotp", "fedpgp", "fedclip", "pfedprompt")

# These methods accept only a model with low-rank factors: `[model.adapter]`, or the method "lora" before them.
NEEDS_FACTORS = ("ffa-lora", "fedsa-lora")

# These methods are derived for plain SGD and refuse AdamW.
NEEDS_SGD = ("scaffold", "fednova", "apfl", "pfedme")

# Supported compositions: the conformance tests run each of them. Other compositions may work and are not rejected.
COMPOSITIONS = (
    "fedfrozen+fedprox",
    "fedfrozen+scaffold",
    "fedfrozen+feddyn",
    "fedfrozen+fednova",
    "fedfrozen+moon",
    "fedfrozen+fedadam",
    "fedfrozen+fedadamw",
    "fedfrozen+fedprox+fedavgm",
    "fedfrozen+fedsam",
    "fedper+fedlesam",
    "scaffold+fedsam",
    "fedper+moon+fedadam",
    "fedper+scaffold",
    "fedrep+fedprox+fedyogi",
    "fedbabu+feddyn",
    "fedpart+scaffold",
    "fedfrozen+median",
    "fedprox+trimmed-mean",
    "safl+krum",
    "fedper+geometric-median",
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
    "fedfrozen+ditto",
    "ditto+fedadam",
    "lora+ditto",
    "lora+ffa-lora+fedadam",
    "lora+fedfrozen",
    "scaffold+fedala",
    "fedala+fedadam",
    "pfeddc+fedprox",
    "promptfl+fedadam",
)


def method(name: str, **options: Any) -> Method:
    """Build a method by its name and options, such as `partita.method("fedprox", mu=0.1)`."""
    return replace(build(name, options), recipe={"name": name, **options})


def build(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """Build a method by name.

    Args:
        name: A name from `INDEX`, the user's own function ("file.py:function"), or several joined by "+" to compose
            them.
        options: Keyword arguments. In a composition, each option goes to the one part that accepts it.

    Raises:
        OptionError: If a name is unknown or repeated, or if no part or several parts accept an option.
    """
    options, parts = options or {}, name.split("+")
    accepted = {part: options_by_name("method", part) for part in parts}
    if len(accepted) < len(parts):
        raise OptionError(f"'{name}' names a method twice; name each once")
    if len(parts) == 1:
        only: Method = make("method", name, options)
        return only
    for key in options:
        accepting = [part for part, keys in accepted.items() if key in keys]
        if not accepting:
            raise unknown_key(f"method.{key}", {*chain.from_iterable(accepted.values())}, f"method.{name}")
        if len(accepting) > 1:
            raise OptionError(
                f"{format_name(f'method.{key}')} is accepted by both {' and '.join(accepting)} in '{name}'; compose "
                "them in Python with partita.compose"
            )
    shares = {part: {key: options[key] for key in keys if key in options} for part, keys in accepted.items()}
    from partita.core.compose import compose  # imports torch, which the index and the cards do not need

    return compose(*(make("method", part, share) for part, share in shares.items()))
