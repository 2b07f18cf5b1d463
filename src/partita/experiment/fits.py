"""What goes together: the table of settings of different tables that do not, and what to do about each.

A config is checked as soon as it is read. What follows from the task, the model or the built run is checked when that
exists. The rules of a `Run`, in `core.settings`, are asked when a config is read too. Settings of one table, and parts
of one method, are checked where they are defined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from partita.core.method import Method
from partita.core.plan import RoundInfo, plan_for
from partita.core.registry import find_function
from partita.core.rng import Key
from partita.core.rules import ANY, METHOD, TASK, UNIT, Rule, first_clash
from partita.core.sampling import Uniform, build_sampling
from partita.core.settings import RunError
from partita.experiment.config_tables import Config
from partita.experiment.early_stopping import evaluated_clients
from partita.experiment.samples import CLASSIFIERS, WRITERS
from partita.models.adapter_options import adapter_options
from partita.privacy.guard import protect
from partita.secure_aggregation.eligibility import check_method
from partita.tasks.losses import CLASS_LOSSES

Stage = Literal["config", "method", "task", "model", "run"]
STAGES: dict[Stage, str] = {
    "config": "the config is read",
    "method": "the config is read",
    "task": "the data is loaded",
    "model": "the model is built",
    "run": "the run is built, before its first round",
}
ONE_CLASS = "it is for tasks in which a target is one class"
RAISE_VALIDATION = "raise split.validation, or leave out evaluate.validation_every and patience and target of [stop]"


@dataclass(frozen=True)
class Parts:
    """What a rule can ask: the config, and the parts that exist."""

    config: Config
    method: Any = None  # as its table builds it
    task: Any = None
    model: Any = None
    run: Any = None  # comes with the model, the federation and the guard
    federation: Any = None
    guard: Any = None

    def read(self, key: str) -> object:
        """Return the value of a setting; None if it is not set or empty."""
        if key == TASK:
            return self.task.kind.name
        if key.startswith("["):
            return getattr(self.config, key.strip("[]"))
        if key == "data.pack":
            return _packed(self)
        if key == "evaluate.validation_every":
            return self.config.validation_every or None  # [stop] may ask for it
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value


def check(parts: Parts) -> None:
    """Raise an error for the first rule that is broken, of those whose part exists.

    Raises:
        RunError: If settings do not go together.
        MethodError: If the method does not take a setting.
    """
    asked = (rule for stage, rules in RULES.items() if getattr(parts, stage) is not None for rule in rules)
    if error := first_clash(asked, parts, parts.read):
        raise RunError(error)
    if parts.method is not None:
        _check_method(parts.config, parts.method)


def _check_method(config: Config, method: Method) -> None:
    """Build the run without its data, so that it refuses what does not go with its method."""
    sampling = Uniform()  # stands for what a function makes, which may read a file
    if not method.pool and isinstance(find_function("sampling", config.sampling["name"]), type):
        sampling = build_sampling(config.sampling)
    weights = config.training.class_weights
    classes = tuple(weights) if isinstance(weights, Mapping) else ()
    run = config.run(method, Key(config.seed), sampling, classes)
    if config.secure_aggregation is not None:
        check_method(method)
    if config.privacy is not None:
        # The protocol needs the size of a cohort, which depends on the data.
        known = replace(config.privacy, noise=config.privacy.noise or 0.0)
        protect(replace(run, secure_aggregation=None), known, 1)


def _packed(parts: Parts) -> bool:
    """Whether rows hold several examples, which a task of the user's own says alone."""
    return bool(parts.config.data.get("pack") if parts.task is None else parts.task.packed)


def _has_other_loss(parts: Parts) -> bool:
    return parts.task.kind.loss not in CLASS_LOSSES


def _withholds_own_scores(parts: Parts) -> bool:
    private = parts.config.privacy
    return private is not None and (private.unit == "client" or parts.method.adapt is not None)


