"""What does not go together is refused as early as it can be known, in one place and with the same words everywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from shell import Shell

import partita
from partita import data
from partita.core import settings
from partita.core.method_error import MethodError
from partita.core.rules import ANY, TASK, Rule, first_clash
from partita.core.settings import RunError
from partita.experiment import builder, fits
from partita.experiment.config import parse
from partita.experiment.flower_app import site_settings
from partita.experiment.tuning import Options, plan_tuning
from partita.tasks import IMAGE, LM, MULTI_LABEL_IMAGE, TEXT

Raw = Mapping[str, Any]
PRIVATE: Raw = {"noise": 1.0}
BY_CLIENT: Raw = {"noise": 1.0, "unit": "client"}
LORA: Raw = {"name": "pretrained", "path": "a/model"}
BASE: Raw = {
    "method": {"name": "fedavg"},
    "rounds": 1,
    "data": {"name": "digits"},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "width": 8, "layers": 1, "heads": 2},
}

# What the config alone shows: (changes to BASE, the head of the error and the beginning of its reason).
BY_CONFIG: list[tuple[Raw, str]] = [
    (
        {"federation": {"attackers": 1}, "secure_aggregation": {}},
        "federation.attackers is 1 and [secure_aggregation] is set: attackers are single clients",
    ),
    (
        {"federation": {"max_norm": 1.0}, "secure_aggregation": {}},
        "federation.max_norm is 1.0 and [secure_aggregation] is set: federation.max_norm bounds single updates",
    ),
    (
        {"engine": {"secret_file": "s"}},
        "engine.secret_file is 's' and [privacy] is not set: the file adds to the secret of a private run",
    ),
    (
        {"engine": {"secret_file": "s"}, "privacy": {"noise": 1.0, "repeatable": True}},
        "engine.secret_file is 's' and privacy.repeatable is true: repeatable noise is drawn from the seed",
    ),
    (
        {"training": {"augment": ["flip"]}, "engine": {"cache_frozen": True}},
        "training.augment is ['flip'] and engine.cache_frozen is true: a cache needs the same images in every round",
    ),
    (
        {"evaluate": {"samples": 2}, "engine": {"cache_frozen": True}},
        "evaluate.samples is 2 and engine.cache_frozen is true: a cache keeps examples as features",
    ),
    (
        {"evaluate": {"samples": 2}, "privacy": PRIVATE},
        "evaluate.samples is 2 and [privacy] is set: samples are test examples in full",
    ),
    ({"stop": {"epsilon": 1.0}}, "stop.epsilon is 1.0 and [privacy] is not set: only a private run spends epsilon"),
    (
        {"evaluate": {"unseen_epochs": 5}},
        "evaluate.unseen_epochs is 5 and split.unseen is not set: all clients take part",
    ),
    (
        {"evaluate": {"validation_metric": "loss"}},
        "evaluate.validation_metric is 'loss' and evaluate.validation_every is not set: no scores on validation",
    ),
    (
        {"engine": {"ledger": "l"}},
        "engine.ledger is 'l' and [privacy] is not set: the run adds no noise, so there is no epsilon to charge",
    ),
    (
        {"model": {**LORA, "adapter": {"dropout": 0.1}}, "training": {"dropout": False}},
        "model.adapter.dropout is 0.1 and training.dropout is false: nothing would be dropped",
    ),
    # TWELVE ends here.
    (
        {"data": {"name": "chat", "path": "a.jsonl", "pack": True}, "model": LORA, "engine": {"cache_frozen": True}},
        "data.pack is true and engine.cache_frozen is true: the cache holds single examples",
    ),
    (
        {"data": {"name": "chat", "path": "a.jsonl", "pack": True}, "model": LORA, "privacy": PRIVATE},
        "data.pack is true and privacy.unit is 'example': a packed row holds several examples",
    ),
    (
        {
            "data": {"name": "chat", "path": "a.jsonl", "pack": True},
            "model": LORA,
            "privacy": {"noise": 1.0, "unit": "group", "group": "ward"},
        },
        "data.pack is true and privacy.unit is 'group': a packed row holds several examples",
    ),
    (
        {"evaluate": {"unseen_epochs": 5, "personal_every": 0}, "split": {**BASE["split"], "unseen": 1}},
        "evaluate.unseen_epochs is 5 and evaluate.personal_every is 0: no client is tested on its own data",
    ),
    (
        {"evaluate": {"validation_every": 2}, "split": {**BASE["split"], "validation": 0.0}},
        "evaluate.validation_every is 2 and split.validation is 0.0: no client has validation examples",
    ),
    (
        {"stop": {"patience": 1}, "split": {**BASE["split"], "validation": 0.0}},
        "evaluate.validation_every is 1 and split.validation is 0.0: no client has validation examples",
    ),
    (
        {"privacy": {"noise": 1.0, "disclose_validation": True}},
        "privacy.disclose_validation is true and evaluate.validation_every is not set: there are no scores",
    ),
    (
        {"engine": {"ledger": "l"}, "privacy": {"noise": 1.0, "repeatable": True}},
        "engine.ledger is 'l' and privacy.repeatable is true: repeatable is noise that anyone can recompute",
    ),
    (
        {"engine": {"ledger": "l"}, "privacy": BY_CLIENT},
        "engine.ledger is 'l' and privacy.unit is 'client': a ledger is a site's",
    ),
    (
        {"model": {**LORA, "adapter": {"rank": 8, "ranks": [2, 8]}}, "privacy": BY_CLIENT},
        "model.adapter.ranks is [2, 8] and privacy.unit is 'client': ranks let clients send different parameters",
    ),
    (
        {"privacy": {**BY_CLIENT, "accountant": "pld"}, "secure_aggregation": {}},
        "privacy.accountant is 'pld' and privacy.unit is 'client' and [secure_aggregation] is set: noise at the",
    ),
    (
        {"privacy": PRIVATE, "evaluate": {"validation_every": 1}},
        "evaluate.validation_every is 1 and [privacy] is set: it reads scores on the clients' validation examples",
    ),
    (
        {"privacy": {"noise": 1.0, "disclose_validation": True}, "stop": {"patience": 1}},
        "evaluate.validation_every is 1 and [privacy] is set: it reads scores on the clients' validation examples",
    ),
    (
        {
            "privacy": {"noise": 1.0, "disclose_validation": True},
            "evaluate": {"validation_every": 1},
            "method": {"name": "fedper", "finetune": 1},
        },
        "evaluate.validation_every is 1 and [privacy] is set: it reads scores on the clients' validation examples",
    ),
    (
        {
            "privacy": BY_CLIENT,
            "evaluate": {"unseen_epochs": 5},
            "split": {**BASE["split"], "unseen": 1},
        },
        "evaluate.unseen_epochs is 5 and [privacy] is set: the privacy guarantee withholds the scores",
    ),
    (
        {
            "privacy": PRIVATE,
            "method": {"name": "fedper", "finetune": 1},
            "evaluate": {"unseen_epochs": 5},
            "split": {**BASE["split"], "unseen": 1},
        },
        "evaluate.unseen_epochs is 5 and [privacy] is set: the privacy guarantee withholds the scores",
    ),
    (
        {"federation": {"max_norm": 1.0}, "privacy": BY_CLIENT},
        "federation.max_norm is 1.0 and privacy.unit is 'client': privacy.clip already bounds every update",
    ),
    (
        {"sampling": {"name": "power_of_choice"}, "secure_aggregation": {}},
        "sampling.name is 'power_of_choice' and [secure_aggregation] is set: this sampling reads the clients' training",
    ),
    (
        {"sampling": {"name": "power_of_choice"}, "privacy": PRIVATE},
        "sampling.name is 'power_of_choice' and privacy.unit is 'example': this sampling reads the clients' training",
    ),
    (
        {"sampling": {"name": "power_of_choice"}, "privacy": BY_CLIENT},
        "sampling.name is 'power_of_choice' and privacy.unit is 'client': this sampling reads the clients' training",
    ),
    (
        {"sampling": {"name": "by_size"}, "privacy": BY_CLIENT},
        "sampling.name is 'by_size' and privacy.unit is 'client': this sampling does not draw all clients with the",
    ),
    (
        {
            "sampling": {"name": "by_size"},
            "method": {"name": "scaffold", "weigh": "examples"},
            "training": {"optimizer": "sgd"},
        },
        "sampling.equal_weights is true and method.name is 'scaffold': the server of this method weighs clients",
    ),
    (
        {"training": {"clip": 1.0}, "privacy": PRIVATE},
        "training.clip is 1.0 and privacy.unit is 'example': privacy.clip already clips each gradient",
    ),
    (
        {"training": {"accumulate": 2}, "privacy": {"noise": 1.0, "unit": "group", "group": "ward"}},
        "training.accumulate is 2 and privacy.unit is 'group': DP-SGD is accounted by training.batch_size",
    ),
    (
        {"training": {"group_by_length": True}, "privacy": PRIVATE},
        "training.group_by_length is true and privacy.unit is 'example': DP-SGD is accounted for batches that are",
    ),
    (
        {"training": {"loss_average": "tokens"}, "privacy": PRIVATE},
        "training.loss_average is 'tokens' and privacy.unit is 'example': DP-SGD clips the gradient of each example",
    ),
    (
        {"training": {"class_weights": {"cat": 2.0}}, "privacy": PRIVATE},
        "training.class_weights is [2.0] and privacy.unit is 'example': DP-SGD clips the gradient of each example",
    ),
    (
        {"training": {"accumulate": 2}, "method": {"name": "fedsam"}},
        "training.accumulate is 2 and method.name is 'fedsam': this method evaluates gradients of whole steps",
    ),
]
TWELVE = BY_CONFIG[:12]


def _task(kind: Any, **more: Any) -> dict[str, Any]:
    return {"task": SimpleNamespace(kind=kind, packed=False, first_windows=None, test=None, **more)}


def _clients(train: int, validation: int) -> Any:
    held = SimpleNamespace(train=range(train), validation=range(validation))
    return type("Clients", (dict,), {"clients": ["a", "b"]})({"a": held, "b": held})


def _run(**more: Any) -> dict[str, Any]:
    return {"run": SimpleNamespace(rounds=1, method=SimpleNamespace(adapt=None)), **more}


def _guard(size: int, epsilon: float) -> Any:
    spent = SimpleNamespace(epsilon=lambda: epsilon)
    account = SimpleNamespace(of_clients=False)
    return SimpleNamespace(sizes={"a": size}, account=account, forecast=lambda rounds: spent)


# What a task, a model or a run shows: (changes to BASE, stand-ins for the parts, the error).
WINDOWS = {"task": SimpleNamespace(kind=TEXT, packed=False, first_windows=[0, 2], test=SimpleNamespace(documents=[0]))}
BY_PARTS: list[tuple[Raw, dict[str, Any], str]] = [
    (
        {"privacy": PRIVATE},
        WINDOWS,
        "data.long_texts is not set and privacy.unit is 'example': a text is cut into windows",
    ),
    (
        {"evaluate": {"subgroups": "site"}},
        WINDOWS,
        "evaluate.subgroups is 'site' and data.long_texts is not set: a test text is cut into windows",
    ),
    (
        {"privacy": PRIVATE},
        {"task": SimpleNamespace(kind=TEXT, packed=True)},  # a task of the user's own
        "data.pack is true and privacy.unit is 'example': a packed row holds several examples",
    ),
    (
        {"training": {"label_smoothing": 0.1}},
        _task(MULTI_LABEL_IMAGE),
        "training.label_smoothing is 0.1 and the task is of kind 'multi-label image': it is for tasks in which a",
    ),
    (
        {"training": {"class_weights": {"cat": 2.0}}},
        _task(MULTI_LABEL_IMAGE),
        "training.class_weights is {'cat': 2.0} and the task is of kind 'multi-label image': it is for tasks in which",
    ),
    (
        {"training": {"augment": ["flip", "crop"]}},
        _task(TEXT),
        "training.augment is ['flip', 'crop'] and the task is of kind 'text': only images are augmented",
    ),
    (
        {"training": {"loss_average": "tokens"}},
        _task(IMAGE),
        "training.loss_average is 'tokens' and the task is of kind 'image': it has no labels of tokens",
    ),
    (
        {"evaluate": {"samples": 2}},
        _task(LM),
        "evaluate.samples is 2 and the task is of kind 'lm': an example has no label or text to show",
    ),
    (
        {"evaluate": {"unseen_epochs": 5}, "split": {**BASE["split"], "unseen": 1}},
        {"model": SimpleNamespace(initial={}, personal=lambda params: {})},
        "evaluate.unseen_epochs is 5 and method.name is 'fedavg': clients of this method are tested with a copy",
    ),
    (
        {"evaluate": {"samples": 2}},
        {
            "run": SimpleNamespace(rounds=1, method=SimpleNamespace(adapt=lambda model: ())),
            "model": None,
            "federation": _clients(1, 1),
        },
        "evaluate.samples is 2 and method.name is 'fedavg': every client has a model of its own",
    ),
    (
        {"evaluate": {"validation_every": 1}, "split": {**BASE["split"], "validation": 0.001}},
        _run(federation=_clients(3, 0)),
        "evaluate.validation_every is 1 and split.validation is 0.001: no client has validation examples",
    ),
    (
        {"stop": {"epsilon": 1.0}, "privacy": PRIVATE},
        _run(guard=_guard(0, 0.5)),
        "stop.epsilon is 1.0 and split.name is 'iid': it needs the number of examples of every client",
    ),
    (
        {"stop": {"epsilon": 1.0}, "privacy": PRIVATE},
        _run(guard=_guard(9, 1.5)),
        "stop.epsilon is 1.0 and privacy.noise is 1.0: the first round alone costs epsilon 1.5",
    ),
]


@pytest.mark.parametrize(("changes", "words"), BY_CONFIG, ids=[words for _, words in BY_CONFIG])
def test_what_the_config_shows_is_refused_when_it_is_read(changes: Raw, words: str) -> None:
    with pytest.raises(RunError, match=f"^{re.escape(words)}.*; ") as error:
        parse({**BASE, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("changes", "parts", "words"), BY_PARTS, ids=[words for _, _, words in BY_PARTS])
def test_what_a_part_shows_is_refused_when_it_exists(changes: Raw, parts: dict[str, Any], words: str) -> None:
    config = parse({**BASE, **changes})
    with pytest.raises(RunError, match=f"^{re.escape(words)}.*; "):
        fits.check(fits.Parts(config, **parts))


@pytest.mark.parametrize(
    "rule", [rule for rules in fits.RULES.values() for rule in rules] + [*settings.RULES], ids=lambda rule: rule.why
)
def test_every_rule_has_a_row(rule: Rule) -> None:
    known = [words for _, words in BY_CONFIG] + [words for _, _, words in BY_PARTS]
    found = [head for head, _, reason in (words.rpartition(": ") for words in known) if _begins(rule.why, reason)]
    assert any(all(key in head for key in rule.settings) for head in found), "add a row to BY_CONFIG or BY_PARTS"


def _begins(why: str, reason: str) -> bool:
    return why.startswith(reason) or reason.startswith(why.removesuffix(" more"))


def test_a_remedy_names_a_setting_that_can_be_left_out() -> None:
    for rule in (*settings.RULES, *(rule for rules in fits.RULES.values() for rule in rules)):
        assert len(rule.settings) > 1
        assert TASK not in rule.advice


def test_values_clash_as_the_table_says() -> None:
    """True is set, False is not, a tuple is one of them, and 0 is itself but not what is not set."""
    table: list[tuple[object, object, bool]] = [
        (True, 2, True),
        (True, 0, False),
        (True, None, False),
        (False, 0.0, True),
        (False, None, True),
        (False, "x", False),
        (0, 0.0, True),
        (0, None, False),
        ("a", "a", True),
        ("a", "b", False),
        (("a", "b"), "b", True),
        (("a", "b"), None, False),
        (ANY, None, True),
    ]
    for wanted, value, clash in table:
        found = first_clash([Rule({"x.y": wanted, "z": ANY}, "why")], None, {"x.y": value, "z": 1}.get)
        assert (found is not None) == clash, (wanted, value)


def test_first_rule_that_is_broken_is_the_error() -> None:
    rules = [Rule({"a": False, "b": ANY}, "one"), Rule({"a": True, "b": ANY}, "two"), Rule({"a": ANY, "b": ANY}, "3")]
    assert first_clash(rules, None, {"a": 1, "b": False}.get) == "a is 1 and b is false: two; leave one of them out"
    assert first_clash([], None, {}.get) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": {"name": "scaffold"}}, "is derived for sgd, not for adamw"),
        ({"method": {"name": "median"}, "secure_aggregation": {}}, "median cannot aggregate securely: RobustServer"),
        ({"method": {"name": "median"}, "privacy": BY_CLIENT}, "computes its own mean over clients"),
        ({"method": {"name": "fedsam"}, "privacy": PRIVATE}, "each would be one more release"),
    ],
)
def test_what_a_method_does_not_take_is_refused_when_the_config_is_read(changes: Raw, words: str) -> None:
    with pytest.raises(MethodError, match=words):
        parse({**BASE, **changes})


def test_a_method_that_pools_its_clients_does_not_sample_them() -> None:
    parse({**BASE, "method": {"name": "centralized"}, "sampling": {"name": "power_of_choice"}, "privacy": PRIVATE})


def _stop(*given: Any, **more: Any) -> Any:
    raise AssertionError("this part must not be built")


# ---- every door


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", _stop)


def _write(folder: Path, changes: Raw) -> Path:
    (folder / "config.toml").write_text(tomli_w.dumps({**BASE, **changes}))
    return folder / "config.toml"


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(("changes", "words"), TWELVE, ids=[words for _, words in TWELVE])
def test_plan_refuses_before_any_data_is_loaded(
    changes: Raw, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = Shell(monkeypatch, capsys)("plan", "--config", _write(tmp_path, changes))
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {words}")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("command", ["config", "split", "budget", "run", "compare"])
def test_every_command_says_the_same(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"compare": ("--methods", "fedavg", "--out", tmp_path / "out"), "run": ("--out", tmp_path / "out")}
    shell = Shell(monkeypatch, capsys)
    file = _write(tmp_path, TWELVE[0][0])
    wanted = shell("plan", "--config", file)
    assert wanted[2].startswith(f"error: {TWELVE[0][1]}")
    assert shell(command, "--config", file, *more.get(command, ())) == wanted
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_data")
def test_a_tuning_a_site_and_python_say_the_same(tmp_path: Path) -> None:
    changes, words = TWELVE[0]
    file, wanted = _write(tmp_path, changes), f"^{re.escape(words)}"
    with pytest.raises(RunError, match=wanted):
        plan_tuning(file, (), Options("fedavg", ("training.lr=choice(0.1,0.2)",)), tmp_path / "out")
    with pytest.raises(RunError, match=wanted):
        site_settings(file, "c0", (), ())
    with pytest.raises(RunError, match=wanted):
        partita.run({**BASE, **changes}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- when a part is built


def test_the_task_is_asked_before_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "build_model", _stop)
    with pytest.raises(RunError, match="the task is of kind 'image': it has no labels of tokens"):
        builder.build(parse({**BASE, "training": {"loss_average": "tokens"}}))


def test_the_model_is_asked_before_the_run_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "build_run", _stop)
    raw = {"split": {**BASE["split"], "unseen": 1}, "evaluate": {"unseen_epochs": 5}, "method": {"name": "ditto"}}
    with pytest.raises(RunError, match=r"method\.name is 'ditto': clients of this method are tested with a copy"):
        builder.build(parse({**BASE, **raw}))


def test_the_run_is_asked_before_the_block_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "choose_pace", _stop)
    with pytest.raises(RunError, match=r"method\.name is 'fedper': every client has a model of its own"):
        builder.build(parse({**BASE, "evaluate": {"samples": 1}, "method": {"name": "fedper"}}))
