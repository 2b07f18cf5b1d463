"""Every numeric option has a range, and values outside it are refused before any work starts."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from fuzzing import TINY, bounds_outside, ranges_of, refusal

from partita.core import memory
from partita.core.memory import SizeError
from partita.core.options import (
    MISSING,
    Count,
    OptionError,
    Positive,
    PositiveShare,
    Range,
    Text,
    describe,
    format_value,
    matches_type,
    one_line,
    validate_options,
)
from partita.core.registry import KINDS, options_by_name
from partita.core.rounds import initial_server
from partita.experiment.builder import build
from partita.experiment.config import ConfigError, apply_override, load, parse, schema
from partita.experiment.runner import start
from partita.methods import build as build_method

SCHEMA = schema()
OPTIONS = [(table, option) for table, options in SCHEMA.items() for option in options.values()]


def numbers_without_range(hint: Any) -> list[Any]:
    """The numeric types in a hint without a range."""
    if get_origin(hint) is Annotated and any(isinstance(note, Range) for note in get_args(hint)):
        return []
    if hint in (int, float):
        return [hint]
    parts = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return [] if get_origin(hint) is Literal else [each for part in parts for each in numbers_without_range(part)]


@pytest.mark.parametrize(("table", "option"), OPTIONS, ids=lambda each: getattr(each, "name", each))
def test_every_numeric_option_has_a_range(table: str, option: Any) -> None:
    assert not numbers_without_range(option.hint), (
        f"give {table}.{option.name} a Range, as in Annotated[int, Range(low=1)]"
    )


def test_numbers_without_range_finds_nested_types() -> None:
    nested = Mapping[str, tuple[int, ...]] | Annotated[float | None, "meaning"] | Annotated[int, Range(low=1)] | bool
    assert numbers_without_range(nested) == [int, float]


def test_every_default_is_in_its_range() -> None:
    for table, option in OPTIONS:
        if option.default is not MISSING and option.default is not None:
            assert matches_type(option.default, option.hint), f"{table}.{option.name}"


def test_schema_has_every_table_and_its_options() -> None:
    assert {"", "training", "engine", "privacy", "method fedprox", "data images", "split flwr", "model vit"} <= {
        *SCHEMA
    }
    assert {"shots", "new_classes"} == {*SCHEMA["data digits"]}
    assert {"clients", "alpha", "min_examples"} == {*SCHEMA["split dirichlet"]} - {*KINDS["split"].shared}
    for heading, options in SCHEMA.items():
        table, _, name = heading.partition(" ")
        if name:
            assert {*options} == {*options_by_name(table, name), *KINDS[table].shared}, heading
    assert "key" not in SCHEMA["data synthetic"]


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "words"),
    [
        (Range(low=1), [1, 2, 1e300], [0, 0.999, -1], "from 1"),
        (Range(low=0, high=1), [0, 0.5, 1, 1.0], [-1e-9, 1.1], "from 0 to 1"),
        (Range(above=0), [5e-324], [0, -0.0], "above 0"),
        (Range(above=0, high=1), [1, 0.1], [0, 1.0001], "above 0 and up to 1"),
        (Range(low=0, below=1), [0, 0.999], [1, -1], "from 0 and below 1"),
        (Range(above=0, below=1), [0.5], [0, 1], "above 0 and below 1"),
        (Range(high=7), [7, -(10**9)], [8], "up to 7"),
        (Range(below=7), [6], [7], "below 7"),
        (Range(low=1, high=10**9), [10**9], [10**9 + 1], "from 1 to 1e9"),
        (Range(low=0.5, high=1000), [0.5], [0.4], "from 0.5 to 1,000"),
    ],
)
def test_range_contains_values_within_its_bounds(
    bounds: Range, inside: list[float], outside: list[float], words: str
) -> None:
    assert all(value in bounds for value in inside)
    assert not any(value in bounds for value in outside)
    assert str(bounds) == words


def target_function(
    count: Count = 1,
    rate: Positive | None = None,
    cohort: Count | PositiveShare = 1.0,
    places: tuple[Count, ...] = (),
    weights: Mapping[str, Positive] | None = None,
    clip: Annotated[float, Range(above=0, high=math.inf)] = 1.0,
    name: str = "x",
    note: Text = "",
    free: Any = None,
) -> None:
    """A function with options of several types."""


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("count", 0, "count is 0; it must be a whole number from 1 to 1e9"),
        ("count", 2**63, "count is 9223372036854775808; it must be"),
        ("rate", 0.0, "rate is 0.0; it must be a number above 0 and up to 1e9 or left out"),
        ("rate", math.nan, "rate is nan; "),
        ("rate", math.inf, "rate is inf; "),
        ("rate", 10**400, "rate is 1000"),
        ("cohort", 0, "it must be a whole number from 1 to 1e9 or a number above 0 and up to 1"),
        ("cohort", 1.5, "cohort is 1.5; "),
        ("cohort", 1e308, "cohort is 1e[+]308; "),
        ("places", [1, 0], r"places is \[1, 0\]; it must be a list, each a whole number from 1 to 1e9"),
        ("weights", {"a": -1}, r"weights is {'a': -1}; it must be a table, each a number above 0"),
        ("weights", {"": 1}, "weights is {'': 1}; "),
        ("clip", math.nan, "clip is nan; "),
        ("clip", -math.inf, "clip is -inf; it must be a number above 0 and up to inf"),
        ("name", "", "name is ''; it must be a text of one line that is not empty"),
        ("name", "a\0b", r"name is 'a\\x00b'; it must be a text of one line"),
        ("note", "a\nb", r"note is 'a\\nb'; it must be a text of one line$"),
        ("note", "a\u2028b", "note is "),
        ("note", "\udcff", "note is "),
        ("free", 2**63, "free is 9223372036854775808; it must be a value that TOML can hold"),
        ("free", {"a": [math.nan]}, "free is "),
        ("free", {"a\n": 1}, "free is "),
    ],
)
def test_option_out_of_range_is_refused_in_one_line(key: str, value: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words) as found:
        validate_options(target_function, {key: value}, "")
    assert len(str(found.value).splitlines()) == 1
    assert len(str(found.value)) < 600


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip", math.inf),
        ("cohort", 1),
        ("cohort", 0.5),
        ("rate", 1),
        ("note", ""),
        ("name", "naïve 名 —"),
        ("free", [1]),
    ],
)
def test_option_in_range_is_accepted(key: str, value: Any) -> None:
    assert validate_options(target_function, {key: value}, "") in ({key: value}, {key: (1,)})


def test_format_value_gives_one_short_line() -> None:
    assert format_value("a\nb") == "'a\\nb'"
    assert len(format_value("x" * 10_000)) < 300
    assert len(format_value([["x" * 1000] * 100] * 100)) < 300
    assert format_value(16**5000) == "a number of thousands of digits"
    assert one_line("a\u00a0b")
    assert not one_line("a\rb")
    assert describe(types.NoneType) == "left out"
    assert ranges_of(Union[Count, None]) == [Range(low=1, high=10**9)]  # noqa: UP007


def fitting_value(hint: Any) -> Any:
    """A value that fits a required option."""
    if found := ranges_of(hint):
        return found[0].low or 1
    return ["a"] if "tuple" in str(hint) else "a"


def with_value(heading: str, name: str, value: Any) -> dict[str, Any]:
    """A config whose table with this heading sets the option and all required ones."""
    table, _, kind = heading.partition(" ")
    needed = {each.name: fitting_value(each.hint) for each in SCHEMA[heading].values() if each.default is MISSING}
    given = {**needed, **({"noise": 1.0} if table == "privacy" else {}), name: value}
    if not table:
        return {**TINY, **given}
    if table == "model.adapter":
        return {**TINY, "model": {**TINY["model"], "adapter": given}}
    return {**TINY, table: {**given, **({"name": kind} if kind else {})}}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("heading", SCHEMA)
def test_every_option_beyond_its_bounds_is_refused_by_name(heading: str) -> None:
    for name, option in SCHEMA[heading].items():
        numbers = [*bounds_outside(option.hint), math.nan, -math.inf, 2**63] if len(ranges_of(option.hint)) == 1 else []
        texts = ["a\nb", "a\0b", *([] if Range() in ranges_of(option.hint) else [""])]
        for value in numbers if count_texts(option.hint) == 0 else texts:
            with pytest.raises(
                OptionError, match=re.escape(f"{heading.partition(' ')[0]}.{name}".lstrip(".") + " is ")
            ):
                parse(with_value(heading, name, value))


def count_texts(hint: Any) -> int:
    """How many times a type hint contains str."""
    return (hint is str) + sum(count_texts(each) for each in get_args(hint) if not isinstance(each, str | Range))


@pytest.mark.parametrize(
    "change",
    [
        "checkpoint.every=0",
        "evaluate.every=-1",
        "evaluate.personal_every=-1",
        "evaluate.max_clients=0",
        "evaluate.max_clients=-1",
        "engine.threads=-1",
        "engine.clients_per_block=0",
        "engine.clients_per_block=1000000000000000000000000000000",
        "federation.cohort=nan",
        "federation.cohort=1e308",
        "federation.cohort=0.0",
        "split.validation=inf",
        "split.clients=0",
        "seed=9223372036854775808",
        "rounds=0",
        "privacy={noise=-1.0}",
        "training.lr=1e300",
        "data.size=0",
        "model.frozen=['']",
        "method.name=fedavg+fedavg",
    ],
)
def test_values_that_once_caused_a_traceback_are_refused_by_name(change: str) -> None:
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    apply_override(raw, change)
    with pytest.raises(OptionError) as found:
        parse(raw)
    assert change.partition("=")[0].removesuffix(".name") in str(found.value) or "twice" in str(found.value)


@pytest.mark.parametrize(
    "changes", [["x=" + "[" * 10_000], ["x=" + "9" * 5000], ["a\nb=1"], ["seed.a.b=1", "seed=\udcff"]]
)
def test_unreadable_override_is_refused_in_one_line(changes: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("seed = 1\nmethod.name = 'fedavg'")
    with pytest.raises((ConfigError, OptionError)) as found:
        load(tmp_path / "c.toml", changes)
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize("text", [b"\xff\xfe", b"x = " + b"[" * 10_000, b"x = " + b"9" * 5000])
def test_unreadable_config_file_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"c\.toml"):
        load(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        (
            "model",
            {"width": 10**6, "layers": 1000, "heads": 1},
            "a vit of 1000 layers of width 1000000 would take .* PB",
        ),
        ("data", {"examples": 10**9}, "the synthetic data would take .* GB, but .* are free; lower data.examples"),
        ("data", {"size": 2**16}, "the synthetic data would take .* TB"),
        ("data", {"classes": 10**9}, "the synthetic data would take .* GB"),
        (
            "training",
            {},
            "training 3 clients together would take .* MB, .* are free; lower engine.clients_per_block",
        ),
    ],
)
def test_experiment_too_large_for_memory_is_refused_before_allocation(
    table: str, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 30_000 if table == "training" else 10**9
    monkeypatch.setattr(memory, "available", lambda: free)
    with pytest.raises(SizeError, match=words):
        build(parse({**TINY, table: {**TINY[table], **changes}}))


def test_hypernetwork_too_large_for_memory_is_refused() -> None:
    large = build(parse({**TINY, "method": {"name": "fedtp", "hidden": 10**9}}))
    with pytest.raises(SizeError, match=r"fedtp would take .* EB, but .* are free; lower method\.hidden"):
        initial_server(large.run, large.model)


@pytest.mark.parametrize("changes", [{"epochs": 10**9}, {"steps": 10**9}])
def test_too_many_training_steps_for_memory_are_refused(changes: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(
        SizeError, match=r"the order of examples in .* steps would take .*; train fewer epochs or steps"
    ):
        list(start(parse({**TINY, "training": {**TINY["training"], **changes}}), tmp_path))


def test_available_memory_is_the_smaller_of_machine_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files as written by Linux. Without a container limit only the machine counts."""
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:     500 kB\nSwapTotal: 0 kB\n")
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / name.rpartition("/")[2])
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert memory.available() == 500 * 1024
    for limit, used, free in (("max", "7", 500 * 1024), ("1000", "300", 700), ("900000", "100000", 500 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        assert memory.available() == free
    (tmp_path / "memory.max").unlink()
    assert memory._of_container() > 10**18, "no limit"


def test_available_memory_falls_back_to_total_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / "missing")
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory._of_machine() == 4_096_000


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 MB"),
        (250_000, "0.2 MB"),
        (999_999_999, "1000.0 MB"),
        (10**9, "1.0 GB"),
        (1500 * 10**9, "1.5 TB"),
        (10**12, "1.0 TB"),
        (25 * 10**14, "2.5 PB"),
        (10**18, "1.0 EB"),
        (1234 * 10**18, "1,234.0 EB"),
    ],
)
def test_sizes_are_formatted_in_a_suitable_unit(count: int, text: str) -> None:
    assert memory.size(count) == text


