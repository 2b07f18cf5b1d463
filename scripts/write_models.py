"""Write docs/reference/models.md: the model types that the tests check on tiny random configs, and what they found."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from model_types import CASES, check  # type: ignore[import-not-found]  # noqa: E402

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
or feed-forward parameter of it; "–" is a type without attention maps. "Dropout" says whether its dropout can be drawn
by example; elsewhere a run with dropout is refused, and `training.dropout = false` trains without. Layers are those of
the tiny config; a decoder's follow those of its encoder.

{count} model types:

| type | task | layers | roles | scores | clients train | dropout |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Check all types and write the page."""
    rows = [check(case).to_markdown() for case in CASES]
    count = len({row.split("|")[1] for row in rows})
    (ROOT / "docs" / "reference" / "models.md").write_text(INTRODUCTION.format(count=count) + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
