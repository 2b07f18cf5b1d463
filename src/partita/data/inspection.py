"""Look at a data set: its columns, what they could be used for, and what is wrong with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from partita.data.errors import DataError, need
from partita.data.i2b2 import read_i2b2
from partita.data.loading import DatasetPart, open_parts
from partita.data.segmentation import mask_folders
from partita.data.standoff import read_brat, standoff_format, standoff_parts
from partita.data.task_by_names import LIST_OF_MESSAGES, LIST_OF_TEXTS, pair_by_names, task_by_names
from partita.data.tokens import TAG

# Column names that say what a column is for, best first.
TEXT_NAMES = ("text", "note", "sentence", "review", "content", "document", "report", "body", "tokens", "words")
LABEL_NAMES = ("label", "class", "category", "diagnosis", "tags", "target", "sentiment", "topic", "outcome", "stars")
SITE_NAMES = (
    "site", "hospital", "clinic", "center", "centre", "institution", "client", "department", "domain", "writer",
    "author", "user", "region", "country", "school", "source", "device", "scanner", "patient", "group", "folder",
)  # fmt: skip
STANDOFF = {"brat": (".ann", read_brat), "i2b2": (".con", read_i2b2)}  # suffix of the annotations, and their reader
MESSAGE_FIELDS = (("role", "content"), ("from", "value"))
MOST_CLASSES = 100  # a column with more distinct values is not offered as a label


@dataclass(frozen=True)
class Column:
    """A column of the train part."""

    name: str
    kind: str  # "text", "class", "integer", "number", "true or false", "image", "list of texts", ...
    distinct: int | None  # number of distinct values; None for images and lists
    missing: int  # rows without a value
    longest: int | None  # characters of the longest text
    common: tuple[str, ...]  # the most common values, as text


@dataclass(frozen=True)
class Findings:
    """What is in a data set."""

    path: str
    parts: Mapping[str, int]  # rows of each part
    columns: tuple[Column, ...]
    task: str | None  # name of a task that fits, a key of `data.INDEX`
    roles: Mapping[str, str]  # option of the task -> column, such as {"text": "note", "label": "diagnosis"}
    site: str | None  # column whose values can be the clients
    candidates: Mapping[str, tuple[str, ...]]  # other columns that would do, for "text", "label" and "site"
    classes: Mapping[str, int]  # rows of each class
    sites: Mapping[str, int]  # rows of each site
    characters: tuple[int, int] | None  # median and maximum length of the texts
    tokens: tuple[int, int] | None  # the same in tokens
    size: tuple[int, int] | None  # width and height of the first image
    problems: tuple[str, ...]


def inspect_data(
    path: str | Path,
    config: str | None = None,
    tokenizer: str | None = None,
    text: str | None = None,
    label: str | None = None,
    site: str | None = None,
) -> Findings:
    """Look at a data set.

    Args:
        path: File, folder, or Hub id.
        config: Configuration of a Hub dataset.
        tokenizer: Folder or Hub id of a tokenizer, to count tokens.
        text: The text column. Default: chosen by name, type and content.
        label: The label column. Default: chosen likewise.
        site: The column with the site of a row. Default: chosen by name.

    Raises:
        DataError: If the data cannot be read, or a column does not exist.
    """
    standoff = standoff_format(path)
    parts = (
        standoff_parts(path, *STANDOFF[standoff]) if standoff else open_parts(path, config, mask_folders(Path(path)))
    )
    if "train" not in parts:
        raise DataError(f"'{path}' has no part 'train', only: {', '.join(parts)}; rename one of them")
    part = parts["train"]
    part.need(*(column for column in (text, label, site) if column is not None))
    values = {name: part.values(name) for name in part.data.column_names if _kind(part, name) != "image"}
    columns = tuple(_column(part, name, values.get(name)) for name in part.data.column_names)
    task, roles, candidates = _task(columns, values, text, label, site)
    chosen = site or next(iter(candidates["site"]), None)
    texts = values.get(roles.get("text", ""))
    found = Findings(
        path=str(path),
        parts={name: len(each.rows) for name, each in parts.items()},
        columns=columns,
        task=task,
        roles=roles,
        site=chosen,
        candidates=candidates,
        classes=_classes(part, roles, values, task),
        sites=_counts(_named(part, chosen, values)) if chosen else {},
        characters=_lengths(len(each) for each in texts if each) if texts and task != "tokens" else None,
        tokens=_tokens(values[roles["text" if "text" in roles else "tokens"]], tokenizer, task)
        if tokenizer and (texts or task == "tokens")
        else None,
        size=_image_size(part, roles.get("image")),
        problems=tuple(_problems(part, task, roles, chosen, values)),
    )
    return replace(found, task=standoff, roles={}) if standoff else found


def _kind(part: DatasetPart, name: str) -> str:
    feature = part.data.features[name]
    if type(feature).__name__ == "Image":
        return "image"
    inner = getattr(feature, "feature", None)
    if isinstance(inner, Mapping) and any({*fields} <= inner.keys() for fields in MESSAGE_FIELDS):
        return LIST_OF_MESSAGES
    kind = "class" if hasattr(inner or feature, "names") else _plain(getattr(inner or feature, "dtype", "other"))
    plural = {"text": "texts", "class": "classes", "integer": "integers", "number": "numbers"}
    return kind if inner is None else f"list of {plural.get(kind, kind)}"


def _plain(dtype: str) -> str:
    for kind, starts in (
        ("text", ("string", "large_string")),
        ("integer", ("int", "uint")),
        ("number", ("float", "double", "decimal")),
        ("true or false", ("bool",)),
    ):
        if dtype.startswith(starts):
            return kind
    return dtype


def _column(part: DatasetPart, name: str, values: list[Any] | None) -> Column:
    kind = _kind(part, name)
    if values is None or kind.startswith("list"):
        missing = 0 if values is None else sum(not value for value in values)
        return Column(name, kind, None, missing, None, ())
    shown = _named(part, name, {name: values})
    present = [value for value in shown if value.strip()]
    counts = Counter(present)
    longest = max(map(len, present), default=0) if kind == "text" else None
    common = tuple(value for value, _ in counts.most_common(3))
    return Column(name, kind, len(counts), len(shown) - len(present), longest, common)


def _named(part: DatasetPart, name: str, values: Mapping[str, list[Any]]) -> list[str]:
    """Return a column as texts: classes by name, and missing values as empty texts."""
    feature = part.data.features[name]
    if hasattr(feature, "int2str"):
        return [found or "" for found in part.class_names(name, values[name])]
    return ["" if value is None else str(value) for value in values[name]]


def _task(
    columns: Sequence[Column], values: Mapping[str, list[Any]], text: str | None, label: str | None, site: str | None
) -> tuple[str | None, dict[str, str], dict[str, tuple[str, ...]]]:
    """Choose a task and its columns."""
    rows = max((len(each) for each in values.values()), default=0)
    kinds = {column.name: column.kind for column in columns}
    named = None if text or label else task_by_names(kinds, values)
    pair = None if text or named else pair_by_names(kinds)
    text = pair[0] if pair else text
    sites = [
        column.name
        for column in columns
        if column.kind in ("text", "integer", "class")
        and _rank(column.name, SITE_NAMES) < len(SITE_NAMES)
        and 2 <= (column.distinct or 0) <= max(2, rows // 2)
        and column.name not in (text, label, *(pair or ()), *(named[1].values() if named else ()))
    ]
    sites = [site] if site else sorted(sites, key=lambda name: _rank(name, SITE_NAMES))
    if named:
        return *named, {"text": (), "label": (), "site": tuple(sites)}
    taken = {*sites[:1], text, label, *(pair or ())} - {None}
    texts = [text] if text else _text_columns(columns, taken)
    labels = [label] if label else _label_columns(columns, {*taken, *texts[:1]}, rows)
    numbers = [column.name for column in columns if column.kind == "number" and column.name not in taken]
    candidates = {"text": tuple(texts), "label": tuple(labels), "site": tuple(sites)}
    images = [name for name, kind in kinds.items() if kind == "image"]
    lists = [name for name, kind in kinds.items() if kind == LIST_OF_TEXTS]
    tagged = [
        name
        for name in ([label] if label else kinds)
        if kinds[name] in (LIST_OF_TEXTS, "list of classes") and _are_tags(name, kinds[name], values)
    ]
    if images:
        classes = [name for name in labels if kinds[name] == "class"]
        if classes:
            return "images", {"image": images[0], "label": classes[0]}, candidates
        targets = [label] if label else numbers
        return ("image_regression", {"image": images[0], "target": targets[0]}, candidates) if targets else (
            None, {"image": images[0]}, candidates
        )  # fmt: skip
    words = [name for name in ([text] if text else lists) if name not in tagged and kinds[name] == LIST_OF_TEXTS]
    if tagged and words:
        return "tokens", {"tokens": words[0], "tags": tagged[0]}, {**candidates, "text": (), "label": ()}
    if not texts:
        return None, {}, candidates
    if labels and kinds[labels[0]] != "number":
        roles = {"text": texts[0], **({"pair": pair[1]} if pair else {}), "label": labels[0]}
        return "text", roles, candidates
    targets = labels or numbers
    if targets:
        return "text_regression", {"text": texts[0], "target": targets[0]}, candidates
    return "lm", {"text": texts[0]}, candidates


def _text_columns(columns: Sequence[Column], taken: set[str | None]) -> list[str]:
    """Return the columns of texts. A name that says so comes first, then the longest."""
    found = [column for column in columns if column.kind == "text" and column.name not in taken and column.distinct]
    found = [each for each in found if _rank(each.name, TEXT_NAMES) < len(TEXT_NAMES) or (each.longest or 0) > 20]
    found = [each for each in found if _rank(each.name, LABEL_NAMES) == len(LABEL_NAMES)]
    return [each.name for each in sorted(found, key=lambda each: (_rank(each.name, TEXT_NAMES), -(each.longest or 0)))]


def _label_columns(columns: Sequence[Column], taken: set[str | None], rows: int) -> list[str]:
    """Return the columns that can be labels. A name that says so comes first, then the fewest values."""
    found = []
    for column in columns:
        named = _rank(column.name, LABEL_NAMES) < len(LABEL_NAMES)
        few = column.distinct is not None and 1 <= column.distinct <= min(MOST_CLASSES, max(2, rows // 2))
        discrete = column.kind in ("text", "class", "integer", "true or false") and few
        many = column.kind in (LIST_OF_TEXTS, "list of classes", "list of integers", "number") and named
        if column.name not in taken and (discrete or many):
            found.append(column)
    order = sorted(found, key=lambda each: (_rank(each.name, LABEL_NAMES), each.kind != "class", each.distinct or 0))
    return [each.name for each in order]


def _rank(name: str, known: Sequence[str]) -> int:
    words = re.split(r"[^a-z]+", name.lower())
    return next((place for place, word in enumerate(known) if word in words), len(known))


def _are_tags(name: str, kind: str, values: Mapping[str, list[Any]]) -> bool:
    if kind == "list of classes":
        return True
    found = {value for row in values[name] for value in row or ()}
    return bool(found) and all(isinstance(value, str) and TAG.fullmatch(value) for value in found)


def _classes(
    part: DatasetPart, roles: Mapping[str, str], values: Mapping[str, list[Any]], task: str | None
) -> dict[str, int]:
    column = roles.get("label" if "label" in roles else "tags")
    if column is None:
        return {}
    feature = part.data.features[column]
    inner = getattr(feature, "feature", None)
    if inner is None:
        return _counts(_named(part, column, values))
    names = getattr(inner, "names", ())
    found = _counts([_class_name(names, value) for row in values[column] for value in row or ()])
    return {each: count for each, count in found.items() if task != "tokens" or not each.startswith("I-")}


def _class_name(names: Sequence[str], value: Any) -> str:
    """Return the name of a class number, or the value itself if the column has no name for it."""
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else str(value)


def _counts(values: list[str]) -> dict[str, int]:
    return dict(Counter(value for value in values if value.strip()).most_common())


def _lengths(lengths: Any) -> tuple[int, int] | None:
    found = sorted(lengths)
    return (int(median(found)), found[-1]) if found else None


def _tokens(values: list[Any], tokenizer: str, task: str | None) -> tuple[int, int] | None:
    from partita.data.tokenization import TextEncoder, load_tokenizer

    words = task == "tokens"
    encoder = TextEncoder(load_tokenizer(tokenizer, words)[0], 1)
    rows = [value for value in values if value]
    if words:
        return _lengths(len(ids) for ids, _ in encoder.words(rows))
    return _lengths(len(ids) for ids in encoder.with_special_tokens(rows))


def _image_size(part: DatasetPart, column: str | None) -> tuple[int, int] | None:
    if column is None:
        return None
    feature = part.data.features[column]
    if type(feature).__name__ != "Image":
        return None
    kept = part.data.cast_column(column, need("datasets", "data").Image(decode=False))[0][column]
    try:
        size: tuple[int, int] = feature.decode_example(kept).size
    except Exception:  # an unreadable image is named when the task is loaded
        return None
    return size


def _problems(
    part: DatasetPart, task: str | None, roles: Mapping[str, str], site: str | None, values: Mapping[str, list[Any]]
) -> list[str]:
    found = []
    rows = len(part.rows)
    if task is None:
        found.append("no task fits: there is no text column, or no label with class names for the images")
    for role in ("text", "tokens"):
        column = roles.get(role)
        if column is None:
            continue
        texts = values[column]
        plain = [" ".join(each) if isinstance(each, list) else each or "" for each in texts]
        if empty := sum(not each.strip() for each in plain):
            found.append(f"{empty:,} of {rows:,} rows have no text in '{column}'; fill them in or remove the rows")
        if again := sum(count - 1 for each, count in Counter(plain).items() if each.strip()):
            found.append(f"{again:,} of {rows:,} rows repeat a text of '{column}'; copies may be in train and test")
    if (column := roles.get("label")) is not None and not isinstance(next(iter(values[column]), None), list):
        labels = _named(part, column, values)
        if missing := sum(not each.strip() for each in labels):
            found.append(f"{missing:,} of {rows:,} rows have no label in '{column}'; remove unlabeled rows")
        classes = _counts(labels)
        if len(classes) == 1:
            found.append(f"all rows have the same label in '{column}'; any model would score 100%")
        found += _alike(classes, "class names", column)
        rare = [name for name, count in classes.items() if count < 5]
        if rare and len(classes) > 1:
            found.append(f"{len(rare)} of {len(classes)} classes have fewer than 5 rows")
    if (column := roles.get("target")) is not None and (missing := sum(each is None for each in values[column])):
        found.append(f"{missing:,} of {rows:,} rows have no number in '{column}'; fill them in or remove the rows")
    if site is not None:
        sites = _named(part, site, values)
        if missing := sum(not each.strip() for each in sites):
            found.append(f"{missing:,} of {rows:,} rows have no value in '{site}'; they would be a client 'unnamed'")
        found += _alike(_counts(sites), "sites", site)
        if few := [name for name, count in _counts(sites).items() if count < 10]:
            found.append(f"{len(few)} sites in '{site}' have fewer than 10 rows")
    return found


def _alike(counts: Mapping[str, int], what: str, column: str) -> list[str]:
    """Find values that differ only in case, spaces or punctuation."""
    groups: dict[str, list[str]] = {}
    for value in counts:
        groups.setdefault(re.sub(r"[\W_]+", "", value.casefold()), []).append(value)
    same = [f"'{_short(group[0])}' and '{_short(group[1])}'" for group in groups.values() if len(group) > 1]
    return [f"{what} in '{column}' differ only in case or spaces: {', '.join(same[:3])}"] if same else []


def _short(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:30]}…"
