"""Write docs/reference/models.md: the model types that the tests check on tiny random configs, and what they found."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

INTRODUCTION = """# Reference: models

<!-- Written by scripts/write_models.py from the checks in tests/models/test_model_types.py; do not edit it by hand. -->

Any other type of transformers works too: `partita model PATH` shows what partita finds in it.

Each type was built from a tiny random config. For each, the tests check that

- its outputs equal those of plain transformers, to 1e-5;
- one round of two clients trains, and leaves frozen parameters (query and key, or without them the head that stays at
  a client) as they were, bit for bit;
- its saved folder loads in plain transformers, with equal parameters bit for bit and equal outputs;
- where clients train in blocks, a block equals single clients, to 1e-4.

"Roles" are those of attention and feed-forward blocks. "other" stands for parameters without a role, such as a fused
projection. "Scores" says whether attention was seen to depend on the query and key of a layer and on no value, output
or feed-forward parameter of it; "–" is a type without attention maps. "Dropout" says whether all of its dropout can be
drawn by example; in part means that a run says which places train without dropout. Layers are those of the tiny config;
a decoder's follow those of its encoder.

{count} model types:

| type | task | layers | roles | scores | clients train | dropout |
|---|---|---|---|---|---|---|
"""


GPU = """
## On a GPU

`make test-gpu` runs each of these types from the command, on one {card} with torch {torch} and transformers
{transformers}. A run has three clients and two rounds; with `engine.compile = true` one round of two steps. In float32,
a round on the GPU equals one on the CPU to 1e-4. "LoRA" is `[model.adapter]` with its default roles. "no" is an error
of one line before the first round, or, for blocks, clients that train one at a time.

{counts}

| type | task | float32 | bfloat16 | blocks | compiled | DP-SGD | LoRA |
|---|---|---|---|---|---|---|---|
"""
RESULTS = ROOT / "docs" / "reference" / "models-gpu.json"
COLUMNS = {"float32": "float32", "bfloat16": "bfloat16", "blocks": "blocks", "compiled": "compiled", "dp-sgd": "DP-SGD"}
COLUMNS |= {"lora": "LoRA"}
PART, PARTLY = "in float32 in part", "computes in float32"  # the cell, and what its run says


def gpu_section() -> str:
    """Return the section of the page on what `make test-gpu` found, with its notes."""
    found = json.loads(RESULTS.read_text())
    notes: dict[str, list[str]] = defaultdict(list)  # what is said -> the types of which it is said
    rows = []
    for case, columns in found["types"].items():
        model_type, _, kind = case.rpartition("-")
        cells = []
        for column in COLUMNS:
            said = columns.get(column, "not run")
            if said not in ("yes", "not run"):
                plain = said.replace(model_type, "the type")
                notes[plain].append(model_type)
                said = f"{PART if PARTLY in said else 'no'} [{[*notes].index(plain) + 1}]"
            cells.append(said)
        rows.append(f"| `{model_type}` | {kind} | {' | '.join(cells)} |")
    counts = ", ".join(
        f"{sum(_runs(columns.get(column, '')) for columns in found['types'].values())} {title}"
        for column, title in COLUMNS.items()
    )
    told = [f"{number}. {note}{'' if note.endswith(('.', '?')) else '.'}" for number, note in enumerate(notes, 1)]
    about = {name: found[name] for name in ("card", "torch", "transformers")}
    section = GPU.format(**about, counts=f"Of {len(rows)} types run: {counts}.") + "\n".join(rows) + "\n"
    return section + ("\nWhat the numbers stand for:\n\n" + "\n".join(told) + "\n" if told else "")


def _runs(said: str) -> bool:
    return said == "yes" or PARTLY in said


def main() -> None:
    """Check all types and write the page."""
    from model_types import CASES, check  # type: ignore[import-not-found]  # takes seconds, for torch and transformers

    rows = [check(case).to_markdown() for case in CASES]
    count = len({row.split("|")[1] for row in rows})
    page = INTRODUCTION.format(count=count) + "\n".join(rows) + "\n" + gpu_section()
    (ROOT / "docs" / "reference" / "models.md").write_text(page)


if __name__ == "__main__":
    main()
