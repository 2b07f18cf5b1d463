"""partita: federated fine-tuning of Transformers. Say which parts train, which travel, and which stay.

A name is looked up in its own module when it is first asked for, so that whoever needs few waits for few, and
`partita --help` does not wait for torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partita import data, methods, models
    from partita.conformance import check_method
    from partita.core.method import Aggregate, Context, Local, Method, Rule, Server, Transform, Update, average, compose
    from partita.core.model import Batch, ClientData, Examples, Model, Output, Population
    from partita.core.optim import SGD, AdamW, Schedule
    from partita.core.plan import Phase, Plan, Turn, share, share_everything
    from partita.core.rng import Key
    from partita.core.rounds import Round, rounds
    from partita.core.run import Run, Training
    from partita.engines.embedded import Embedded
    from partita.engines.faults import Faults
    from partita.evaluate import score

__all__ = [
    "SGD",
    "AdamW",
    "Aggregate",
    "Batch",
    "ClientData",
    "Context",
    "Embedded",
    "Examples",
    "Faults",
    "Key",
    "Local",
    "Method",
    "Model",
    "Output",
    "Phase",
    "Plan",
    "Population",
    "Round",
    "Rule",
    "Run",
    "Schedule",
    "Server",
    "Training",
    "Transform",
    "Turn",
    "Update",
    "average",
    "check_method",
    "compose",
    "data",
    "methods",
    "models",
    "rounds",
    "score",
    "share",
    "share_everything",
]

# Module -> the names that are found there, as above for those who read types.
_HOMES = {
    "conformance": ["check_method"],
    "core.method": [
        "Aggregate", "Context", "Local", "Method", "Rule", "Server", "Transform", "Update", "average", "compose",
    ],
    "core.model": ["Batch", "ClientData", "Examples", "Model", "Output", "Population"],
    "core.optim": ["SGD", "AdamW", "Schedule"],
    "core.plan": ["Phase", "Plan", "Turn", "share", "share_everything"],
    "core.rng": ["Key"],
    "core.rounds": ["Round", "rounds"],
    "core.run": ["Run", "Training"],
    "engines.embedded": ["Embedded"],
    "engines.faults": ["Faults"],
    "evaluate": ["score"],
}  # fmt: skip
_HOME = {name: f"partita.{module}" for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # or any name would pass for one that is there

    def __getattr__(name: str) -> object:
        if name in _HOME:
            found = getattr(import_module(_HOME[name]), name)
        elif name in __all__:
            found = import_module(f"partita.{name}")
        else:
            raise AttributeError(f"module 'partita' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
        globals()[name] = found  # so that it is asked for here only once
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
