"""Texts in which clients must look at different places: the label is that of the first or of the last of several texts.

    python studies/frozen/prepare.py FOLDER OUT [COUNT]

FOLDER has train.parquet and test.parquet with the columns text and label, such as TREC. OUT gets the same files with
COUNT texts (default 4) joined in each row, a first word that says which label counts, and a column `range`: "first" or
"last". Split it with `split.name = "by_column"`, `split.column = "range"`: a client then needs one kind of attention,
and one model can still serve all clients.
"""

from __future__ import annotations

import sys
from pathlib import Path

from datasets import Dataset

from partita.core.rng import Key

RANGES = ("first", "last")


def joined(rows: Dataset, count: int, key: Key) -> Dataset:
    """As many rows as before; each text is once at the place that counts."""
    size = len(rows)
    texts, labels = rows["text"][:], rows["label"][:]
    kinds = (key / "range").permutation(size) % len(RANGES)
    others = [(key / "other" / place).permutation(size).tolist() for place in range(count - 1)]
    found: dict[str, list[object]] = {"text": [], "label": [], "range": []}
    for row in range(size):
        fillers = [texts[order[row]] for order in others]
        kind = RANGES[int(kinds[row])]
        parts = [texts[row], *fillers] if kind == "first" else [*fillers, texts[row]]
        found["text"].append(f"{kind} : " + " . ".join(parts))
        found["label"].append(labels[row])
        found["range"].append(kind)
    return Dataset.from_dict(found).cast_column("label", rows.features["label"])


def main() -> None:
    match sys.argv[1:]:
        case [source, out, *rest] if len(rest) < 2:
            folder = Path(out)
            folder.mkdir(parents=True, exist_ok=True)
            for part in ("train", "test"):
                rows = Dataset.from_parquet(str(Path(source, f"{part}.parquet")))
                joined(rows, int(rest[0]) if rest else 4, Key(0) / part).to_parquet(folder / f"{part}.parquet")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
