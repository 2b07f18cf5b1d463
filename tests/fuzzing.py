"""Shared by the fuzz tests: the oracle, and values and configs drawn from the config schema."""

from __future__ import annotations

import datetime
import math
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from partita.core.client import ClientError
from partita.core.options import MISSING, Option, Range
from partita.experiment.config import schema
from partita.methods import NEEDS_FACTORS

Raw = dict[str, Any]

SCHEMA = schema()
DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
STRANGE_NUMBERS = [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e39, 5e-324, -0.0, 0, 0.5, -1, 1, 2, 1025, 2**31]
STRANGE_NUMBERS += [2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, -(10**30), 10**5000]
STRANGE_TEXTS = [
    "",
    " ",
    "\0",
    "a\nb",
    "a\u2028b",
    "\udcff",
    "..",
    "/",
    "/dev/null",
    "{}{}",
    "%s",
    "auto",
    "x" * 5000,
    "é",
]
STRANGE_OTHERS = [
    True,
    False,
    [],
    [math.nan],
    [0],
    [-1],
    [""],
    [10**30],
    [[]],
    {},
    {"": 1},
    {"a\nb": 1},
    {"c0": math.inf},
]
STRANGE_OTHERS += [DEEP, {"a": DEEP}, datetime.date(2020, 2, 2), datetime.time(12), b"bytes", None]
STRANGE: list[Any] = [*STRANGE_NUMBERS, *STRANGE_TEXTS, *STRANGE_OTHERS]


def refusal(call: Callable[[], object]) -> str | None:
    """The one-line error that a call ends in, or None where it succeeds.

    Any other outcome fails the test: another kind of exception, a warning, an error of several lines, or a ValueError
    that a library raised and nobody turned into an error of ours.
    """
    try:
        call()
    except (ValueError, ClientError, OSError) as error:
        raised, raised_in = error, traceback.extract_tb(error.__traceback__)[-1].filename
    else:
        return None
    message = str(raised)
    assert len(message.splitlines()) == 1, f"an error is one line, not {message!r}"
    assert isinstance(raised, OSError) or "partita" in raised_in, f"{raised_in} raised {raised!r}"
    return message


def strange_values() -> st.SearchStrategy[Any]:
    """Values that hardly any option accepts."""
    return st.one_of(st.sampled_from(STRANGE), st.text(max_size=8), st.integers(), st.floats())


