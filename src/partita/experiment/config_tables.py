"""A config and its tables with fixed keys, as dataclasses. Each key has its type, its help and its default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w

from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.options import (
    MAX_NUMBER,
    Count,
    NotNegative,
    OptionError,
    Positive,
    Range,
    Seed,
    Text,
    Whole,
    validate_fields,
)
from partita.core.own_code import Reference
from partita.core.rng import Key
from partita.core.sampling import Uniform
from partita.core.secure_settings import SecureAggregation
from partita.core.settings import FederationSettings, Run, Training
from partita.experiment.config_code import named_from, portable, references_in

Table = Mapping[str, Any]
CODE = "code"  # the table of a recorded config with the digests of the user's own code
OBJECTS = "objects"  # the field of a config that no file sets
Processes = Annotated[int, Range(low=1, high=1024)]


@dataclass(frozen=True)
class EngineConfig:
    """The `[engine]` table."""

    clients_per_block: Annotated[Count | Literal["auto"], "clients that train together in one vmapped block"] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], "`auto` uses a GPU if there is one"] = "auto"
    workers: Annotated[Processes, "worker processes that share the clients; assigned to GPUs round-robin"] = 1
    client_state: Annotated[Literal["memory", "disk"], "where client state is kept between rounds"] = "memory"
    threads: Annotated[Processes | None, "number of torch threads; torch's own default if left out"] = None
    onednn: Annotated[bool | Literal["auto"], "use oneDNN kernels on CPUs"] = "auto"
    deterministic: Annotated[
        bool | Literal["auto"],
        "on a GPU: bitwise reproducible results, at some cost in speed; `auto` says which operations have no kernel "
        "for that and goes on, `true` refuses them",
    ] = "auto"
    cuda_graphs: Annotated[
        bool | Literal["auto"], "on a GPU: capture training steps as CUDA graphs; `true` stops the run if that fails"
    ] = "auto"
    compile: Annotated[
        bool | Literal["auto"],
        "use torch.compile; `auto` does on a GPU, if the run is long enough to win back the minute that it takes",
    ] = "auto"
    cache_frozen: Annotated[bool, "compute the output of the lowest frozen layers once per example"] = False
    secret_file: Annotated[str | None, "file with 16 or more random bytes that add to the secret of a private run"] = (
        None
    )
    ledger: Annotated[
        str | None,
        "privacy ledger, which adds up what private runs release and stops a run that would exceed its limit",
    ] = None


@dataclass(frozen=True)
class EvaluateConfig:
    """The `[evaluate]` table."""

    every: Annotated[Whole, "rounds between evaluations on the central test set; 0 for never"] = 1
    personal_every: Annotated[Whole, "rounds between evaluations on the clients' own test sets; 0 for never"] = 5
    validation_every: Annotated[
        Count | None,
        "rounds between evaluations on the clients' validation parts; left out: as `every`, or 1 if that is 0, if "
        "[stop] needs them, else never",
    ] = None
    validation_metric: Annotated[
        str | None, "metric on validation that [stop] and the best checkpoint go by; left out: the task's own"
    ] = None
    unseen_epochs: Annotated[
        Whole,
        "epochs for which a client that takes no part (`split.unseen`) trains its personal parameters before its test; "
        "the shared ones do not change; 0: it is tested with their initial values",
    ] = 0
    max_clients: Annotated[Count, "maximum number of clients evaluated; they are drawn once per run"] = 100
    drift: Annotated[bool, "measure client drift in every round"] = True
    max_new_tokens: Annotated[
        Count | None, "maximum number of tokens of a generated text; tasks that generate only; left out: 64"
    ] = None
    generate_examples: Annotated[
        Count | None,
        "generate texts for at most this many examples of a test set, the first ones; tasks that generate only; left "
        "out: all with `seq2seq`, none with `chat`",
    ] = None
    samples: Annotated[
        Annotated[int, Range(low=0, high=100)],
        "record this many examples of the central test set, in full, with what the model says before and after "
        "training, and show them in reports; not in a private run",
    ] = 0
    subgroups: Annotated[
        str | None, "column of the central test set; the task's own metric is recorded for each of its values"
    ] = None
    subgroup_min: Annotated[
        Count | None,
        "a subgroup of fewer examples (left out: 30) is marked in reports, and does not count for the gap",
    ] = None
    metrics: Annotated[
        tuple[str, ...], "your own metrics, such as `mine.py:recall`: functions of all logits and targets"
    ] = ()


@dataclass(frozen=True)
class CheckpointConfig:
    """The `[checkpoint]` table."""

    every: Annotated[Count, "rounds between checkpoints"] = 1


@dataclass(frozen=True)
class TrackConfig:
    """The `[track]` table."""

    to: Annotated[
        tuple[str, ...],
        "trackers that receive every row: `tensorboard`, `wandb`, `mlflow`, `trackio`, or your own functions, such as "
        "`mine.py:log`",
    ] = ()
    project: Annotated[str, "project of the built-in trackers"] = "partita"
    name: Annotated[Text, "name of the run in the built-in trackers; by default, its label and seed"] = ""
    group: Annotated[Text, "group of the run in the built-in trackers; by default, the folder of the comparison"] = ""


@dataclass(frozen=True)
class StopConfig:
    """The `[stop]` table: when a run ends before its last round.

    Raises:
        OptionError: If no condition is set, or `min_delta` has no effect.
    """

    patience: Annotated[Count | None, "stop after this many evaluations on validation without an improvement"] = None
    min_delta: Annotated[NotNegative, "smallest change of the metric that `patience` counts as an improvement"] = 0.0
    target: Annotated[
        Annotated[float, Range(low=-MAX_NUMBER, high=MAX_NUMBER)] | None,
        "stop when the metric on validation reaches this value",
    ] = None
    epsilon: Annotated[
        Positive | None, "stop before a round with which the spent epsilon would exceed this; only with [privacy]"
    ] = None

    def __post_init__(self) -> None:
        if self.patience is None and self.target is None and self.epsilon is None:
            raise OptionError("[stop] has no condition; set stop.patience, stop.target or stop.epsilon")
        if self.min_delta and self.patience is None:
            raise OptionError(f"stop.min_delta is {self.min_delta:g}, which has no effect without stop.patience")

    @property
    def reads_scores(self) -> bool:
        """Whether a condition reads scores on the clients' validation parts."""
        return self.patience is not None or self.target is not None