def _may_not_validate(parts: Parts) -> bool:
    """Whether privacy withholds scores on validation examples, or what would follow from them."""
    stop, private = parts.config.stop, parts.config.privacy
    # A stop that follows from scores would disclose them, and adapted models are trained on raw examples.
    may = private is not None and private.disclose_validation and parts.method.adapt is None
    return not may or (stop is not None and stop.reads_scores)


def _lacks_validation(parts: Parts) -> bool:
    """Whether no client that is evaluated has validation examples. What is on other machines may have some."""
    held = [parts.federation[client] for client in evaluated_clients(parts.config, parts.federation.clients)]
    return all(len(data.train) for data in held) and not any(len(data.validation) for data in held)


def _has_own_models(parts: Parts) -> bool:
    """Whether every client has a model of its own in the first or in the last round."""
    run, client = parts.run, parts.federation.clients[0]
    rounds = (RoundInfo(round, run.rounds, client) for round in (0, run.rounds - 1))
    return run.method.adapt is not None or any(plan_for(run.method.plan, parts.model, each).keep for each in rounds)


def _first_round_exceeds(parts: Parts) -> str:
    first, stop = parts.guard.forecast(1).epsilon(), parts.config.stop
    return f"the first round alone costs epsilon {first:.4g}" if stop and first > stop.epsilon else ""


