"""Schema of the files in a run folder, which may be untrusted. Values are checked once; unknown keys are dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_ITEMS = 2**53  # floats are exact up to this count
Shape = Callable[[Any, str], Any]  # (value, where) -> checked value; raises ShapeError


class ShapeError(ValueError):
    """A value does not match the schema."""


def _refuse(value: Any, where: str, expected: str) -> ShapeError:
    shown = repr(value)
    return ShapeError(f"{where} is {shown[:40] + '…' if len(shown) > 40 else shown}; it must be {expected}")


def count(value: Any, where: str) -> Any:
    """Accept an integer from 0 up."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_ITEMS:
        raise _refuse(value, where, "a whole number from 0 up")
    return value


def integer(value: Any, where: str) -> Any:
    """Accept an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(value, where, "a whole number")
    return value


def real(value: Any, where: str) -> Any:
    """Accept a number or None. Non-finite numbers pass; the code that computes with them handles them."""
    if not isinstance(value, int | float | None):
        raise _refuse(value, where, "a number")
    return value


def known(value: Any, where: str) -> Any:
    """Accept a number."""
    if real(value, where) is None:
        raise _refuse(value, where, "a number")
    return value


def text(value: Any, where: str) -> Any:
    """Accept a string."""
    if not isinstance(value, str):
        raise _refuse(value, where, "a string")
    return value


def flag(value: Any, where: str) -> Any:
    """Accept a bool."""
    if not isinstance(value, bool):
        raise _refuse(value, where, "true or false")
    return value


def anything(value: Any, where: str) -> Any:
    """Accept any value."""
    return value


def like(pattern: str, wanted: str) -> Shape:
    """Accept a string that matches the regular expression `pattern`; `wanted` describes it in the error."""

    def check(value: Any, where: str) -> Any:
        if not re.fullmatch(pattern, text(value, where)):
            raise _refuse(value, where, wanted)
        return value

    return check


def optional(shape: Shape) -> Shape:
    """Accept None or what `shape` accepts."""
    return lambda value, where: None if value is None else shape(value, where)


def list_of(shape: Shape) -> Shape:
    """Accept a list of items of a shape."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _refuse(value, where, "a list")
        return [shape(item, f"{where}[{place}]") for place, item in enumerate(value)]

    return check


