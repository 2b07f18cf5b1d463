"""A plan before it is run: what trains, travels and stays for one client in one round, to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

from partita.core import serialization
from partita.core.model import Model, layer_tag, role_tag
from partita.core.options import OptionError, closest_match
from partita.core.plan import Plan
from partita.core.rounds import make_job
from partita.core.settings import Run
from partita.core.tensors import select
from partita.engines.availability import Availability
from partita.engines.dry_run import dry_run, null_update
from partita.experiment.builder import Experiment, build
from partita.experiment.config import Config, parse
from partita.methods import NEEDS_DUAL_ENCODER

# How a method that looks at clients' data is foretold without any.
DATA_DEPENDENT = {"safl": {"select": "random"}}


@dataclass(frozen=True)
class Group:
    """Some parameters of the model. Counts are of parameters; up and down are bytes on the wire."""

    name: str
    tensors: int
    parameters: int
    trains: int
    up: int
    down: int
    keeps: int


@dataclass(frozen=True)
class Preview:
    method: str
    model: str
    round: int
    client: str
    asked: bool  # whether the client is in the round's cohort
    groups: tuple[Group, ...]
    envelope: tuple[int, int]  # headers of the messages up and down
    bytes_up: int
    bytes_down: int

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def to_text(self) -> str:
        title = f"{self.method} · {self.model} · round {self.round} · client {self.client}"
        table = Table(title=title, box=None, header_style="bold", title_style="bold", title_justify="left")
        table.add_column("")
        for heading in ("tensors", "parameters", "trains", "up, bytes", "down, bytes", "keeps"):
            table.add_column(heading, justify="right")
        for each in self.groups:
            table.add_row(
                each.name, *map(_count, (each.tensors, each.parameters, each.trains, each.up, each.down, each.keeps))
            )
        table.add_row("headers", "", "", "", *map(_count, self.envelope), "", style="dim")
        sums = [sum(getattr(each, of) for each in self.groups) for of in ("tensors", "parameters", "trains", "keeps")]
        table.add_row("all", *map(_count, (*sums[:3], self.bytes_up, self.bytes_down, sums[3])), style="bold")
        text = StringIO()
        Console(file=text, width=110).print(table)
        note = (
            "" if self.asked else f"{self.client} is not in this round's cohort; this is what it would do if it were.\n"
        )
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n" + note


def preview(config: Config, round: int, client: str | None, by: str = "role") -> Preview:
    return _preview(build(config), round, client, by)


def _preview(experiment: Experiment, round: int, client: str | None = None, by: str = "role") -> Preview:
    return preview_of(
        experiment.run, experiment.model, experiment.federation.clients, round, client, by, experiment.availability
    )


def plan_section(name: str) -> str:
    """What a method's card says of its plan: the table of the first round and, if it differs, of the last."""
    # Plain SGD, which every method takes; a plan does not depend on it.
    method = {"name": name, **DATA_DEPENDENT.get(name, {})}
    model, kind = {"name": "vit"}, "a ViT of two layers of width 64"
    if name in NEEDS_DUAL_ENCODER:
        model, kind = {"name": "clip", "shape": "tiny"}, "a random CLIP whose towers are 32 and 16 wide"
    config = parse({"method": method, "model": model, "training": {"optimizer": "sgd"}, "rounds": 10})
    experiment = build(config)
    first, last = (_preview(experiment, round) for round in (0, 9))
    same = (first.bytes_up, first.bytes_down) == (last.bytes_up, last.bytes_down)
    tables = "\n".join(each.to_text() for each in ([first] if same else [first, last]))
    setting = f"Ten rounds, {kind} on 8 x 8 images, ten clients of which all take part:"
    blind = "\n\nHere layers are drawn by lot, since there are no data to look at." if name in DATA_DEPENDENT else ""
    return f"{setting}\n\n```text\n{tables}```{blind}"


def preview_of(
    run: Run,
    model: Model,
    clients: Sequence[str],
    round: int = 0,
    client: str | None = None,
    by: str = "role",
    availability: Availability | None = None,
) -> Preview:
    if not 0 <= round < run.rounds:
        raise OptionError(f"--round is {round}; this run has rounds 0 to {run.rounds - 1}")
    if by not in ("role", "layer", "name"):
        raise OptionError(f"--by is '{by}'; it can be role, layer or name")
    cohort = run.draw_cohort(round, clients)
    client = client or cohort[0]
    if client not in clients:
        raise OptionError(f"there is no client '{client}'; {closest_match(client, clients[:50])}")
    server = dry_run(run, model, clients, round, availability)
    job, plan = make_job(run, model, server, round, client)
    update = null_update(run, model, job)
    down = serialization.byte_counts({"params": select(job.params, job.stale), **job.slots})
    up = serialization.byte_counts({"delta": update.delta, **update.slots})
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
    )


def _groups(model: Model, plan: Plan, up: Mapping[str, int], down: Mapping[str, int], by: str) -> Iterator[Group]:
    found: dict[str, list[str]] = {}
    for name in model.initial:
        titles = {"name": name, "layer": layer_tag(model.tags[name]) or "–", "role": role_tag(model.tags[name]) or "–"}
        found.setdefault(titles[by], []).append(name)

    def numbers(names: Iterable[str]) -> int:
        return sum(model.initial[name].numel() for name in names)

    for title, names in found.items():
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
