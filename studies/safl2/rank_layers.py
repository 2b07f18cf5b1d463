"""Rank the layers of a model on public text, for `select = "static"`: a choice made there costs no privacy.

    PYTHONPATH=src python studies/safl2/rank_layers.py studies/safl2/config-pairs.toml --data FOLDER --tokens cls \
        --set model.path=FOLDER

The config says how texts are read and which model is used. `--data` names other texts in the same form, which no client
holds. Prints the mean score of each layer, and the layers from the highest score to the lowest. Selectors that need
labels of the task (`entities`) need public texts with the same labels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from partita import data, models
from partita.core.data import Batch, Examples
from partita.core.model import TokenChoice
from partita.core.rng import Key
from partita.experiment.config import apply_override, read_toml
from partita.models.functional import FunctionalModel

BATCH = 32


def layer_scores(model: FunctionalModel, examples: Examples, tokens: TokenChoice, count: int) -> dict[str, float]:
    """Return the mean score of each layer over `count` examples, drawn without replacement.

    Args:
        model: The model.
        examples: Public examples.
        tokens: The tokens to measure.
        count: The number of examples.
    """
    places = Key(0).permutation(len(examples))[:count]
    totals: dict[str, float] = {}
    for some in places.split(BATCH):
        batch = examples.take(some)
        scores = model.attention(model.initial, Batch(batch.inputs, batch.targets), tokens)
        for layer, values in scores.items():
            totals[layer] = totals.get(layer, 0.0) + float(values.mean(1).sum())
    return {layer: total / len(places) for layer, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--data", required=True, help="public texts in the form that the config's [data] reads")
    parser.add_argument("--tokens", default="auto", help="as method.tokens; words separated by commas are a list")
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    raw = read_toml(given.config)
    for text in given.overrides:
        apply_override(raw, text)
    table, wanted = dict(raw["data"]), dict(raw["model"])
    table["path"], name = given.data, wanted.pop("name")
    if wanted.get("path"):
        table.setdefault("tokenizer", wanted["path"])
    task = data.load(table.pop("name"), Key(0), **table)
    model = models.build(name, task, Key(0), **wanted)
    assert isinstance(model, FunctionalModel)
    tokens: TokenChoice = tuple(given.tokens.split(",")) if "," in given.tokens else given.tokens
    with torch.no_grad():
        scores = layer_scores(model, task.train, tokens, given.examples)
    for layer, score in scores.items():
        print(f"{layer:10} {score:.4f}")
    order = sorted(scores, key=lambda layer: -scores[layer])
    print("layers, from the highest score:", [int(layer.removeprefix("layer.")) for layer in order])


if __name__ == "__main__":
    main()