RULES: dict[Stage, tuple[Rule, ...]] = {
    "config": (
        Rule(
            {"federation.attackers": True, "[secure_aggregation]": True},
            "attackers are single clients, and nothing can find or bound a single client in a sum",
        ),
        Rule(
            {"engine.secret_file": True, "[privacy]": False},
            "the file adds to the secret of a private run",
            "leave engine.secret_file out, or add a table [privacy]",
        ),
        Rule(
            {"engine.secret_file": True, "privacy.repeatable": True},
            "repeatable noise is drawn from the seed, and the file adds to a secret",
        ),
        Rule({"training.augment": True, "engine.cache_frozen": True}, "a cache needs the same images in every round"),
        Rule({"data.pack": True, "engine.cache_frozen": True}, "the cache holds single examples"),
        Rule(
            {"data.pack": True, UNIT: ("example", "group")},
            "a packed row holds several examples, and privacy would hide one row",
            "set data.pack to false, or privacy.unit to 'client'",
        ),
        Rule(
            {"evaluate.samples": True, "engine.cache_frozen": True},
            "a cache keeps examples as features of the frozen layers, which no one can read",
        ),
        Rule(
            {"evaluate.samples": True, "[privacy]": True},
            "samples are test examples in full, and a private run records no example",
        ),
        Rule(
            {"stop.epsilon": True, "[privacy]": False},
            "only a private run spends epsilon",
            "add a table [privacy], or leave stop.epsilon out",
        ),
        Rule(
            {"evaluate.unseen_epochs": True, "split.unseen": False},
            "all clients take part",
            "set split.unseen, or leave evaluate.unseen_epochs out",
        ),
        Rule(
            {"evaluate.unseen_epochs": True, "evaluate.personal_every": False},
            "no client is tested on its own data",
            "set evaluate.personal_every above 0, or leave evaluate.unseen_epochs out",
        ),
        Rule(
            {"evaluate.validation_metric": True, "evaluate.validation_every": False},
            "no scores on validation examples are computed",
            "set evaluate.validation_every, stop.patience or stop.target, or leave evaluate.validation_metric out",
        ),
        Rule(
            {"evaluate.validation_every": True, "split.validation": 0},
            "no client has validation examples",
            RAISE_VALIDATION,
        ),
        Rule(
            {"privacy.disclose_validation": True, "evaluate.validation_every": False},
            "there are no scores on validation examples to disclose",
            "set evaluate.validation_every, or leave privacy.disclose_validation out",
        ),
        Rule(
            {"engine.ledger": True, "[privacy]": False},
            "the run adds no noise, so there is no epsilon to charge",
            "add a table [privacy], or leave engine.ledger out",
        ),
        Rule({"engine.ledger": True, "privacy.repeatable": True}, "repeatable is noise that anyone can recompute"),
        Rule(
            {"engine.ledger": True, UNIT: "client"},
            "a ledger is a site's, and with this unit the server adds the noise",
            "leave engine.ledger out, or use another unit",
        ),
        Rule({"model.adapter.dropout": True, "training.dropout": False}, "nothing would be dropped"),
        Rule(
            {"model.adapter.ranks": True, UNIT: "client"},
            "ranks let clients send different parameters, but this unit hides a client among others that send the same",
            when=lambda p: len(adapter_options(p.config.model["adapter"]).bounds) > 1,
        ),
        Rule(
            {"privacy.accountant": "pld", UNIT: "client", "[secure_aggregation]": True},
            "noise at the clients is a sum of discrete Gaussians, which only 'rdp' bounds",
            "set privacy.accountant to 'rdp' or 'auto'",
        ),
    ),
    "method": (
        Rule(
            {"evaluate.validation_every": True, "[privacy]": True},
            "it reads scores on the clients' validation examples, which only privacy.disclose_validation allows, and "
            "never for [stop] or with a method that fine-tunes for a test",
            "leave out evaluate.validation_every and patience and target of [stop], or stop by stop.epsilon",
            _may_not_validate,
        ),
        Rule(
            {"evaluate.unseen_epochs": True, "[privacy]": True},
            "the privacy guarantee withholds the scores of clients' own models",
            "leave evaluate.unseen_epochs out, or set privacy.unit to 'example' with a method that fits nothing for "
            "the test",
            _withholds_own_scores,
        ),
    ),
    "task": (
        Rule(
            {"data.long_texts": ANY, UNIT: "example"},
            "a text is cut into windows, and privacy would hide one window of it",
            "set data.long_texts to 'cut' or 'error', or privacy.unit to 'group' or 'client'",
            lambda p: p.task.first_windows is not None,
        ),
        Rule(
            {"evaluate.subgroups": True, "data.long_texts": ANY},
            "a test text is cut into windows, which are no rows of the column",
            "set data.long_texts to another value, or leave evaluate.subgroups out",
            lambda p: getattr(p.task.test, "documents", None) is not None,
        ),
        Rule({"training.label_smoothing": True, TASK: ANY}, ONE_CLASS, when=_has_other_loss),
        Rule({"training.class_weights": True, TASK: ANY}, ONE_CLASS, when=_has_other_loss),
        Rule(
            {"training.augment": True, TASK: ANY},
            "only images are augmented",
            when=lambda p: p.task.kind.inputs != "image",
        ),
        Rule(
            {"training.loss_average": "tokens", TASK: ANY},
            "it has no labels of tokens",
            when=lambda p: p.task.kind.head not in ("tokens", "lm"),
        ),
        Rule(
            {"evaluate.samples": True, TASK: ANY},
            "an example has no label or text to show",
            when=lambda p: p.task.kind not in (*WRITERS, *CLASSIFIERS),
        ),
    ),
    "model": (
        Rule(
            {"evaluate.unseen_epochs": True, METHOD: ANY},
            "clients of this method are tested with a copy or a cache that only its own rounds fill",
            "leave evaluate.unseen_epochs out, or use a method that keeps a part of the model, such as fedper",
            # The loss of plain training does not read copies and caches, so they have no gradient.
            lambda p: p.model.personal(p.model.initial) is not p.model.initial,
        ),
    ),
    "run": (
        Rule(
            {"evaluate.samples": True, METHOD: ANY},
            "every client has a model of its own, and samples are answers of a model that all share",
            when=_has_own_models,
        ),
        Rule(
            {"evaluate.validation_every": True, "split.validation": ANY},
            "no client has validation examples",
            RAISE_VALIDATION,
            _lacks_validation,
        ),
        Rule(
            {"stop.epsilon": True, "split.name": ANY},
            "it needs the number of examples of every client, which is not known here",
            "leave stop.epsilon out",
            lambda p: not all(p.guard.sizes.values()) and not p.guard.account.of_clients,
        ),
        Rule(
            {"stop.epsilon": True, "privacy.noise": ANY},
            "the first round alone costs more",
            "raise stop.epsilon, or privacy.noise",
            _first_round_exceeds,
        ),
    ),
}
