"""The JSON Schema accepts what the parser accepts, and refuses mistyped keys and values."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from shell import Shell

from partita.core.options import OptionError
from partita.experiment.config import ConfigError, load, parse
from partita.experiment.json_schema import config_schema
from partita.experiment.reference import find_headings

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = sorted([*ROOT.glob("examples/*.toml"), *ROOT.glob("src/partita/examples/*.toml")])


@pytest.fixture(scope="module")
def check() -> Any:
    schema = config_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(json.loads(json.dumps(schema))).validate


@pytest.mark.fast_cases(14)
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: f"{file.parent.parent.name}/{file.stem}")
def test_examples_fit(file: Path, check: Any) -> None:
    check(tomllib.loads(file.read_text()))


def test_complete_config_fits(check: Any, tmp_path: Path) -> None:
    check(tomllib.loads(load(ROOT / "examples" / "digits.toml").to_toml()))


@pytest.mark.parametrize(("table", "name"), [("data", "object"), ("model", "module")])
def test_what_only_a_program_can_say_is_not_offered(table: str, name: str, check: Any) -> None:
    with pytest.raises(jsonschema.ValidationError, match=f"'{name}' is not"):
        check({"method": {"name": "fedavg"}, table: {"name": name, "path": "object:0"}})
    with pytest.raises(OptionError, match=f"unknown {table} '{name}'"):
        find_headings(f"{table}.{name}")


@pytest.mark.parametrize(
    "text",
    [
        "rouds = 3",
        "rounds = 0",
        "rounds = 'many'",
        "label = 3",
        "method.name = 'fedavgg'",
        "method = { name = 'fedavg', mu = 0.1 }",
        "method = { name = 'fedprox', mu = -1 }",
        "method = { name = 'fedprox', mu = 'much' }",
        "method.mu = 0.1",
        "data = { name = 'digits', path = 'x' }",
        "data.name = 'text'",
        "split = { name = 'iid', clients = 2, alpha = 0.1 }",
        "split = { name = 'dirichlet', clients = 2.5, alpha = 0.1 }",
        "model.adapter = { kind = 'lora', rnk = 4 }\nmodel.name = 'vit'",
        "training.lr = 0",
        "training.optimizer = 'adam'",
        "training.augment = ['flop']",
        "track.to = ['tensorbord']",
        "privacy.unit = 'patient'",
        "engine = 3",
    ],
)
def test_mistakes_are_refused_by_schema_and_parser(text: str, check: Any) -> None:
    raw = tomllib.loads(text)
    raw.setdefault("method", {"name": "fedavg"})
    with pytest.raises(jsonschema.ValidationError):
        check(raw)
    if "track" not in raw:  # trackers are looked up when the run is built
        with pytest.raises((OptionError, ConfigError)):
            parse(raw)


@pytest.mark.parametrize(
    "text",
    [
        "method = { name = 'fedprox+lora', mu = 0.1 }",
        "method = { name = 'mine.py:half', share = 0.5 }",
        "track.to = ['wandb', 'mine.py:log']",
        "federation.cohort = 0.5",
        "federation.cohort = 5",
        "training = { lr = 1, class_weights = { a = 2 } }",
        "model = { name = 'vit', adapter = { kind = 'lora', rank = 4 } }",
    ],
)
def test_what_the_parser_takes_fits(text: str, check: Any) -> None:
    check({"method": {"name": "fedavg"}, **tomllib.loads(text)})


@pytest.mark.slow
def test_command_prints_the_schema_or_a_complete_config(run_partita: Shell) -> None:
    code, out, _ = run_partita("config", "--schema")
    assert code == 0
    described = json.loads(out)["properties"]["training"]["properties"]["lr"]
    assert described == {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 10**9,
        "description": "learning rate",
        "default": 0.001,
    }
    code, out, _ = run_partita("config", "--config", ROOT / "examples" / "digits.toml", "--set", "rounds=7")
    assert code == 0
    assert parse(tomllib.loads(out)) == load(ROOT / "examples" / "digits.toml", ["rounds=7"])
    code, _, err = run_partita("config")
    assert (code, err) == (1, "error: give either --config FILE or --schema\n")
