"""Preview of a plan: what one client trains, sends, receives and keeps in one round, with exact byte counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO

from rich.console import Console
from rich.table import Table

from partita.core import serialization
from partita.core.model import Model, layer_tag, role_tag
from partita.core.options import OptionError, closest_match
from partita.core.plan import Plan
from partita.core.rounds import make_job
from partita.core.sampling import Uniform
from partita.core.settings import Run
from partita.core.tensors import select
from partita.engines.availability import Availability
from partita.engines.dry_run import dry_run, null_update
from partita.engines.secure_setup import protection, round_setup, shape_bytes
from partita.experiment.builder import build, build_method
from partita.experiment.config import Config, parse
from partita.experiment.experiment import Experiment
from partita.methods import NEEDS_DUAL_ENCODER, NEEDS_FACTORS
from partita.secure_aggregation.costs import client_costs
from partita.secure_aggregation.fixed_point import NUMBERS
from partita.secure_aggregation.neighbors import threshold_of
from partita.secure_aggregation.round_setup import RoundSetup

# Options with which a method that chooses from the clients' data is previewed without computing on the data.
DATA_DEPENDENT = {"safl": {"select": "random", "noise": 0.0}}
DRAWN = "This table draws the layers at random"


@dataclass(frozen=True)
class Group:
    """A group of the model's parameters."""

    name: str
    tensors: int  # number of tensors
    parameters: int  # number of elements of all tensors
    trains: int  # parameters that train
    up: int  # bytes on the wire
    down: int  # bytes on the wire
    keeps: int  # parameters that the client keeps


@dataclass(frozen=True)
class Preview:
    """What one client does in one round."""

    method: str  # name of the method
    model: str  # name of the model
    round: int
    client: str
    asked: bool  # whether the client is in the round's cohort
    groups: tuple[Group, ...]
    envelope: tuple[int, int]  # header bytes of the messages up and down
    bytes_up: int  # size of the client's update
    bytes_down: int  # size of the client's job
    drawn: bool = False  # whether layers were drawn at random, because the method chooses them from the client's data
    sampled: bool = False  # whether cohorts were drawn uniformly, because the run draws them by the clients' losses
    secure: str = ""  # what secure aggregation changes; empty without it

    def to_json(self) -> dict[str, object]:
        """Return the fields as a dict for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """Format the preview as a table."""
        title = f"{self.method} · {self.model} · round {self.round} · client {self.client}"
        table = Table(title=title, box=None, header_style="bold", title_style="bold", title_justify="left")
        table.add_column("")
        for heading in ("tensors", "parameters", "trains", "up, bytes", "down, bytes", "keeps"):
            table.add_column(heading, justify="right")
        for group in self.groups:
            counts = group.tensors, group.parameters, group.trains, group.up, group.down, group.keeps
            table.add_row(group.name, *map(_count, counts))
        table.add_row("headers", "", "", "", *map(_count, self.envelope), "", style="dim")
        sums = [sum(getattr(group, of) for group in self.groups) for of in ("tensors", "parameters", "trains", "keeps")]
        table.add_row("all", *map(_count, (*sums[:3], self.bytes_up, self.bytes_down, sums[3])), style="bold")
        text = StringIO()
        Console(file=text, width=110).print(table)
        note = "" if self.asked else f"{self.client} is not in this round's cohort; the table shows what it would do.\n"
        note += f"{DRAWN}; in a run, the client chooses as many from its data.\n" if self.drawn else ""
        note += f"{self.secure}\n" if self.secure else ""
        note += "This table draws cohorts uniformly; in a run, they depend on the losses.\n" if self.sampled else ""
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n" + note


def preview(config: Config, round: int, client: str | None, by: str = "role") -> Preview:
    """Build the experiment and preview one round.

    Args:
        config: The experiment.
        round: Round number, starting at 0.
        client: Client name. None: the first client of the round's cohort.
        by: Group parameters by "role", "layer" or "name".

    Raises:
        OptionError: If there is no such round, client or grouping.
    """
    replaced = {
        option: value
        for part in config.method["name"].split("+")
        for option, value in DATA_DEPENDENT.get(part, {}).items()
        if config.method.get("select") in ("attention", "gradient")
    }
    shown = _preview(build(replace(config, method={**config.method, **replaced})), round, client, by)
    return replace(shown, drawn=bool(replaced))


def _preview(experiment: Experiment, round: int, client: str | None = None, by: str = "role") -> Preview:
    return preview_of(
        experiment.run, experiment.model, experiment.federation.clients, round, client, by, experiment.availability
    )


def example_config(name: str, options: Mapping[str, object], **tables: object) -> tuple[str, Config]:
    """Return a small config that runs a method, and the model of it in words.

    Args:
        name: A method of the index.
        options: Options of the method.
        **tables: More tables of the config, such as `privacy`.
    """
    method = {"name": name, **options}
    model: dict[str, object] = {"name": "vit"}
    kind = "a ViT (2 layers, width 64)"
    if name in NEEDS_FACTORS:
        model, kind = {"name": "vit", "adapter": {"kind": "lora"}}, f"{kind} with a LoRA adapter of rank 8"
    if name in NEEDS_DUAL_ENCODER:
        model, kind = {"name": "clip", "shape": "tiny"}, "a randomly initialized CLIP (image width 32, text width 16)"
    # The plan does not depend on the optimizer.
    optimizer = "sgd" if build_method(method).supports_optimizer("sgd") else "adamw"
    return kind, parse({"method": method, "model": model, "training": {"optimizer": optimizer}, "rounds": 10, **tables})


def plan_section(name: str) -> str:
    """Return the plan section of a method's card: the table of the first round and, if it differs, of the last."""
    kind, config = example_config(name, DATA_DEPENDENT.get(name, {}))
    experiment = build(config)
    first, last = (_preview(experiment, round) for round in (0, 9))
    same = (first.bytes_up, first.bytes_down) == (last.bytes_up, last.bytes_down)
    tables = "\n".join(shown.to_text() for shown in ([first] if same else [first, last]))
    setting = f"Ten rounds of {kind} on 8 x 8 images, with ten clients in every round:"
    note = f"\n\n{DRAWN}, because it is computed without data." if name in DATA_DEPENDENT else ""
    return f"{setting}\n\n```text\n{tables}```{note}"