@pytest.mark.parametrize("free", [99, 100, 101])
def test_allocation_of_all_free_memory_is_accepted(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: free)
    if free >= 100:
        memory.require(100, "the table", "make it smaller")
    else:
        with pytest.raises(SizeError, match=r"the table would take .* are free; make it smaller"):
            memory.require(100, "the table", "make it smaller")


def test_small_experiment_is_built() -> None:
    assert build(parse(TINY)).pace.block == 3


@pytest.mark.parametrize(
    ("partitioner", "clients", "options"),
    [
        ("IidPartitioner", 10**9, {}),
        ("DirichletPartitioner", 3, {"alpha": "x"}),
        ("DirichletPartitioner", 3, {"alpha": -1}),
        ("DirichletPartitioner", 3, {"alpha": [1]}),
        ("DirichletPartitioner", 3, {"alpha": 1.0, "seed": -1}),
        ("PathologicalPartitioner", 3, {"num_classes_per_partition": 10**6}),
        ("IidPartitioner", 3, {"num_partitions": "x"}),
    ],
)
def test_partitioner_errors_are_one_line(partitioner: str, clients: int, options: dict[str, Any]) -> None:
    pytest.importorskip("flwr_datasets", reason="the reference, flwr-datasets, is not installed")
    asked = {"name": "flwr", "partitioner": partitioner, "clients": clients, "options": options}
    assert refusal(lambda: build(parse({**TINY, "split": asked}))) is not None


def test_a_method_named_twice_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'fedavg\+fedavg' names a method twice"):
        build_method("fedavg+fedavg")
