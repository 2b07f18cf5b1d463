"""Compare clients by local epochs on digits, where each client has its own order of the patches, as Markdown.

    PYTHONPATH=src:studies python studies/frozen/grid.py

The tables of `digits-grid.toml` come first. Those of `digits-steps.toml` follow, where a client takes as many steps
with 1 and 5 epochs as with 20.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from frozen.contrasts import Rows, Values, gaps, hypotheses, read, rise, text
from playing.tables import paired_by_seed

from partita.report.comparison import Difference

CLIENTS, EPOCHS, WARMUPS = (3, 10, 30), (1, 5, 20), ("0.3", "0.5")


def main() -> None:
    print("\n\n".join([*grid_tables(), *steps_tables()]))


def grid_tables() -> list[str]:
    """Return the tables of `digits-grid.toml`."""
    study, lines, rows = read("digits-grid")
    return [hypotheses(grid_tests(rows)), by_setting(rows), by_epochs(rows), rise(study, lines, rows)]


def steps_tables() -> list[str]:
    """Return the tables of `digits-steps.toml`, with the runs of 20 epochs of `digits-grid.toml`."""
    _, _, grid = read("digits-grid")
    _, _, steps = read("digits-steps")
    longest = {title(clients, EPOCHS[-1]): grid[title(clients, EPOCHS[-1])] for clients in CLIENTS}
    equal = {**steps, **longest}
    return [hypotheses(steps_tests(grid, equal)), by_setting(steps), by_epochs(equal)]


def title(clients: int, epochs: int) -> str:
    """Return the name of a setting."""
    return f"{clients} clients, {in_words(epochs)}"


def in_words(epochs: int) -> str:
    """Return a number of epochs with its unit."""
    return f"{epochs} epoch{'' if epochs == 1 else 's'}"


def mean_gaps(rows: Rows, epochs: int, warmup: str) -> Values:
    """Return by seed how far a warm-up is above `never`, in the mean over the numbers of clients."""
    each = [gaps(rows, title(clients, epochs), warmup) for clients in CLIENTS]
    return {seed: statistics.fmean(own[seed] for own in each) for seed in each[0]}


def grid_tests(rows: Rows) -> Mapping[str, Difference]:
    """Return the differences of the hypotheses about `digits-grid.toml`."""
    few, many, short, both = title(3, 20), title(30, 20), title(3, 1), title(30, 1)
    return {
        f"1. 0.5, {few}": paired_by_seed(rows[few]["0.5"].means, rows[few]["never"].means),
        "2. 0.5, 20 epochs, 30 clients less 3": paired_by_seed(gaps(rows, many, "0.5"), gaps(rows, few, "0.5")),
        "3. 0.5, 3 clients, 20 epochs less 1": paired_by_seed(gaps(rows, few, "0.5"), gaps(rows, short, "0.5")),
        "4. 0.5, 30 clients, 1 epoch": paired_by_seed(rows[both]["0.5"].means, rows[both]["never"].means),
    }


def steps_tests(grid: Rows, equal: Rows) -> Mapping[str, Difference]:
    """Return the differences of the hypotheses about `digits-steps.toml`.

    Args:
        grid: Results with 100 rounds of one epoch, 40 of five and 20 of 20.
        equal: Results with 800 steps at each client.
    """
    return {
        "1. 0.5, 1 epoch, 400 rounds less 100": paired_by_seed(mean_gaps(equal, 1, "0.5"), mean_gaps(grid, 1, "0.5")),
        "2. 0.5, 800 steps, 20 epochs less 1": paired_by_seed(mean_gaps(equal, 20, "0.5"), mean_gaps(equal, 1, "0.5")),
        "3. 0.3, 800 steps, 20 epochs less 1": paired_by_seed(mean_gaps(equal, 20, "0.3"), mean_gaps(equal, 1, "0.3")),
    }


def by_setting(rows: Rows) -> str:
    """Return a table of the score of `never`, and of how far the other arms are above it, by setting."""
    arms = [arm for arm in next(iter(rows.values())) if arm != "never"]
    table = [f"| setting | `never`, % | {' | '.join(f'`{arm}`' for arm in arms)} |", f"|---|{'--:|' * (len(arms) + 1)}"]
    for setting, own in rows.items():
        means = [100 * mean for mean in own["never"].means.values()]
        cells = [f"{statistics.fmean(means):.1f} ± {statistics.stdev(means):.1f}"]
        cells += [text(paired_by_seed(own[arm].means, own["never"].means), 1) for arm in arms]
        table.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(table)


def by_epochs(rows: Rows) -> str:
    """Return a table of how far the warm-ups are above `never`, in the mean over the numbers of clients."""
    table = ["| mean over 3, 10 and 30 clients | `0.3` | `0.5` |", "|---|--:|--:|"]
    for epochs in EPOCHS:
        means = [mean_gaps(rows, epochs, warmup) for warmup in WARMUPS]
        cells = [text(paired_by_seed(own, dict.fromkeys(own, 0.0)), 1) for own in means]
        table.append(f"| {in_words(epochs)} | {' | '.join(cells)} |")
    change = [paired_by_seed(mean_gaps(rows, 20, warmup), mean_gaps(rows, 1, warmup)) for warmup in WARMUPS]
    table.append(f"| 20 less 1 | {' | '.join(text(found, 1) for found in change)} |")
    return "\n".join(table)


if __name__ == "__main__":
    main()
