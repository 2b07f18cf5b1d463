"""`partita tune`: choose the settings of several methods under one budget, then compare them."""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from partita.cli.compare import compare
from partita.cli.options import ConfigFile, Rounds, check_metric, with_rounds
from partita.cli.progress import Display, Verbosity, shorten
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from partita.experiment.tuning import Study, Trial

COMPARISON = "compare"  # folder of the comparison in the tuning folder


def tune(
    config: ConfigFile,
    methods: Annotated[str, typer.Option(help="Comma-separated methods, e.g. 'fedavg,fedprox(mu=0.1)'.")],
    space: Annotated[
        list[str],
        typer.Option(
            help="Values of a key: 'training.lr=log(1e-5,1e-2)', uniform(a,b), int(a,b[,log]) or choice(a,b,...). "
            "'fedprox: method.mu=log(1e-3,1)' is for one method. Repeatable."
        ),
    ],
    budget: Annotated[int, typer.Option(help="Trials of each method; the first one is the config as it is.")] = 20,
    seeds: Annotated[int, typer.Option(help="Seeds of each trial, whose scores are averaged.")] = 1,
    search: Annotated[Literal["tpe", "random", "grid"], typer.Option(help="How settings are chosen.")] = "tpe",
    metric: Annotated[
        str | None, typer.Option(help="Metric on validation to choose by. Default: the task's own.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="Stop a trial that is worse than the median of the others.")
    ] = True,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Override a config key, e.g. --set rounds=10. Repeatable.")
    ] = None,
    rounds: Rounds = None,
    out: Annotated[Path, typer.Option(help="Tuning folder. An unfinished tuning in it is continued.")] = Path(
        "runs/tune"
    ),
    jobs: Annotated[int | None, typer.Option(help="Methods in parallel. Default: one per CPU.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    disclose_validation: Annotated[
        bool,
        typer.Option(
            "--disclose-validation",
            help="With [privacy]: accept that exact scores on validation examples leave the clients.",
        ),
    ] = False,
    then_compare: Annotated[
        int | None, typer.Option(help="Then compare the chosen settings, with this many seeds of their own.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Write the HTML report. Needs --then-compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and the tables.")] = False,
) -> None:
    """Tune several methods under the same budget, on the clients' validation parts, and compare what was chosen.

    No test set is touched. A tuning that was stopped continues if the same command is given again.
    """
    from partita.core.options import OptionError

    if find_spec("optuna") is None:
        raise OptionError("partita tune needs the package 'optuna'; install it with: pip install 'partita[tune]'")
    if report and then_compare is None:
        raise OptionError("--report shows a comparison with its trials; add --then-compare SEEDS, or leave it out")
    from partita.experiment.tuning import Options, chosen_methods, plan_tuning, tune_all
    from partita.report import trials

    overrides = with_rounds(changes, rounds)
    options = Options(methods, tuple(space), budget, seeds, search, metric, prune, seed, disclose_validation)
    studies = plan_tuning(config, overrides, options, out)
    check_metric(metric, studies[0].default.evaluate.metrics)
    if disclose_validation:
        warnings.warn(trials.NOT_COVERED, stacklevel=1)
    verbosity = Verbosity.QUIET if quiet else Verbosity.NORMAL
    _follow(tune_all(studies, out, jobs or os.cpu_count() or 1), studies, verbosity)
    tuning, chosen = trials.load_tuning(out), chosen_methods(studies)
    command = ["partita", "compare", "--config", str(config), "--methods", chosen]
    command += [part for change in overrides for part in ("--set", change)]
    command += ["--seeds", str(then_compare or 5), "--out", str(out / COMPARISON)]
    if as_json:
        print(json.dumps({**trials.to_json(tuning), "compare": shlex.join(command)}, indent=1))
    else:
        print(trials.to_markdown(tuning) if markdown else trials.to_text(tuning))
    told = sys.stderr if as_json or markdown else sys.stdout
    if then_compare is None:
        print(f"next:\n  {printable(shlex.join([*command, '--report']))}", file=told)
        return
    print(f"{printable(shlex.join(command))}\n", file=told, flush=True)
    compare(
        config,
        chosen,
        then_compare,
        overrides,
        None,
        out / COMPARISON,
        jobs=jobs,
        report=report,
        as_json=as_json,
        markdown=markdown,
        quiet=quiet,
    )


def _follow(statuses: Iterator[object], studies: Sequence[Study], verbosity: Verbosity) -> None:
    """Show a line for every trial that has ended, and how many there are."""
    budget = studies[0].options.budget
    before = {study.folder: sum(trial.state != "running" for trial in study.trials()) for study in studies}
    shown = dict(before)
    with Display(verbosity, f"{len(studies)} methods", budget * len(studies), sum(before.values())) as display:
        display.begin()
        try:
            for _ in statuses:
                for study in studies:
                    ended = [trial for trial in study.trials() if trial.state != "running"]
                    for trial in ended[shown[study.folder] :] if verbosity is not Verbosity.QUIET else ():
                        display.line(f"{shorten(study.default.label)}: {_describe(trial, budget)}")
                    shown[study.folder] = len(ended)
                display.update(sum(shown.values()))
        except BaseException as error:
            count = sum(trial.state != "running" for study in studies for trial in study.trials())
            error.add_note(
                f"{count} of {budget * len(studies)} trials have ended; give the same command again to continue"
            )
            raise


def _describe(trial: Trial, budget: int) -> str:
    settings = ", ".join(f"{key}={text}" for key, text in trial.settings.items())
    name = trial.metric.get("name", "score")
    score = "" if trial.score is None else f", {name} {trial.score:.4g} on validation"
    reason = f": {trial.reason}" if trial.reason else ""
    return f"trial {trial.number} of {budget} ({settings}) {trial.state} after {trial.rounds} rounds{score}{reason}"