@dataclass(frozen=True)
class Config:
    """A complete experiment.

    Tables with fixed keys are dataclasses. The tables `method`, `data`, `split`, `model` and `sampling` name a function
    and hold its options.

    Raises:
        OptionError: If `training` holds an object, which TOML cannot.
    """

    method: Table
    data: Table = field(default_factory=lambda: {"name": "digits"})
    split: Table = field(default_factory=lambda: {"name": "dirichlet", "clients": 10, "alpha": 0.1})
    model: Table = field(default_factory=lambda: {"name": "vit"})
    sampling: Table = field(default_factory=lambda: {"name": "uniform"})
    seed: Annotated[Seed, "random seed for all draws"] = 0
    rounds: Annotated[int, Range(low=1, high=10**6), "number of rounds"] = 20
    label: Annotated[
        Text, "name of the run in tables; by default, the method with the options that are not defaults"
    ] = ""
    training: Training = field(default_factory=Training)
    federation: FederationSettings = field(default_factory=FederationSettings)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    privacy: PrivacySettings | None = None
    secure_aggregation: SecureAggregation | None = None
    stop: StopConfig | None = None
    code: Mapping[str, str] = field(default_factory=dict)  # digest of each file or module of the user's own code
    # `[data]` and `[model]` as they are written, if they name objects of the user's own code
    objects: Mapping[str, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate_fields(self.training, "training", in_code=False)  # TOML holds no objects

    @property
    def validation_every(self) -> int:
        """Rounds between evaluations on the clients' validation parts; 0 for never."""
        needed = self.stop is not None and self.stop.reads_scores
        return self.evaluate.validation_every or ((self.evaluate.every or 1) if needed else 0)

    def written(self) -> dict[str, Any]:
        """Return the config as nested dicts, without values that are None. Objects are named, as in the file."""
        raw: dict[str, Any] = drop_none(asdict(self))
        objects = raw.pop(OBJECTS)
        return raw | objects

    def to_toml(self, folder: Path | None = None) -> str:
        """Return the config as TOML, without values that are None.

        Args:
            folder: A folder, from which own code is named, without digests, so that a user can go on editing. Default:
                own code is named by the copies in the folder `code` next to the config; `references` of this config
                finds the files.
        """
        raw = portable(self.written()) if folder is None else named_from(self.written(), folder)
        return tomli_w.dumps({key: value for key, value in raw.items() if key != CODE or (value and folder is None)})

    def references(self) -> list[Reference]:
        """Return the user's own functions and objects that the config names."""
        return references_in(self.written())

    def run(
        self,
        method: Method,
        key: Key,
        sampling: Uniform,
        classes: Sequence[str] = (),
        examples: Mapping[str, int] | None = None,
        secret: Key | None = None,
    ) -> Run:
        """Create the run, without its privacy.

        Args:
            method: The method.
            key: The key of the run.
            sampling: How cohorts are drawn.
            classes: The names of the task's classes.
            examples: The number of training examples by client.
            secret: The key for private draws.

        Raises:
            RunError: If settings do not go together.
        """
        return Run(
            method,
            self.training.with_classes(classes),
            self.rounds,
            key,
            replace(self.federation, cohort=1.0) if method.pool else self.federation,
            examples=examples,
            drift=self.evaluate.drift,
            secret=secret,
            sampling=sampling,
            secure_aggregation=self.secure_aggregation,
        )


def drop_none(value: Any) -> Any:
    """Remove None values: TOML has no null."""
    if isinstance(value, Mapping):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    return [drop_none(item) for item in value] if isinstance(value, tuple | list) else value
