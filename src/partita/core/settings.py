"""The settings of a run, which server and clients share before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal, cast

from partita.core.client_noise import ClientNoise
from partita.core.method import Method
from partita.core.optim import SGD, AdamW, Optimizer, Schedule
from partita.core.options import (
    IN_CODE,
    Count,
    NotNegative,
    OptionError,
    PartialShare,
    Positive,
    PositiveShare,
    Share,
    Whole,
    closest_match,
    validate_fields,
)
from partita.core.rng import Key
from partita.core.rules import ANY, METHOD, UNIT, Rule, first_clash
from partita.core.sampling import ClientInfo, Uniform
from partita.core.secure_settings import SecureAggregation

Augmentation = Literal[
    "flip", "crop", "rotate", "shear", "cutout", "contrast", "brightness", "sharpness", "randaugment"
]
AttackKind = Literal["sign-flip", "scale", "noise", "examples", "label-flip"]
# The keys of [training] that say what an object says itself.
KEYS_OF = {
    "optimizer": ("weight_decay", "momentum", "nesterov"),
    "schedule": ("schedule_warmup", "schedule_floor", "schedule_every", "schedule_gamma"),
}


class RunError(ValueError):
    """A setting is invalid, or settings contradict each other."""


@dataclass(frozen=True)
class Training:
    """The `[training]` table: how a client trains in one round.

    In Python, `optimizer` and `schedule` can also be objects, which then have what further keys say of them. The class
    weights can also be in the order of the classes.

    Raises:
        OptionError: If a value is not one that the config takes, or if settings contradict each other.
    """

    lr: Annotated[Positive, "learning rate"] = 1e-3
    optimizer: Annotated[Literal["sgd", "adamw"] | Annotated[Optimizer, IN_CODE], "the clients' optimizer"] = "adamw"
    weight_decay: Annotated[
        NotNegative | None,
        f"weight decay; AdamW decouples it from the gradient; if left out, {AdamW.weight_decay} for `adamw` and "
        f"{SGD.weight_decay:g} for `sgd`",
    ] = None
    momentum: Annotated[PartialShare, "momentum; `sgd` only"] = 0.0
    nesterov: Annotated[bool, "Nesterov momentum; `sgd` only"] = False
    decay_norms_and_biases: Annotated[
        bool, "apply weight decay to norms and biases too; `false` leaves them out, as transformers' Trainer does"
    ] = True
    layer_decay: Annotated[
        PositiveShare,
        "factor on the learning rate from layer to layer, from the head down to the embeddings; 1 for none",
    ] = 1.0
    warmup_steps: Annotated[
        Whole, "steps of linear learning rate warm-up at the start of each client's round (each phase of it)"
    ] = 0
    label_smoothing: Annotated[
        PartialShare, "share of a target that is spread over all classes; evaluation does not smooth"
    ] = 0.0
    class_weights: Annotated[
        Mapping[str, Positive] | Annotated[tuple[Positive, ...], IN_CODE] | None,
        "weight of each class in the training loss, by name; 1 for classes left out",
    ] = None
    augment: Annotated[tuple[Augmentation, ...], "random changes of training images, in this order"] = ()
    loss_average: Annotated[
        Literal["examples", "tokens"],
        "what the training loss of a batch averages over: its examples, or all its labeled tokens, as transformers' "
        "Trainer does; `tokens` and `lm` tasks only",
    ] = "examples"
    dropout: Annotated[bool, "dropout in training, with the rates in the model's own config; `false` turns it off"] = (
        True
    )
    keep_optimizer: Annotated[
        bool, "each client keeps its optimizer state (momentum, AdamW's moments) from round to round"
    ] = False
    batch_size: Annotated[Count, "examples per batch"] = 32
    accumulate: Annotated[Count, "batches per optimizer step; their gradients are averaged over all examples"] = 1
    group_by_length: Annotated[
        bool,
        "fill batches with texts of similar lengths, longest first, as transformers' `group_by_length` does; less "
        "padding, but batches depend on the lengths; texts only, and not with example- or group-level privacy",
    ] = False
    epochs: Annotated[Count, "local epochs per round"] = 1
    steps: Annotated[Count | None, "local steps per round, instead of epochs"] = None
    clip: Annotated[Positive | None, "clipping norm for a client's gradient"] = None
    precision: Annotated[
        Literal["float32", "bfloat16"], "`bfloat16` trains in mixed precision; the weights stay in float32"
    ] = "float32"
    schedule: Annotated[
        Literal["constant", "cosine", "linear", "step"] | Annotated[Schedule, IN_CODE],
        "learning rate schedule over the rounds",
    ] = "constant"
    adapt_lr: Annotated[
        Positive | None,
        "learning rate, without a schedule, for methods that fine-tune a client's model before its personal test, and "
        "for `evaluate.unseen_epochs`; `lr` if left out",
    ] = None
    schedule_warmup: Annotated[Whole, "rounds of linear learning rate warm-up"] = 0
    schedule_floor: Annotated[Share, "`cosine` and `linear` end at this fraction of the learning rate"] = 0.0
    schedule_every: Annotated[Count, "`step`: rounds between learning rate drops"] = 10
    schedule_gamma: Annotated[Share, "`step`: factor applied at each drop"] = 0.1

    def __post_init__(self) -> None:
        validate_fields(self, "training")
        if self.optimizer == "adamw" and (self.momentum or self.nesterov):
            raise OptionError("training.momentum and training.nesterov are for optimizer = 'sgd'; leave them out")
        for setting, keys in KEYS_OF.items():
            given = [key for key in keys if getattr(self, key) != getattr(Training, key)]
            if given and not isinstance(getattr(self, setting), str):
                raise OptionError(f"training.{given[0]} is part of the object in training.{setting}; set it there")
        _ = self.steps_by  # SGD refuses nesterov without momentum

    @cached_property
    def steps_by(self) -> Optimizer:
        """The optimizer as an object."""
        if not isinstance(self.optimizer, str):
            return self.optimizer
        named: SGD | AdamW = SGD(self.momentum, nesterov=self.nesterov) if self.optimizer == "sgd" else AdamW()
        return named if self.weight_decay is None else replace(named, weight_decay=self.weight_decay)

    @cached_property
    def rates(self) -> Schedule:
        """The schedule of the learning rate as an object."""
        if not isinstance(self.schedule, str):
            return self.schedule
        return Schedule(
            self.schedule, self.schedule_warmup, self.schedule_floor, self.schedule_every, self.schedule_gamma
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """The class weights in the order of the classes; empty for equal ones. `Run` refuses those by name."""
        return cast(tuple[float, ...], self.class_weights or ())

    def with_classes(self, classes: Sequence[str]) -> Training:
        """Return the same settings with `class_weights` in the order of the task's classes.

        Raises:
            OptionError: If `class_weights` names another class.
        """
        given = self.class_weights
        if not isinstance(given, Mapping):
            return self
        if unknown := [name for name in given if name not in classes]:
            remedy = closest_match(unknown[0], classes) if classes else "the task has no classes; leave it out"
            raise OptionError(f"training.class_weights names the class '{unknown[0]}'; {remedy}")
        ordered = tuple(float(given.get(name, 1.0)) for name in classes)
        return replace(self, class_weights=ordered if given else None)

    @property
    def examples_per_step(self) -> int:
        """The number of examples of one optimizer step, over all its batches."""
        return self.batch_size * self.accumulate

    @property
    def optimizer_name(self) -> str:
        """The name that rules list in `optimizers`.

        It differs if the learning rate does between steps or layers: rules derived for one learning rate are not valid
        then.
        """
        equal_rates = self.warmup_steps == 0 and self.layer_decay == 1
        return self.steps_by.name if equal_rates else f"{self.steps_by.name} with unequal learning rates"


@dataclass(frozen=True)
class FederationSettings:
    """The `[federation]` table: who takes part in a round, and which updates the server takes.

    Simulated dropouts, stragglers and attackers are made from a config. A `Run` made by hand does not simulate: give
    the engine an `Availability`, and the method its attackers with `add_attack`.

    Raises:
        OptionError: If a value is not one that the config takes.
    """

    cohort: Annotated[
        Count | PositiveShare, "clients per round: a number of clients, or a fraction with a decimal point"
    ] = 1.0
    client_dropout: Annotated[Share, "probability that a client drops out of a round"] = 0.0
    straggler_rate: Annotated[Share, "probability that a client completes only part of its local steps"] = 0.0
    availability_trace: Annotated[
        str | None, "CSV file with columns round, client, work; overrides the two rates where it has a row"
    ] = None
    attackers: Annotated[
        Whole | Share, "simulated attackers: a number of clients, or a fraction with a decimal point"
    ] = 0
    attack: Annotated[AttackKind, "what the simulated attackers do"] = "sign-flip"
    attack_strength: Annotated[Positive, "factor of the attack; `label-flip` ignores it"] = 5.0
    min_updates: Annotated[Whole, "minimum number of updates per round; the run stops if there are fewer"] = 1
    skip_failed_clients: Annotated[bool, "record a client's failure and continue, instead of stopping the run"] = False
    max_norm: Annotated[Positive | None, "updates with a larger norm are scaled down to this norm"] = None
    max_examples: Annotated[Count, "largest number of training examples that a client of unknown size may report"] = (
        10_000_000
    )
    clients_have_initial_model: Annotated[bool, "clients already hold the initial model before the first round"] = False

    def __post_init__(self) -> None:
        validate_fields(self, "federation")


@dataclass(frozen=True)
class Run:
    """All settings of a run.

    Attributes:
        method: The federated method. With `training.keep_optimizer`, it carries the clients' optimizer state.
        training: Local training.
        rounds: The number of rounds.
        key: The random key of the run.
        federation: Who takes part in a round, and which updates the server takes.
        drift: Whether to measure drift in each round.
        examples: The registered number of examples by client, 0 for an unknown number; None if there is no register.
        secret: The key for private draws of clients and of the server's noise, which must not be known to others; None
            to use `key`.
        hidden_cohorts: Whether to draw cohorts with `secret`. Privacy amplification by sampling requires that nobody
            knows who was drawn.
        sampling: How the cohort of a round is drawn.
        secure_aggregation: The settings with which the server learns only the sum of a round's updates; None to send
            updates in clear.
        client_noise: The noise that clients add before secure aggregation; None for none.

    Raises:
        RunError: If a setting is invalid or settings contradict each other.
    """

    method: Method
    training: Training
    rounds: int
    key: Key
    federation: FederationSettings = field(default_factory=FederationSettings)
    drift: bool = True
    examples: Mapping[str, int] | None = None
    secret: Key | None = None
    hidden_cohorts: bool = False
    sampling: Uniform = field(default_factory=Uniform)
    secure_aggregation: SecureAggregation | None = None
    client_noise: ClientNoise | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise RunError(f"rounds is {self.rounds}; it must be at least 1")
        if self.client_noise is not None and self.secure_aggregation is None:
            raise RunError(
                "noise at the clients is only enough in a sum, and secure aggregation is off; set the table "
                "[secure_aggregation]"
            )
        if isinstance(self.training.class_weights, Mapping):
            raise RunError(
                "training.class_weights is by name; order it with Training.with_classes(names of the classes)"
            )
        if self.training.keep_optimizer and not self.method.carry_optimizer:
            object.__setattr__(self, "method", replace(self.method, carry_optimizer=True))
        self.method.check_optimizer(self.training.optimizer_name)
        if self.training.clip is not None:
            self.method.check_clip(self.training.clip)
        if error := first_clash(RULES, self, self._read):
            raise RunError(error)

    def _read(self, key: str) -> object:
        """Return the value of a setting that is in a rule."""
        if key == "[secure_aggregation]":
            return self.secure_aggregation
        if key == UNIT:
            return "client" if self.hides_clients else self.method.privacy and self.method.privacy.unit
        table, _, name = key.partition(".")
        return getattr(getattr(self, table), name)

    @property
    def hides_clients(self) -> bool:
        """Whether the run has client-level privacy."""
        return any(transform.hides for transform in self.method.transforms)

    def lr(self, round: int) -> float:
        """Return the learning rate of a round."""
        return self.training.lr * self.training.rates.factor(round, self.rounds)

    def draw_cohort(self, round: int, clients: Sequence[str], losses: Mapping[str, float] | None = None) -> list[str]:
        """Draw the cohort of a round.

        Args:
            round: The round, from 0.
            clients: The available clients.
            losses: By client, the training loss that it reported last, for rules that use it.

        Raises:
            RunError: If the sampling rule does not return different, available clients, as many as asked for or fewer.
        """
        key = self.secret if self.secret and self.hidden_cohorts else self.key
        size, info = self.cohort_size(len(clients)), ClientInfo(self.examples or {}, losses or {})
        cohort = self.sampling.draw(key / "round" / round / "cohort", round, clients, size, info)
        if type(self.sampling) is Uniform:  # it is right, and a check would go through the whole population
            return cohort
        if not 0 < len(set(cohort)) == len(cohort) <= size or set(cohort).difference(clients):
            raise RunError(
                f"sampling '{self.sampling.name}' drew {cohort[:5]} in round {round}; it must draw from 1 to {size} "
                "different clients from those that are available"
            )
        return cohort

    def check_sampling(self, clients: Sequence[str]) -> None:
        """Check that the sampling rule can draw a cohort in every round.

        Args:
            clients: All clients.

        Raises:
            OptionError: If it cannot.
        """
        size = self.cohort_size(len(clients))
        self.sampling.check(self.rounds, clients, size, self.federation.min_updates, ClientInfo(self.examples or {}))

    def cohort_size(self, population: int) -> int:
        """Return the number of clients per round, for a population of this size.

        Raises:
            RunError: If the cohort is larger than the population.
        """
        cohort = self.federation.cohort
        size = max(1, round(cohort * population)) if isinstance(cohort, float) else cohort
        if size > population:
            raise RunError(
                f"federation.cohort is {cohort}, but there are {population} clients; "
                "give a number from 1 to that, or a fraction such as 0.2"
            )
        return size


ALIKE = "DP-SGD clips the gradient of each example, and all examples must count alike"
UNITS = ("example", "group")  # whose presence DP-SGD hides
# What does not go together in a run. Its method is the private one, if it is private.
RULES = (
    Rule(
        {"federation.max_norm": True, "[secure_aggregation]": True},
        "federation.max_norm bounds single updates, which secure aggregation hides",
        "leave one of them out, or set training.clip",
    ),
    Rule({"federation.max_norm": True, UNIT: "client"}, "privacy.clip already bounds every update"),
    Rule(
        {"sampling.name": ANY, "[secure_aggregation]": True},
        "this sampling reads the clients' training losses, which secure aggregation hides",
        "set sampling.name to 'uniform'",
        lambda run: run.sampling.uses_losses,
    ),
    Rule(
        {"sampling.name": ANY, UNIT: True},
        "this sampling reads the clients' training losses, which a private run withholds",
        "set sampling.name to 'uniform'",
        lambda run: run.sampling.uses_losses,
    ),
    Rule(
        {"sampling.name": ANY, UNIT: "client"},
        "this sampling does not draw all clients with the same probability, which the epsilon of client-level privacy "
        "assumes",
        "set sampling.name to 'uniform', or privacy.unit to 'example'",
        lambda run: type(run.sampling) is not Uniform,
    ),
    Rule(
        {"sampling.equal_weights": True, METHOD: ANY},
        "the server of this method weighs clients by their numbers of examples",
        "set method.weigh = 'clients', or sampling.equal_weights = false",
        lambda run: run.method.server_rule.needs_sizes,
    ),
    Rule({"training.clip": True, UNIT: UNITS}, "privacy.clip already clips each gradient"),
    Rule(
        {"training.accumulate": ANY, UNIT: UNITS},
        "DP-SGD is accounted by training.batch_size",
        "leave training.accumulate out and raise training.batch_size",
        lambda run: run.training.accumulate > 1,
    ),
    Rule(
        {"training.group_by_length": True, UNIT: UNITS},
        "DP-SGD is accounted for batches that are drawn without a look at the examples",
    ),
    Rule({"training.loss_average": "tokens", UNIT: UNITS}, ALIKE),
    Rule({"training.class_weights": True, UNIT: UNITS}, ALIKE),
    Rule(
        {"training.accumulate": ANY, METHOD: ANY},
        "this method evaluates gradients of whole steps (step_gradient)",
        when=lambda run: run.training.accumulate > 1 and run.method.step_rules,
    ),
)