def fitting_values(hint: Any, small: bool = False) -> st.SearchStrategy[Any]:
    """Values that fit a type: with `small`, those a tiny experiment can run with; otherwise up to the bounds."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    kind = get_args(hint)[0] if notes else hint
    [bounds] = [note for note in notes if isinstance(note, Range)] or [Range()]
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(
            *(fitting_values(each, small) for each in get_args(kind) if each not in (types.NoneType, None))
        )
    if origin is Literal:
        return st.sampled_from(get_args(kind))
    if origin is tuple:
        return st.lists(fitting_values(get_args(kind)[0], small), max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(
            st.sampled_from(["c0", "c1", "elsewhere"]), fitting_values(get_args(kind)[1], small), max_size=2
        )
    if kind is bool:
        return st.booleans()
    if kind is int:
        low = int(bounds.low or 0)
        some = st.integers(low, low + 3)
        return some if small else some | st.sampled_from([low, int(bounds.high or low + 3)])
    if kind is float:
        return _between(bounds, small)
    if kind is str:
        return st.sampled_from(["head", "query", "label", "nowhere", "c0"])
    return st.sampled_from([1, "x", 0.5])


def _between(bounds: Range, small: bool) -> st.SearchStrategy[float]:
    low = bounds.above if bounds.above is not None else bounds.low if bounds.low is not None else -1.0
    high = bounds.below if bounds.below is not None else bounds.high if bounds.high is not None else 1.0
    low, high = float(low), float(high)
    inside = st.floats(low, min(high, low + 4.0) if small else high)
    return inside.filter(lambda value: value in bounds and math.isfinite(value))


def values_just_outside(hint: Any) -> st.SearchStrategy[Any]:
    found = bounds_outside(hint)
    return st.sampled_from(found) if found else strange_values()


def bounds_outside(hint: Any) -> list[Any]:
    """Values just outside the bounds of each range in a type."""
    found: list[Any] = []
    for bounds in ranges_of(hint):
        if bounds.low is not None:
            found += [bounds.low - 1, math.nextafter(bounds.low, -math.inf)]
        if bounds.high is not None and bounds.high < math.inf:
            found += [bounds.high + 1, math.nextafter(bounds.high, math.inf)]
        found += [bound for bound in (bounds.above, bounds.below) if bound is not None]
    return found


def ranges_of(hint: Any) -> list[Range]:
    return [note for note in get_args(hint) for note in ([note] if isinstance(note, Range) else ranges_of(note))]


@st.composite
def tables(draw: st.DrawFn, options: Mapping[str, Option], faulty: bool, small: bool = False) -> Raw:
    """Sets the required options and some others; with `faulty`, makes one or two of them invalid."""
    needed = [name for name, option in options.items() if option.default is MISSING]
    others = [name for name in options if name not in needed]
    chosen = [*needed, *(draw(st.lists(st.sampled_from(others), unique=True, max_size=4)) if others else ())]
    raw = {name: draw(fitting_values(options[name].hint, small)) for name in chosen}
    if not faulty:
        return raw
    for _ in range(draw(st.integers(1, 2))):
        fault = draw(st.sampled_from(["strange", "strange", "beside", "beside", "unknown", "missing"]))
        if fault == "unknown" or not options:
            raw[draw(st.text(max_size=6) | st.sampled_from(["lr", "nam", "a\nb", ""]))] = draw(strange_values())
        elif fault == "missing":
            raw.pop(draw(st.sampled_from(list(options))), None)
        else:
            name = draw(st.sampled_from(list(options)))
            raw[name] = draw(strange_values() if fault == "strange" else values_just_outside(options[name].hint))
    return raw


@st.composite
def configs(draw: st.DrawFn) -> Raw:
    """A config of any tables; most have one kind of table with an invalid value."""
    faulty = draw(st.sampled_from([[True, False, False], [False, True, False], [False, False, True], [False] * 3]))
    raw: Raw = dict(draw(tables(SCHEMA[""], faulty[0])))
    fixed = [name for name in SCHEMA if name and " " not in name]
    for table in draw(st.lists(st.sampled_from(fixed), unique=True, min_size=int(faulty[1]), max_size=3)):
        raw[table] = draw(tables(SCHEMA[table], faulty[1]))
    wanted = ["method", *draw(st.lists(st.sampled_from(["data", "split", "model"]), unique=True))]
    for table in wanted:
        heading = draw(st.sampled_from([name for name in SCHEMA if name.startswith(f"{table} ")]))
        key = "name"
        raw[table] = {key: heading.partition(" ")[2], **draw(tables(SCHEMA[heading], faulty[2]))}
    if draw(st.sampled_from([False] * 5 + [True])):
        raw[draw(st.sampled_from(["method", "data", "training", "privacy", "seed", "x\ny"]))] = draw(strange_values())
    if draw(st.sampled_from([False] * 9 + [True])):
        raw["method"] = {"name": "+".join(draw(st.lists(st.sampled_from(["fedavg", "fedprox", "é"]), min_size=1)))}
    return raw


TINY: Raw = {
    "rounds": 1,
    "data": {"name": "synthetic", "examples": 60, "test_examples": 10, "size": 4, "classes": 3},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "layers": 2, "width": 8, "heads": 2, "patch": 2},
    "method": {"name": "fedavg"},
    "training": {"batch_size": 8},
}
TINY_CLIP: Raw = {"name": "clip", "shape": "tiny"}
DUAL_ENCODER_METHODS = ("pfeddc", "promptfl", "vpfl", "coop", "fedotp", "fedpgp", "fedclip", "pfedprompt", "zero-shot")


@st.composite
def experiments(draw: st.DrawFn, small: bool = False) -> Raw:
    """A tiny experiment with one or two random tables, half of the time with invalid values; with `small`, one
    without invalid values that runs quickly.
    """
    faulty = not small and draw(st.booleans())
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    headings = [name for name in SCHEMA if name and not name.startswith(("data ", "model pretrained"))]
    for heading in draw(st.lists(st.sampled_from([*headings, "data synthetic"]), min_size=1, max_size=2)):
        table, _, name = heading.partition(" ")
        key = "name"
        given = draw(tables(SCHEMA[heading], faulty, small))
        if heading == "model.adapter":
            raw["model"]["adapter"] = given
            continue
        kept = {} if table == "split" or name in ("clip", "pretrained") else raw.get(table, {})
        kept = {} if table == "method" else kept
        raw[table] = {**kept, **given, **({key: name} if name else {})}
        if table == "split" and "clients" in given:
            raw[table]["clients"] = draw(st.sampled_from([2, 3, given["clients"]]))
        if name in DUAL_ENCODER_METHODS:
            raw["model"] = dict(TINY_CLIP)
        if name in NEEDS_FACTORS:
            raw["model"]["adapter"] = {"rank": 2}
    if "privacy" in raw and "epsilon" not in raw["privacy"] and "noise" not in raw["privacy"]:
        raw["privacy"]["noise"] = 1.0
    if small:
        raw.setdefault("engine", {})["compile"] = False  # compiling takes half a minute
    if raw["model"].get("name") == "clip" and "shape" not in raw["model"]:
        raw["model"]["shape"] = "tiny"
    return raw
