"""The settings of a run, which server and clients share before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from partita.core.client_noise import ClientNoise
from partita.core.method import Method
from partita.core.optim import SGD, Optimizer, Schedule
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.rules import ANY, METHOD, UNIT, Rule, first_clash
from partita.core.sampling import ClientInfo, Uniform
from partita.core.secure_settings import SecureAggregation

Augmentation = Literal[
    "flip", "crop", "rotate", "shear", "cutout", "contrast", "brightness", "sharpness", "randaugment"
]
AUGMENT: tuple[str, ...] = get_args(Augmentation)  # what `Training.augment` can hold


class RunError(ValueError):
    """A setting is invalid, or settings contradict each other."""


@dataclass(frozen=True)
class Training:
    """Local training: how a client trains in one round.

    Attributes:
        lr: The learning rate, before the schedule.
        optimizer: The local optimizer.
        schedule: The learning-rate schedule over rounds.
        batch_size: Examples per batch.
        epochs: Passes over the client's examples per round.
        steps: Steps per round; overrides `epochs`.
        clip: The maximum norm of a client's gradient, and of that of its personal copy; None for no clipping.
        precision: "float32", or "bfloat16" for mixed precision with the weights in float32.
        accumulate: Batches per optimizer step. Their gradients are averaged over all examples of the step.
        warmup_steps: Steps of linear learning-rate warm-up at the start of each phase of a client's round. Step t, from
            0, has the factor (t + 1) / (warmup_steps + 1).
        layer_decay: The factor between the learning rates of adjacent layers. The head has the full rate, the last
            layer `layer_decay` times that, and the embeddings the lowest.
        decay_norms_and_biases: Whether weight decay applies to norms and biases too.
        loss_average: What the loss of a batch averages over: its "examples", each with the mean over its tokens, or all
            its labeled "tokens", so that long texts count more.
        label_smoothing: The share of a target that is spread over all classes, as in torch's `cross_entropy`.
        class_weights: The weight of each class in the loss, by index; empty for equal weights. As in torch, the loss of
            a batch is divided by the sum of the weights of its targets.
        augment: The augmentations of training images, in order.
        adapt_lr: The learning rate with which clients train before a personalized evaluation: `Method.adapt`, and what
            `Job.personal_epochs` asks for. It has no schedule. None: `lr`.
        group_by_length: Whether the batches of an epoch hold texts of similar lengths, which need less padding.
        dropout: Whether the model's dropout is active in training. Its rates are those of the model.

    Raises:
        RunError: If a number is out of its range, or if the precision is unknown.
    """

    lr: float
    optimizer: Optimizer = field(default_factory=SGD)
    schedule: Schedule = field(default_factory=Schedule)
    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None
    clip: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    accumulate: int = 1
    warmup_steps: int = 0
    layer_decay: float = 1.0
    decay_norms_and_biases: bool = True
    dropout: bool = True
    loss_average: Literal["examples", "tokens"] = "examples"
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    augment: tuple[str, ...] = ()
    adapt_lr: float | None = None
    group_by_length: bool = False

    def __post_init__(self) -> None:
        for setting in ("lr", "batch_size", "epochs", "accumulate"):
            if not (value := getattr(self, setting)) > 0:
                raise RunError(f"training.{setting} is {value}; it must be above 0")
        if self.warmup_steps < 0:
            raise RunError(f"training.warmup_steps is {self.warmup_steps}; it must be 0 or more")
        if not 0 < self.layer_decay <= 1:
            raise RunError(f"training.layer_decay is {self.layer_decay}; it must be above 0 and at most 1")
        for setting, limit in (("steps", self.steps), ("clip", self.clip), ("adapt_lr", self.adapt_lr)):
            if limit is not None and not limit > 0:
                raise RunError(f"training.{setting} is {limit}; it must be above 0, or left out")
        for name in self.augment:
            if name not in AUGMENT:
                raise RunError(f"training.augment has '{name}'; {closest_match(name, AUGMENT)}")
        if not 0 <= self.label_smoothing < 1:
            raise RunError(f"training.label_smoothing is {self.label_smoothing}; it must be from 0 to below 1")
        if not all(0 < weight < math.inf for weight in self.class_weights):
            raise RunError(f"training.class_weights has {min(self.class_weights)}; weights must be above 0")
        if self.loss_average not in ("examples", "tokens"):
            raise RunError(f"training.loss_average is '{self.loss_average}'; it can be examples or tokens")
        if self.precision not in ("float32", "bfloat16"):
            raise RunError(f"training.precision is '{self.precision}'; it can be float32 or bfloat16 (mixed)")

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
        return self.optimizer.name if equal_rates else f"{self.optimizer.name} with unequal learning rates"


@dataclass(frozen=True)
class Run:
    """All settings of a run.

    Attributes:
        method: The federated method.
        training: Local training.
        rounds: The number of rounds.
        key: The random key of the run.
        cohort: Clients per round: an int is a number of clients; a float up to 1.0 is a fraction of the population.
        min_updates: The minimum number of updates per round. Fewer are an error, or with `skip_failed_clients` a
            skipped round if rejected updates are the reason.
        skip_failed_clients: Whether a client's failure (a non-finite loss or an unusable update) is recorded instead of
            ending the run.
        clients_have_initial_model: Whether clients hold the initial model before the first round.
        drift: Whether to measure drift in each round.
        max_norm: The maximum norm of an update; longer updates are scaled down to it. None for no limit.
        max_examples: The maximum number of examples that a client may claim if its number is not registered.
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
    cohort: int | float = 1.0
    min_updates: int = 1
    skip_failed_clients: bool = False
    clients_have_initial_model: bool = False
    drift: bool = True
    max_norm: float | None = None
    max_examples: int = 10_000_000
    examples: Mapping[str, int] | None = None
    secret: Key | None = None
    hidden_cohorts: bool = False
    sampling: Uniform = field(default_factory=Uniform)
    secure_aggregation: SecureAggregation | None = None
    client_noise: ClientNoise | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise RunError(f"rounds is {self.rounds}; it must be at least 1")
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise RunError(f"federation.max_norm is {self.max_norm}; it must be a number above 0, or left out")
        if self.max_examples < 1:
            raise RunError(f"federation.max_examples is {self.max_examples}; it must be at least 1")
        if self.client_noise is not None and self.secure_aggregation is None:
            raise RunError(
                "noise at the clients is only enough in a sum, and secure aggregation is off; set the table "
                "[secure_aggregation]"
            )
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
            by_example = self.method.privacy and ("group" if self.method.privacy.groups else "example")
            return "client" if self.hides_clients else by_example
        table, _, name = key.partition(".")
        tables = {"training": self.training, "sampling": self.sampling, "method": self.method, "federation": self}
        return getattr(tables[table], name)

    @property
    def hides_clients(self) -> bool:
        """Whether the run has client-level privacy."""
        return any(transform.hides for transform in self.method.transforms)

    def lr(self, round: int) -> float:
        """Return the learning rate of a round."""
        return self.training.lr * self.training.schedule.factor(round, self.rounds)

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
        self.sampling.check(self.rounds, clients, size, self.min_updates, ClientInfo(self.examples or {}))

    def cohort_size(self, population: int) -> int:
        """Return the number of clients per round, for a population of this size.

        Raises:
            RunError: If the cohort is larger than the population.
        """
        is_fraction = isinstance(self.cohort, float)
        size = max(1, round(self.cohort * population)) if is_fraction else int(self.cohort)
        if not 1 <= size <= population or (is_fraction and not 0 < self.cohort <= 1):
            raise RunError(
                f"federation.cohort is {self.cohort}, but there are {population} clients; "
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