def preview_of(
    run: Run,
    model: Model,
    clients: Sequence[str],
    round: int = 0,
    client: str | None = None,
    by: str = "role",
    availability: Availability | None = None,
) -> Preview:
    """Preview one client's round by a dry run of all rounds before it.

    Args:
        run: The run.
        model: The model.
        clients: All clients.
        round: Round number, starting at 0.
        client: Client name. Default: the first client of the round's cohort.
        by: Group parameters by "role", "layer" or "name".
        availability: Simulated dropouts, which change what a client is sent later.

    Raises:
        OptionError: If there is no such round, client or grouping.
    """
    if not 0 <= round < run.rounds:
        raise OptionError(f"--round is {round}; this run has rounds 0 to {run.rounds - 1}")
    if by not in ("role", "layer", "name"):
        raise OptionError(f"--by is '{by}'; it must be role, layer or name")
    by_losses = run.sampling.uses_losses
    run = replace(run, sampling=Uniform()) if by_losses else run
    cohort = run.draw_cohort(round, clients)
    client = client or cohort[0]
    if client not in clients:
        raise OptionError(f"there is no client '{client}'; {closest_match(client, clients[:50])}")
    server = dry_run(run, model, clients, round, availability)
    job, plan = make_job(run, model, server, round, client)
    update = null_update(run, model, job)
    down = serialization.byte_counts({"params": select(job.params, job.stale), **job.slots})
    up: Mapping[str, int] = serialization.byte_counts({"delta": update.delta, **update.slots})
    secure = ""
    if run.secure_aggregation:
        setup = round_setup(run, model, job, len(cohort), b"")
        costs = client_costs(setup, cohort, client)
        settings = run.secure_aggregation
        secure = (
            f"Secure aggregation: the update is one vector of {settings.bits}-bit numbers, masked; in clear it would "
            f"have {sum(up.values()):,} bytes. Keys and shares are among the headers.\nThe server sees sums of at "
            f"least {threshold_of(settings, len(cohort))} updates, {protection(run, len(cohort))}."
        )
        up, down = (
            _masked(setup, costs.up),
            {**down, serialization.HEADER: down.get(serialization.HEADER, 0) + costs.down},
        )
    return Preview(
        method=run.method.name,
        model=model.name,
        round=round,
        client=client,
        asked=client in cohort,
        groups=tuple(_groups(model, plan.narrow(frozenset(update.steps)), up, down, by)),
        envelope=(up.get(serialization.HEADER, 0), down.get(serialization.HEADER, 0)),
        bytes_up=sum(up.values()),
        bytes_down=sum(down.values()),
        sampled=by_losses,
        secure=secure,
    )


def _masked(setup: RoundSetup, others: int) -> dict[str, int]:
    """Return the bytes of a masked vector by name. Its own two numbers and all other messages are headers."""
    up = {serialization.HEADER: others + NUMBERS * setup.dtype.itemsize}
    for _, name, shape in setup.layout.entries:
        up[name] = up.get(name, 0) + shape_bytes(shape, setup)
    return up


def _groups(model: Model, plan: Plan, up: Mapping[str, int], down: Mapping[str, int], by: str) -> Iterator[Group]:
    groups: dict[str, list[str]] = {}
    for name in model.initial:
        titles = {"name": name, "layer": layer_tag(model.tags[name]) or "–", "role": role_tag(model.tags[name]) or "–"}
        groups.setdefault(titles[by], []).append(name)

    def numbers(names: Iterable[str]) -> int:
        return sum(model.initial[name].numel() for name in names)

    for title, names in groups.items():
        yield Group(
            name=title,
            tensors=len(names),
            parameters=numbers(names),
            trains=numbers(plan.train.intersection(names)),
            up=sum(up.get(name, 0) for name in names),
            down=sum(down.get(name, 0) for name in names),
            keeps=numbers(plan.keep.intersection(names)),
        )


def _count(number: int) -> str:
    return f"{number:,}" if number else "–"
