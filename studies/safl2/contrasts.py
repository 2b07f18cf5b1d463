"""Compare the arms of a study with each other, those of `pairs.toml` also with the 15 fixed pairs, as Markdown.

    PYTHONPATH=src:studies python studies/safl2/contrasts.py maccrobat

`play.py table` has differences to one arm only. Here the mean of all fixed pairs of a seed stands for a pair that is
drawn at random and kept. Differences are paired by the seeds that both sides have.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from playing.choice import built_in, read_runs
from playing.study import read_study
from playing.tables import interval, p_text, paired_by_seed, summarize

MEAN = "mean of the pairs"
CONTRASTS = {
    "pairs": [
        ("safl", "fedavg"),
        ("safl", "fedavg, no embeddings"),
        ("fedavg, no embeddings", "fedavg"),
        ("random, common", "fedavg"),
        (MEAN, "fedavg"),
        ("safl", "random, common"),
        ("random, common", "random, each its own"),
        (MEAN, "random, common"),
        ("safl", MEAN),
        ("safl", "4, 5"),
        ("3, 4", "safl"),
        ("3, 4", "median pair"),
        ("3, 4", MEAN),
    ],
    "maccrobat": [
        ("safl 10", "fedavg"),
        ("safl 10", "random, common"),
        ("safl 10", "random, fixed"),
        ("random, common", "fedavg"),
        ("random, fixed", "random, common"),
    ],
    "maccrobat-rates": [
        ("safl 10", "fedavg"),
        ("safl 10, agreed", "safl 10"),
        ("safl 10, agreed", "random, common"),
        ("safl 10, agreed", "fedavg"),
        ("random, common", "fedavg"),
        ("safl 10, agreed", "safl 5, agreed"),
        ("safl 20, agreed", "safl 10, agreed"),
        ("safl 20, agreed", "fedavg"),
        ("lora, equal bytes", "safl 10, agreed"),
        ("lora, equal bytes", "fedavg"),
        ("fedavg, no embeddings", "fedavg"),
        ("safl 10", "topmost"),
        ("safl 10, agreed", "topmost"),
        ("random, common", "topmost"),
        ("gradient, agreed", "safl 10, agreed"),
        ("safl 10", "centralized"),
        ("safl 10, agreed", "centralized"),
        ("fedavg", "centralized"),
    ],
    "ohsumed": [
        ("safl 10", "fedavg"),
        ("safl 10, agreed", "safl 10"),
        ("safl 10, agreed", "random, common"),
        ("random, common", "fedavg"),
        ("safl 10", "random, common"),
        ("safl 10", "safl 10, content"),
        ("lora, equal bytes", "safl 10"),
        ("lora, equal bytes", "fedavg"),
    ],
    "centralized": [
        ("safl", "centralized"),
        ("safl, agreed", "centralized"),
        ("fedavg", "centralized"),
        ("safl", "fedavg"),
        ("safl, agreed", "fedavg"),
        ("safl, agreed", "safl"),
    ],
}

Scores = Mapping[str, Mapping[int, float]]  # by arm and seed


def is_pair(arm: str) -> bool:
    """Return whether an arm trains a fixed pair of layers."""
    return arm[0].isdigit()


def ranked(scores: Scores) -> list[str]:
    """Return the fixed pairs from the highest mean score to the lowest."""
    pairs = [arm for arm in scores if is_pair(arm)]
    return sorted(pairs, key=lambda arm: -statistics.fmean(scores[arm].values()))


def with_references(scores: Scores) -> dict[str, Mapping[int, float]]:
    """Return the scores with two more arms: the pair in the middle of the ranks, and the mean of all pairs by seed.

    Without fixed pairs the scores are returned as they are.
    """
    order = ranked(scores)
    if not order:
        return dict(scores)
    seeds = set.intersection(*(set(scores[arm]) for arm in order))
    mean = {seed: statistics.fmean(scores[arm][seed] for arm in order) for seed in sorted(seeds)}
    return {**scores, "median pair": scores[order[len(order) // 2]], MEAN: mean}


def contrasts(scores: Scores, wanted: Iterable[tuple[str, str]], metric: str) -> str:
    """Return a table of differences between two arms each."""
    scores, shown = with_references(scores), built_in(metric)
    rows = ["| difference | points, paired [95%] | p | seeds |", "|---|--:|--:|--:|"]
    for after, before in wanted:
        found = paired_by_seed(scores[after], scores[before])
        rows.append(f"| `{after}` − `{before}` | {interval(found, shown)} | {p_text(found.p)} | {found.n} |")
    return "\n".join(rows)


def layer_means(scores: Scores) -> str:
    """Return a table with the mean over the fixed pairs that train each layer."""
    pairs = [arm.split(", ") for arm in ranked(scores)]
    layers = sorted({layer for pair in pairs for layer in pair})
    means = [
        statistics.fmean(statistics.fmean(scores[", ".join(pair)].values()) for pair in pairs if layer in pair)
        for layer in layers
    ]
    head = f"| pairs with layer | {' | '.join(layers)} |\n|---|{'--:|' * len(layers)}"
    return f"{head}\n| mean, % | {' | '.join(f'{100 * mean:.1f}' for mean in means)} |"


def read_scores(name: str) -> tuple[dict[str, Mapping[int, float]], str]:
    """Return the scores of a study in this folder by arm and seed, and the name of their metric."""
    study = read_study(Path(__file__).with_name(f"{name}.toml"))
    [point] = study.points()
    return {row.arm: row.means for row in summarize(study, read_runs(study, "run"), point)}, study.score


def main() -> None:
    for name in sys.argv[1:] or CONTRASTS:
        scores, metric = read_scores(name)
        print(f"{name}:\n\n{contrasts(scores, CONTRASTS[name], metric)}\n")
        if order := ranked(scores):
            print(f"Pairs from best to worst: {'; '.join(order)}.\n\n{layer_means(scores)}\n")


if __name__ == "__main__":
    main()
