"""Forms of the other files in a run folder, of a comparison and of a tuning, which may be untrusted."""

from collections.abc import Mapping
from typing import Any

from partita.record.check import Count, Number, ShapeError, like, list_of, optional, record, table

_PARAMETER = record(
    {},
    {
        **dict.fromkeys(("name", "layer", "role"), str | None),
        **dict.fromkeys(("parameters", "bytes"), Count),
        **dict.fromkeys(("trains", "up", "down", "keep"), bool),
    },
)
_METRIC_NAME = like(r"\w[\w .-]{0,39}", "the name of a metric")
METRIC = record({"name": _METRIC_NAME, "higher_is_better": bool, "fraction": bool})
PLAN = record(
    {},
    {
        "metrics": list_of(METRIC),
        "metric": record({}, {"name": _METRIC_NAME, "higher_is_better": bool}),  # of older runs
        "own_metrics": list_of(METRIC),
        "stages": list_of(record({"first": Count, "last": Count, "rows": list_of(_PARAMETER)}, {"client": str | None})),
    },
)
_CLIENT = record({"name": str, "train": Count, "validation": Count, "test": Count}, {"labels": list[Count]})
_SPLIT = record({"population": Count, "clients": list_of(_CLIENT)}, {"classes": list[str]})


def split(value: Any, where: str) -> Any:
    """Accept what clients hold. With classes, each client has one count for each of them."""
    held = _SPLIT(value, where)
    for place, client in enumerate(held["clients"]):
        if len(client.get("labels", ())) != len(held.get("classes", ())):
            raise ShapeError(f"{where}.clients[{place}].labels does not have one count for each of the classes")
    return held


_ATTACK = record(
    {"false": list[float], "true": list[float]}, dict.fromkeys(("auc", "true_at_1%", "members", "outsiders"), Number)
)
_BOUND = record(dict.fromkeys(("right", "guesses", "canaries", "confidence", "epsilon"), float))
AUDIT = record(
    {},
    {
        "attacks": optional(table(_ATTACK)),
        "bound": optional(_BOUND),
        "claim": optional(record({}, {"planned": Number})),
        "group": str,
    },
)
PRIVACY = record(
    {},
    {
        **dict.fromkeys(("budget", "delta", "noise", "clip", "planned"), Number),
        **dict.fromkeys(("unit", "group", "sampling", "accountant", "noise_added"), str),
        "repeatable": bool,
        **dict.fromkeys(("not_covered", "withheld"), list[str]),
    },
)
_IMAGE = like(r"data:image/png;base64,[A-Za-z0-9+/=]{1,6000}", "a small PNG image")
_SAMPLE = record(dict.fromkeys(("prompt", "reference", "before", "after"), str), {"image": _IMAGE})
SAMPLES = record({}, {"samples": list_of(_SAMPLE)})
CONFIG = record({"label": str, "seed": int}, {"rounds": Count, "code": Mapping[str, str]})
RESULT = record({}, {"stopped": record({"after": Count, "reason": str}), "best": record({"after": Count})})
_PROCESS = record({}, {"pid": int, "machine": str})
PROGRESS = record(
    {"state": str},
    {
        **dict.fromkeys(("phase", "error"), str),
        **dict.fromkeys(("round", "rounds", "cohort", "online", "asked", "replied"), Count),
        **dict.fromkeys(("started", "updated", "pace"), Number),
        **dict.fromkeys(("clients", "lost"), Mapping[str, str]),
        "present": list[str],
        "process": _PROCESS,
    },
)
COMPARISON = record(
    {"runs": list_of(record({"folder": str, "label": str, "seed": int, "rounds": Count}))},
    {"process": _PROCESS},
)
TABLE = table(Any)
TABLES = ("method", "data", "split", "model")  # tables of a config that the report reads

# ---- the files of a tuning

TUNING = record(
    {
        "methods": list_of(record({"label": str, "folder": str, "spaces": list[str]})),
        "budget": Count,
        "seeds": Count,
        "search": str,
        "prune": bool,
        "rounds": Count,
        "first_seed": Count,
    }
)
TRIAL = record(
    {
        "number": Count,
        "settings": Mapping[str, str],
        "state": str,
        "metric": record({"name": str, "higher_is_better": bool, "fraction": bool}),
        "score": Number,
        "rounds": Count,
        "reason": str,
        "epsilon": Number,
        "delta": Number,
    }
)
CHOSEN = record({"methods": list_of(record({"method": str, "trial": Count}))})