def table(shape: Shape, key: Shape = text) -> Shape:
    """Accept a mapping with keys and values of given shapes."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise _refuse(value, where, "a table")
        return {key(name, f"a key of {where}"): shape(item, f"{where}.{name}") for name, item in value.items()}

    return check


def record(needed: Mapping[str, Shape], others: Mapping[str, Shape] | None = None) -> Shape:
    """Accept a mapping with the keys in `needed`, and optionally those in `others`. Drop all other keys."""
    shapes = {**needed, **(others or {})}

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise _refuse(value, where, "a table")
        if missing := [name for name in needed if name not in value]:
            raise ShapeError(f"{where} has no '{missing[0]}'")
        return {name: shapes[name](item, f"{where}.{name}") for name, item in value.items() if name in shapes}

    return check


_LAYER = like(r"layer\.\d{1,4}", "a layer such as 'layer.0'")
_NUMBERS = table(real)
_BY_GROUP = optional(table(optional(_NUMBERS)))

_CONFUSION = record({"classes": list_of(text), "counts": list_of(list_of(count))})


def confusion(value: Any, where: str) -> Any:
    """Accept a confusion matrix: a row and a column for each class."""
    if not value:
        return None
    found = _CONFUSION(value, where)
    size = len(found["classes"])
    if [len(row) for row in found["counts"]] != [size] * size:
        raise ShapeError(f"{where}.counts does not have a row and a column for each of the classes")
    return found


_SECURE = record(
    {"clients": count, "recovered": count, "bits": count},
    {
        **dict.fromkeys(("threshold", "neighbors"), count),
        "resolution": real,
        "bytes": table(table(count)),
        "seconds": _NUMBERS,
        "off": list_of(text),
    },
)

ROW = record(
    {"round": count},
    {
        **dict.fromkeys(("seconds", "padding", "lr", "train_loss"), real),
        **dict.fromkeys(("bytes", "up", "down", "test", "validation", "losses"), optional(_NUMBERS)),
        **dict.fromkeys(("drift", "personal", "unseen", "by_type"), _BY_GROUP),
        "subgroups": optional(record({"groups": table(_NUMBERS)}, {"gap": real, "minimum": real})),
        "confusion": confusion,
        "cohort": optional(list_of(text)),
        "population": count,
        **dict.fromkeys(("lost", "refused"), optional(table(text))),
        "bounded": optional(_NUMBERS),
        "secure": optional(_SECURE),
        "skipped": flag,
        "privacy": optional(record({}, {"epsilon": real, "delta": real})),
        "chosen": optional(table(list_of(_LAYER))),
        "scores": table(table(real, _LAYER)),
        "alarms": table(text),
    },
)
_PARAMETER = record(
    {},
    {
        **dict.fromkeys(("name", "layer", "role"), optional(text)),
        **dict.fromkeys(("parameters", "bytes"), count),
        **dict.fromkeys(("trains", "up", "down", "keep"), flag),
    },
)
_METRIC_NAME = like(r"\w[\w .-]{0,39}", "the name of a metric")
METRIC = record({"name": _METRIC_NAME, "higher_is_better": flag, "fraction": flag})
PLAN = record(
    {},
    {
        "metrics": list_of(METRIC),
        "metric": record({}, {"name": _METRIC_NAME, "higher_is_better": flag}),  # of older runs
        "own_metrics": list_of(METRIC),
        "stages": list_of(
            record({"first": count, "last": count, "rows": list_of(_PARAMETER)}, {"client": optional(text)})
        ),
    },
)
_CLIENT = record({"name": text, "train": count, "validation": count, "test": count}, {"labels": list_of(count)})
_SPLIT = record({"population": count, "clients": list_of(_CLIENT)}, {"classes": list_of(text)})


def split(value: Any, where: str) -> Any:
    """Accept what clients hold. With classes, each client has one count for each of them."""
    held = _SPLIT(value, where)
    for place, client in enumerate(held["clients"]):
        if len(client.get("labels", ())) != len(held.get("classes", ())):
            raise ShapeError(f"{where}.clients[{place}].labels does not have one count for each of the classes")
    return held


_ATTACK = record(
    {"false": list_of(known), "true": list_of(known)},
    dict.fromkeys(("auc", "true_at_1%", "members", "outsiders"), real),
)
_BOUND = record(dict.fromkeys(("right", "guesses", "canaries", "confidence", "epsilon"), known))
_CHECK = record({"what": text, "passed": flag}, dict.fromkeys(("found", "charged"), real))
AUDIT = record(
    {},
    {
        "attacks": optional(table(_ATTACK)),
        "bound": optional(_BOUND),
        "claim": optional(record({}, {"planned": real})),
        "group": text,
        "mechanism": optional(list_of(_CHECK)),
    },
)
PRIVACY = record(
    {},
    {
        **dict.fromkeys(("budget", "delta", "noise", "clip", "planned"), real),
        **dict.fromkeys(("unit", "group", "sampling", "accountant", "noise_added"), text),
        "repeatable": flag,
        **dict.fromkeys(("not_covered", "withheld"), list_of(text)),
    },
)
_IMAGE = like(r"data:image/png;base64,[A-Za-z0-9+/=]{1,6000}", "a small PNG image")
_SAMPLE = record(dict.fromkeys(("prompt", "reference", "before", "after"), text), {"image": _IMAGE})
SAMPLES = record({}, {"samples": list_of(_SAMPLE)})
CONFIG = record({"label": text, "seed": integer}, {"rounds": count, "code": table(text)})
RESULT = record({}, {"stopped": record({"after": count, "reason": text}), "best": record({"after": count})})
PROGRESS = record(
    {"state": text},
    {
        **dict.fromkeys(("phase", "error"), text),
        **dict.fromkeys(("round", "rounds", "cohort", "online", "asked", "replied"), count),
        **dict.fromkeys(("started", "updated", "pace"), real),
        **dict.fromkeys(("clients", "lost"), table(text)),
        "present": list_of(text),
        "process": record({}, {"pid": integer, "machine": text}),
    },
)
COMPARISON = record(
    {"runs": list_of(record({"folder": text, "label": text, "seed": integer, "rounds": count}))},
    {"process": record({}, {"pid": integer, "machine": text})},
)
TABLES = ("method", "data", "split", "model")  # tables of a config that the report reads

# ---- the files of a tuning

TUNING = record(
    {
        "methods": list_of(record({"label": text, "folder": text, "spaces": list_of(text)})),
        "budget": count,
        "seeds": count,
        "search": text,
        "prune": flag,
        "rounds": count,
        "first_seed": count,
    }
)
TRIAL = record(
    {
        "number": count,
        "settings": table(text),
        "state": text,
        "metric": record({"name": text, "higher_is_better": flag, "fraction": flag}),
        "score": real,
        "rounds": count,
        "reason": text,
        "epsilon": real,
        "delta": real,
    }
)
CHOSEN = record({"methods": list_of(record({"method": text, "trial": count}))})
