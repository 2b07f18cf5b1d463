"""Any config gives an experiment or a one-line error, never a traceback or a hang."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path

import pytest
import tomli_w
from fuzzing import SCHEMA, TINY, Raw, configs, experiments, refusal, strange_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.core import memory
from partita.core.options import format_value
from partita.experiment import builder, pace
from partita.experiment.compare import expand
from partita.experiment.config import load, parse
from partita.experiment.runner import start

LIMIT = 2**28  # bytes of memory that an experiment may use here
# A class of a tiny data set can have fewer examples than data.shots.
pytestmark = pytest.mark.filterwarnings("ignore:.* have fewer than data.shots = ")
FUZZ = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], derandomize=True, print_blob=True
)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory, so that an accepted size does no harm; and no build changes global settings."""
    monkeypatch.setattr(memory, "available", lambda: LIMIT)
    monkeypatch.setattr(pace, "bf16_slowdown", lambda: 1.0)  # slow bfloat16 only gives a warning
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)


def assert_resolves_to_itself(raw: Raw) -> None:
    config = parse(copy.deepcopy(raw))
    assert parse(tomllib.loads(config.to_toml())) == config, "a resolved config resolves to itself"


@pytest.mark.slow
def test_any_config_is_accepted_or_refused_in_one_line() -> None:
    @given(configs())
    @settings(FUZZ, max_examples=600)
    def check(raw: Raw) -> None:
        refusal(lambda: assert_resolves_to_itself(raw))

    check()


@pytest.mark.slow
def test_any_experiment_is_built_or_refused_in_one_line(small_machine: None) -> None:
    @given(experiments())
    @settings(FUZZ, max_examples=200)
    def check(raw: Raw) -> None:
        refusal(lambda: builder.build(parse(raw)))

    check()


@pytest.mark.slow
def test_any_tiny_run_finishes_or_is_refused_in_one_line(
    small_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @given(experiments(small=True))
    @settings(FUZZ, max_examples=60)
    def check(raw: Raw) -> None:
        refusal(lambda: list(start(parse(raw), tmp_path_factory.mktemp("run"))))

    check()


PIECES = ["method", "training", "lr", "mu", "name", "fedavg", "fedprox", "seed", ".", "=", "+", "(", ")", ",", "[", "]"]
PIECES += [
    "{",
    "}",
    " ",
    "\n",
    "\0",
    "\udcff",
    "'",
    '"',
    "nan",
    "inf",
    "1e999",
    "9" * 30,
    "0x" + "f" * 5000,
    "[" * 3000,
]


def texts() -> st.SearchStrategy[str]:
    pieces = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8)
    return pieces.map("".join)


@pytest.mark.slow
def test_any_override_is_accepted_or_refused_in_one_line(tmp_path: Path) -> None:
    """The values of --set."""
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(TINY))
    named = st.sampled_from(
        [f"{table}.{key}".lstrip(".") for table in SCHEMA if " " not in table for key in SCHEMA[table]]
    )

    @given(
        st.lists(
            texts() | st.builds("{}={}".format, named, texts() | strange_values().map(format_value)),
            min_size=1,
            max_size=3,
        )
    )
    @settings(FUZZ, max_examples=500)
    def check(changes: list[str]) -> None:
        refusal(lambda: load(file, changes))

    check()


@pytest.mark.slow
def test_any_method_list_is_expanded_or_refused_in_one_line(tmp_path: Path) -> None:
    """The values of --methods."""
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(TINY))
    specs = st.sampled_from(
        ["fedavg", "fedprox(mu=0.1)", "fedprox(mu=-1)", "lora(rank=4, training.lr=0.1)", "x(", "()"]
    )

    @given(st.lists(specs | texts(), max_size=3).map(",".join), st.sampled_from([1, 2, 0, -1, 10**12]))
    @settings(FUZZ, max_examples=300)
    def check(methods: str, seeds: int) -> None:
        refusal(lambda: expand(file, (), methods, seeds, tmp_path / "out"))

    check()
