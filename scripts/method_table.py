"""The table of all methods: what each trains and sends, whether it is personal and private, and what it needs.

Everything follows from the registry and from the small run of the methods' cards. Privacy is what a run accepts: each
method is built with a table `[privacy]`, and a refusal means no.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from partita.core.rounds import make_job
from partita.data.task import Federation
from partita.engines.dry_run import dry_run
from partita.experiment.builder import Experiment, build
from partita.experiment.preview import DATA_DEPENDENT, Preview, example_config, preview_of
from partita.experiment.round_log import has_own_models
from partita.methods import INDEX, NEEDS_DUAL_ENCODER, NEEDS_FACTORS
from partita.methods.cards import listing, path_of

NOISY = {"safl": {"noise": 8.0, "probe": 0.5}}  # a choice that is made on the data needs noise of its own
LAST = 9  # the last round of the cards' example, when warm-ups are over
INTRODUCTION = """# Methods

Every method has a card with its formula, parameters, deviations from the paper and evidence.
[Below](#columns) is what the columns mean. Methods compose, such as `fedfrozen+scaffold`; `partita methods NAME` lists
the compositions that the tests cover.

<!-- Written by scripts/write_reference.py from the registry; do not edit it by hand. -->

<div class="filtered" data-columns="trains, sends, personal, private, secure, task" markdown>

| method | in one sentence | trains | sends | bytes | personal | private | secure | task |
|---|---|---|---|--:|---|---|---|---|
"""
COLUMNS = """
</div>

## Columns

The rows are about the example on the cards (a small ViT, or a tiny CLIP) in its last round.

| column | meaning |
|---|---|
| trains | what a client trains |
| sends | how much of that goes to the server |
| bytes | of one client's update, without headers |
| personal | whether clients end with models of their own |
| private | the units of [privacy](../guide/privacy.md) that a run accepts: examples, clients, both or none |
| secure | whether [secure aggregation](../guide/secure-aggregation.md) is possible |
| task | any, or what the model must have |
"""


def page() -> str:
    """Return the page with the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a real run should know about its privacy
        rows = "".join(f"| {' | '.join(row(each['name'], each['about']))} |\n" for each in _own())
    return INTRODUCTION + rows + COLUMNS


def _own() -> list[dict[str, Any]]:
    return [each for each in listing() if each["name"] in INDEX]


def row(name: str, about: str) -> tuple[str, ...]:
    """Return the cells of a method."""
    experiment = build(example_config(name, DATA_DEPENDENT.get(name, {}))[1])
    shown = preview_of(experiment.run, experiment.model, experiment.federation.clients, LAST)
    return (
        f"[{name}](../../src/partita/{path_of(name)})",
        about.partition(": ")[2][:1].upper() + about.partition(": ")[2][1:],
        trains(name, shown),
        sends(shown),
        f"{sum(group.up for group in shown.groups):,}",
        "yes" if personal(experiment) else "no",
        private(name, experiment.federation),
        "yes" if accepts(name, experiment.federation, secure_aggregation={}) else "no",
        "images and class names (CLIP)" if name in NEEDS_DUAL_ENCODER else needs(name),
    )


def trains(name: str, shown: Preview) -> str:
    """Return what a client trains, in words."""
    trained = {group.name: group.trains for group in shown.groups if group.trains}
    if not trained:
        return "nothing"
    if name in NEEDS_DUAL_ENCODER:
        return "prompts or adapters"
    if "lora" in trained:
        return "low-rank factors"
    return "everything" if all(group.trains == group.parameters for group in shown.groups) else "a part"


def sends(shown: Preview) -> str:
    """Return how much of what trains is sent, in words."""
    up, trained = sum(group.up for group in shown.groups), 4 * sum(group.trains for group in shown.groups)
    if not up:
        return "nothing"
    return "what it trains" if up == trained else "less" if up < trained else "more"


def personal(experiment: Experiment) -> bool:
    """Return whether clients end with models of their own."""
    run, model, clients = experiment.run, experiment.model, experiment.federation.clients
    server = dry_run(run, model, clients, LAST)
    return has_own_models(run, *make_job(run, model, server, LAST, clients[0]), server)


def private(name: str, federation: Federation) -> str:
    """Return the units of privacy that a run of the method accepts."""
    units = {"example": "examples", "client": "clients"}
    found = [
        word
        for unit, word in units.items()
        if accepts(name, federation, NOISY.get(name), privacy={"noise": 1.0, "unit": unit, "repeatable": True})
    ]
    return " and ".join(found) or "no"


def accepts(name: str, federation: Federation, options: Mapping[str, object] | None = None, **tables: object) -> bool:
    """Return whether a run of the method with these tables is accepted."""
    try:
        build(example_config(name, options or {}, **tables)[1], federation=federation)
    except ValueError:
        return False
    return True


def needs(name: str) -> str:
    """Return what a method asks of the model."""
    return "any, with low-rank factors" if name in NEEDS_FACTORS else "any"
