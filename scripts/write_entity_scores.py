"""Write the scores that seqeval gives to random tag sequences, with which a test compares partita's own.

seqeval is published as source only, so it is not among the tools of the tests. Run this in an environment of its own:

    python3 -m venv /tmp/seqeval
    /tmp/seqeval/bin/pip install seqeval==1.2.2
    /tmp/seqeval/bin/python scripts/write_entity_scores.py
"""

from __future__ import annotations

import json
import random
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "tests" / "evaluation" / "seqeval_scores.json"
TAGS = ("O", "B-Drug", "I-Drug", "B-Sign", "I-Sign")
CASES = 120
CHANGED = (0.1, 0.5, 1.0)  # shares of tags that a prediction draws anew, so that some entities match


def draw(source: random.Random) -> tuple[list[list[str]], list[list[str]]]:
    """Return true and predicted tags of a few sentences. Tags are in any order, also I- without B- before it."""
    truths, guesses = [], []
    for _ in range(source.randint(1, 5)):
        truth = source.choices(TAGS, k=source.randint(1, 10))
        changed = source.choice(CHANGED)
        truths.append(truth)
        guesses.append([source.choice(TAGS) if source.random() < changed else tag for tag in truth])
    return truths, guesses


def main() -> None:
    """Write the file."""
    from seqeval.metrics.v1 import precision_recall_fscore_support
    from seqeval.scheme import IOB2

    source = random.Random(0)
    cases: list[dict[str, object]] = []
    while len(cases) < CASES:
        truths, guesses = draw(source)
        kinds = sorted({tag[2:] for row in (*truths, *guesses) for tag in row if tag[0] == "B"})
        if not kinds:
            continue
        settings = {"zero_division": 0, "scheme": IOB2}
        micro = precision_recall_fscore_support(truths, guesses, average="micro", **settings)
        columns = precision_recall_fscore_support(truths, guesses, average=None, **settings)
        cases.append(
            {
                "true": [" ".join(row) for row in truths],
                "predicted": [" ".join(row) for row in guesses],
                "micro": [float(value) for value in micro[:3]],
                "by_type": {kind: [float(each[place]) for each in columns] for place, kind in enumerate(kinds)},
            }
        )
    lines = ",\n".join(json.dumps(case) for case in cases)
    FILE.write_text(f'{{"seqeval": "{version("seqeval")}", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
