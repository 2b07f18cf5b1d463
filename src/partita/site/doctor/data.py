"""Checks of the site's data and of the model that is built for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from partita.core import memory
from partita.core.rng import Key
from partita.experiment.builder import build, build_data, build_method
from partita.site.description.classes import CLASSES_FILE, read_classes
from partita.site.description.record import DescriptionError
from partita.site.description.tables import class_table, part_sizes, token_lengths, token_limit
from partita.site.doctor.checks import Examined, Outcome, failed, ok, warning

MANY_CUT = 0.1  # share of texts that reach the limit
SHOWN = 3  # classes in a sentence


def check_data(examined: Examined) -> Outcome:
    """Load the data as a round would, with this site's settings."""
    config, site = examined.config, examined.site
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks of rows and lengths say the same without quoting data
        federation = build_data(config, build_method(config.method), Key(config.seed))
    if site.name not in federation.clients:
        return failed(
            f"the experiment has no client '{site.name}'",
            "compare 'name' in site.toml with split.sites of the experiment",
        )
    examined.found_federation = federation
    columns = sorted(federation.task.columns)
    shown = f"; further columns: {', '.join(columns[:10])}" if columns else ""
    return ok(f"'{config.data['name']}' loads with all columns that the experiment names{shown}")


def check_rows(examined: Examined) -> Outcome:
    """Check that there are enough rows to train and to evaluate."""
    config, sizes = examined.config, part_sizes(examined.federation, examined.site.name)
    shown = f"{sizes['train']:,} to train, {sizes['validation']:,} to validate, {sizes['test']:,} to test"
    if not sizes["train"]:
        return failed(f"no rows to train on ({shown})", "check data.path in [set] of site.toml")
    if sizes["train"] < config.training.batch_size:
        return warning(
            f"{shown}; a batch of training.batch_size = {config.training.batch_size} is never full",
            "collect more rows, or agree on a smaller batch",
        )
    if not sizes["test"] and config.evaluate.personal_every:
        return warning(f"{shown}, so this site has no scores of its own", "collect more rows, or raise split.test")
    return ok(shown)


def check_classes(examined: Examined) -> Outcome:
    """Compare the classes with those that the group agreed on, and look for classes without rows."""
    task = examined.federation.task
    table = class_table(task, np.arange(0))
    if table is None:
        return ok(f"a task of kind '{task.kind.name}' has no classes")
    agreed_file = examined.site.folder / CLASSES_FILE
    if agreed_file.exists():
        try:
            agreed = read_classes(agreed_file)
        except DescriptionError as error:
            return failed(str(error), "ask the server's operator for it")
        if agreed != task.classes:
            return failed(
                _difference(task.classes, agreed), f"rename the labels here so that they are those of {CLASSES_FILE}"
            )
    told = f"as in {CLASSES_FILE}" if agreed_file.exists() else f"there is no {CLASSES_FILE} to compare with"
    shown = f"{len(task.classes)} classes, {told}"
    if empty := [name for name, count in zip(task.classes, table.counts(), strict=True) if not count]:
        return warning(f"{shown}; no row has {_quoted(empty)}", "that may be right; ask 'partita sites describe'")
    return ok(shown)


def _difference(here: Sequence[str], agreed: Sequence[str]) -> str:
    if extra := [name for name in here if name not in agreed]:
        return f"the data has {_quoted(extra)}, which the group did not agree on"
    if lacking := [name for name in agreed if name not in here]:
        return f"the data lacks {_quoted(lacking)}, so the model has another shape than the others'"
    return "the classes have another order than the group's, so labels would be mixed up"


def _quoted(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        ("the class " if len(names) == 1 else "the classes ") + ", ".join(f"'{name}'" for name in names[:SHOWN]) + more
    )


def check_lengths(examined: Examined) -> Outcome:
    """Check how many texts are longer than what the model reads."""
    task = examined.federation.task
    lengths = token_lengths(task.train)
    if lengths is None:
        return ok(f"images of {task.size} by {task.size} pixels" if task.size else "the inputs are not texts")
    limit = token_limit(task.train)
    if task.first_windows is not None:
        return ok(f"texts of more than {limit} tokens are read in windows")
    reaching = int((lengths >= limit).sum())
    shown = f"{reaching:,} of {len(lengths):,} texts reach the limit of {limit} tokens, where they are cut"
    if reaching > MANY_CUT * len(lengths):
        return warning(shown, "agree on a larger data.max_length, or on data.long_texts = 'windows'")
    return ok(shown)


def check_model(examined: Examined) -> Outcome:
    """Build the model and the run, with noise keys of its own if the run is private."""
    config = examined.config
    # The rehearsal must not draw from the secret of real rounds.
    config = replace(config, engine=replace(config.engine, secret_file=None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        examined.found_experiment = experiment = build(config, federation=examined.federation)
    initial = experiment.model.initial
    size = sum(value.numel() * value.element_size() for value in initial.values())
    count = sum(value.numel() for value in initial.values())
    shown = f"{experiment.model.name} with {count:,} parameters ({memory.size(size)})"
    if caught:
        return warning(f"{shown}; {caught[0].message}", "read 'partita plan' before you start")
    return ok(shown)
