"""The JSON Schema of configs, from the same annotations as the checks. Editors complete and check configs with it."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from partita.core.options import MISSING, Option, bounds_of
from partita.core.registry import offered
from partita.experiment.config import CODE, IN_HAND, headings, options_under
from partita.experiment.config_code import NAMED_LISTS
from partita.experiment.reference import about, keys_under
from partita.models.adapter_options import TABLE as ADAPTER_TABLE

Schema = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest that editors for TOML know
OWN_CODE = "[:+]"  # in the name of the user's own function, or of a composition of methods


def config_schema() -> Schema:
    """Return the schema of a config. Options of own code and of compositions of methods are not checked."""
    tables = {heading: _table(heading) for heading in headings()}
    top = tables.pop("")
    adapter = tables.pop(ADAPTER_TABLE)
    named: dict[str, dict[str, Schema]] = {}
    for heading, table in tables.items():
        kind, _, name = heading.partition(" ")
        if name:
            named.setdefault(kind, {})[name] = table
        else:
            top["properties"][kind] = table
    for name, table in named["model"].items():
        if "adapter" in table["properties"]:
            named["model"][name]["properties"]["adapter"] = adapter
    top["properties"] |= {kind: _named_table(kind, by_name) for kind, by_name in named.items()}
    top["properties"][CODE] = {"type": "object", "additionalProperties": {"type": "string"}}
    return {"$schema": DRAFT, "title": "partita experiment config", **top, "required": ["method"]}


def _table(heading: str) -> Schema:
    meanings = {key.name: key.meaning.replace("`", "") for key in keys_under(heading)}
    options = options_under(heading)
    required = [name for name, option in options.items() if option.default is MISSING]
    properties = {name: _property(option, meanings[name]) for name, option in options.items()}
    for (table, key), what in NAMED_LISTS.items():
        if heading == table:
            properties[key]["items"] = _name_schema(what)
    shape: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**shape, "required": required} if required else shape


def _property(option: Option, meaning: str) -> Schema:
    shown = {} if option.default in (MISSING, None) else {"default": _plain(option.default)}
    return {**type_schema(option.hint), **({"description": meaning} if meaning else {}), **shown}


def _named_table(kind: str, by_name: Mapping[str, Schema]) -> Schema:
    """Return the schema of a table with a name. All its keys are listed for completion; the name decides which fit."""
    keys = {key: shape for table in reversed(list(by_name.values())) for key, shape in table["properties"].items()}
    rules = []
    for name, table in by_name.items():
        own = {**table["properties"], "name": {"const": name, "description": about(f"{kind} {name}")}}
        then = {**table, "properties": own, "required": ["name", *table.get("required", ())]}
        rules.append({"if": {"properties": {"name": {"const": name}}, "required": ["name"]}, "then": then})
    hints = {
        key: {"description": shape["description"]} if "description" in shape else {} for key, shape in keys.items()
    }
    shown = {"name": {**_name_schema(kind), "description": f"which {kind}"}, **hints}
    return {"type": "object", "properties": shown, "required": ["name"], "allOf": rules}


def _name_schema(what: str) -> Schema:
    names = [name for name in offered(what) if f"{what} {name}" not in IN_HAND]
    return {"anyOf": [{"enum": names}, {"type": "string", "pattern": OWN_CODE}]}


def type_schema(hint: Any) -> Schema:
    """Return the schema of the values that have an annotated type and are in its range. TOML has no null."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    origin, bounds = get_origin(kind), bounds_of(hint)
    if origin is Annotated:
        return type_schema(kind)
    if origin in (Union, types.UnionType):
        shapes = [type_schema(each) for each in get_args(kind) if each is not types.NoneType]
        return shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    if origin is Literal:
        return {"enum": list(get_args(kind))}
    if origin in (tuple, list):
        return {"type": "array", "items": type_schema(get_args(kind)[0])}
    if kind in (dict, Mapping) or origin in (dict, Mapping):
        parts = get_args(kind)
        return {"type": "object", **({"additionalProperties": type_schema(parts[1])} if parts else {})}
    if kind in (int, float):
        limits = {
            "minimum": bounds.low,
            "maximum": bounds.high,
            "exclusiveMinimum": bounds.above,
            "exclusiveMaximum": bounds.below,
        }
        finite = {key: limit for key, limit in limits.items() if limit is not None and math.isfinite(limit)}
        return {"type": "integer" if kind is int else "number", **finite}
    if kind is bool:
        return {"type": "boolean"}
    if kind is Any:
        return {}
    return {"type": "string", **({} if kind is not str or 0 in bounds else {"minLength": 1})}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)) else None
