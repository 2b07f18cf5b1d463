"""The settings of a run: invalid values and contradictions, learning rates and cohorts."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from helpers import toy_run, with_federation
from hypothesis import given
from hypothesis import strategies as st

from partita.core.dp_settings import PrivacySettings
from partita.core.method_error import MethodError
from partita.core.optim import SGD, AdamW, Schedule
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.sampling import Uniform
from partita.core.settings import FederationSettings, Run, RunError, Training
from partita.methods.fedavg import fedavg
from partita.methods.scaffold import scaffold
from partita.privacy.client_level import protect_clients


def test_training_has_documented_defaults() -> None:
    training = Training()
    assert (training.lr, training.steps_by, training.rates) == (1e-3, AdamW(weight_decay=0.01), Schedule())
    assert (training.batch_size, training.epochs, training.steps, training.clip) == (32, 1, None, None)
    smallest = Training(lr=1e-9, batch_size=1, epochs=1, steps=1, clip=1e-9, precision="bfloat16")
    assert (smallest.steps, smallest.clip) == (1, 1e-9)


def test_run_has_documented_defaults() -> None:
    required = {"method": fedavg(), "training": Training(lr=0.1), "rounds": 1, "key": Key(0)}
    run = Run(**required)  # type: ignore[arg-type]
    assert {each.name: getattr(run, each.name) for each in fields(run) if each.name not in required} == {
        "federation": FederationSettings(),
        "drift": True,
        "examples": None,
        "secret": None,
        "hidden_cohorts": False,
        "sampling": Uniform(),
        "secure_aggregation": None,
        "client_noise": None,
    }
    assert {each.name: getattr(run.federation, each.name) for each in fields(FederationSettings)} == {
        "cohort": 1.0,
        "client_dropout": 0.0,
        "straggler_rate": 0.0,
        "availability_trace": None,
        "attackers": 0,
        "attack": "sign-flip",
        "attack_strength": 5.0,
        "min_updates": 1,
        "skip_failed_clients": False,
        "max_norm": None,
        "max_examples": 10**7,
        "clients_have_initial_model": False,
    }
    assert isinstance(run.federation.cohort, float), "an int would be a number of clients"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", 0.0),
        ("lr", float("nan")),
        ("batch_size", 0),
        ("epochs", 0),
        ("steps", 0),
        ("clip", 0.0),
        ("precision", "half"),
        ("accumulate", 0),
        ("warmup_steps", -1),
        ("layer_decay", 0.0),
        ("layer_decay", 1.5),
        ("label_smoothing", 1.0),
        ("loss_average", "words"),
        ("optimizer", "adam"),
        ("optimizer", Schedule()),
        ("optimizer", SGD),
        ("schedule", SGD()),
    ],
)
def test_invalid_training_settings_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"training\.{setting} is '?{re.escape(str(value))}'?; it must be"):
        Training(**{setting: value})


@given(
    momentum=st.floats(0.01, 0.99), decay=st.none() | st.floats(0, 1), nesterov=st.booleans(), epochs=st.integers(1, 9)
)
def test_a_name_and_its_keys_are_the_object(momentum: float, decay: float | None, nesterov: bool, epochs: int) -> None:
    sgd = Training(optimizer="sgd", momentum=momentum, weight_decay=decay, nesterov=nesterov)
    assert sgd.steps_by == SGD(momentum, decay or 0.0, nesterov)
    assert Training(weight_decay=decay).steps_by == AdamW(weight_decay=0.01 if decay is None else decay)
    rates = Training(
        schedule="step", schedule_warmup=epochs, schedule_floor=momentum, schedule_every=epochs, schedule_gamma=momentum
    ).rates
    assert rates == Schedule("step", epochs, momentum, epochs, momentum)
    objects = Training(optimizer=sgd.steps_by, schedule=rates)
    assert (objects.steps_by, objects.rates) == (sgd.steps_by, rates)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": SGD(), "momentum": 0.9}, r"training\.momentum is part of the object in training\.optimizer"),
        ({"optimizer": AdamW(), "weight_decay": 0.0}, r"training\.weight_decay is part of the object"),
        (
            {"schedule": Schedule(), "schedule_warmup": 1},
            r"training\.schedule_warmup is part of .*\.schedule;",
        ),
        ({"momentum": 0.9}, r"training\.momentum and training\.nesterov are for optimizer = 'sgd'"),
        ({"optimizer": "sgd", "nesterov": True}, r"training\.nesterov needs training\.momentum above 0"),
    ],
)
def test_contradictory_training_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Training(**given)


def test_class_weights_by_name_are_ordered_before_a_run() -> None:
    by_name = Training(class_weights={"b": 2.0})
    with pytest.raises(RunError, match=r"training\.class_weights is by name; .* Training\.with_classes"):
        Run(fedavg(), by_name, 1, Key(0))
    ordered = by_name.with_classes(["a", "b"])
    assert ordered.weights == (1.0, 2.0)
    assert ordered.with_classes(["b", "a"]) == ordered, "an order stays"
    assert Training(class_weights={}).with_classes(["a", "b"]).weights == Training().weights == ()


def test_clients_keep_their_optimizer_if_the_settings_or_the_method_say_so() -> None:
    for keeps, carries in ((False, False), (True, False), (False, True)):
        run = Run(replace(fedavg(), carry_optimizer=carries), Training(keep_optimizer=keeps), 1, Key(0))
        assert run.method.carry_optimizer == (keeps or carries)


def test_a_run_without_rounds_is_refused() -> None:
    with pytest.raises(RunError, match="rounds is 0; it must be at least 1"):
        toy_run(fedavg(), 0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cohort", 0),
        ("cohort", -1),
        ("cohort", 0.0),
        ("cohort", -0.5),
        ("cohort", 1.01),
        ("cohort", True),
        ("min_updates", -1),
        ("max_norm", 0.0),
        ("max_norm", math.inf),
        ("max_norm", math.nan),
        ("max_examples", 0),
        ("attack", "bribe"),
    ],
)
def test_invalid_federation_settings_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"federation\.{setting} is '?{value}'?; it must be"):
        FederationSettings(**{setting: value})
    assert toy_run(fedavg(), 1, max_norm=1e-9, max_examples=1, min_updates=0).federation.max_norm == 1e-9


def test_limits_on_updates_and_gradients_are_refused_when_privacy_sets_them() -> None:
    run = toy_run(fedavg(), 1, clip=1.0, max_norm=1.0)
    with pytest.raises(
        RunError, match=r"federation\.max_norm is 1\.0 and privacy\.unit is 'client': privacy\.clip already bounds"
    ):
        replace(run, method=protect_clients(fedavg(), 1.0, 1.0, 2))
    by_example = replace(fedavg(), privacy=PrivacySettings(clip=1.0, noise=2.0))
    with pytest.raises(
        RunError, match=r"training\.clip is 1\.0 and privacy\.unit is 'example': .*; leave training\.clip out"
    ):
        replace(run, method=by_example)
    plain = replace(run.training, clip=None)
    assert replace(run, method=by_example, training=plain).federation.max_norm == 1.0
    unbounded = with_federation(run, max_norm=None)
    assert replace(unbounded, method=protect_clients(fedavg(), 1.0, 1.0, 2)).training.clip == 1.0


def test_optimizer_is_refused_when_the_method_does_not_take_it() -> None:
    with pytest.raises(MethodError, match="is derived for sgd, not for adamw"):
        toy_run(scaffold(), optimizer=AdamW())


@pytest.mark.parametrize(
    ("cohort", "population", "size"),
    [(0.5, 6, 3), (1.0, 7, 7), (0.01, 10, 1), (0.2, 10, 2), (1, 5, 1), (5, 5, 5), (3, 100, 3), (0.34, 100, 34)],
)
def test_cohort_size_is_a_count_or_a_fraction_of_at_least_one_client(cohort: float, population: int, size: int) -> None:
    assert toy_run(fedavg(), cohort=cohort).cohort_size(population) == size


@pytest.mark.parametrize(("cohort", "population"), [(7, 6), (2, 1), (1, 0), (1.0, 0)])
def test_cohort_is_refused_when_it_does_not_fit_the_population(cohort: float, population: int) -> None:
    said = rf"federation\.cohort is {cohort}, but there are {population} clients; give a number from 1 to that"
    with pytest.raises(RunError, match=said):
        toy_run(fedavg(), cohort=cohort).cohort_size(population)


def test_cohorts_use_the_secret_key_only_when_hidden() -> None:
    clients = [f"c{number}" for number in range(40)]
    plain = toy_run(fedavg(), cohort=5)
    public, secret = (
        [(key / "round" / number / "cohort").sample(clients, 5) for number in range(3)] for key in (plain.key, Key(99))
    )
    assert public[0] != public[1], "each round draws a new cohort"
    for key, hidden, wanted in (
        (None, False, public),
        (None, True, public),
        (Key(99), False, public),
        (Key(99), True, secret),
    ):
        run = replace(plain, secret=key, hidden_cohorts=hidden)
        assert [run.draw_cohort(number, clients) for number in range(3)] == wanted


def test_learning_rate_of_a_round_follows_the_schedule() -> None:
    run = toy_run(fedavg(), 4, lr=0.3, schedule=Schedule("linear", warmup=1))
    wanted = [0.3 * run.training.rates.factor(number, 4) for number in range(4)]
    assert [run.lr(number) for number in range(4)] == wanted
    assert len(set(wanted)) > 2


@pytest.mark.parametrize("unequal", [{"warmup_steps": 1}, {"layer_decay": 0.9}])
def test_rules_for_one_learning_rate_refuse_unequal_ones(unequal: dict[str, Any]) -> None:
    said = r"derived for sgd, not for sgd with unequal learning rates; .* without momentum, warmup_steps or layer_decay"
    with pytest.raises(MethodError, match=said):
        toy_run(scaffold(), **unequal)
    assert toy_run(fedavg(), **unequal).training.optimizer_name == "sgd with unequal learning rates"
    assert toy_run(scaffold(), decay_norms_and_biases=False, accumulate=2).training.optimizer_name == "sgd"


def test_training_defaults_change_nothing() -> None:
    training = Training()
    assert (training.accumulate, training.warmup_steps, training.layer_decay) == (1, 0, 1.0)
    assert training.decay_norms_and_biases
    assert not training.group_by_length
    assert training.examples_per_step == training.batch_size
