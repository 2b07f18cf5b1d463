"""Cut a small federation of questions from MedQuAD: what kind of question is it, to be answered in words.

python studies/language_models/prepare.py FOLDER_WITH_MEDQUAD questions
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas
import pyarrow.parquet as parquet
from datasets import Features

TRAIN, TEST = 80, 50  # rows per institute; the smallest has 200 and 57
ASKED = "What kind of question is this? Answer in a few words."
SEED = 0


def cut(file: Path, rows: int) -> pandas.DataFrame:
    """Return so many rows of each institute as instructions and answers."""
    table = parquet.read_table(file)
    names = Features.from_arrow_schema(table.schema)["label"].names
    chosen = table.to_pandas().groupby("site", group_keys=False).sample(rows, random_state=SEED)
    return pandas.DataFrame(
        {
            "instruction": [f"{text}\n{ASKED}" for text in chosen["text"]],
            "output": [names[label] for label in chosen["label"]],
            "site": list(chosen["site"]),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("medquad", type=Path, help="folder with train.parquet and test.parquet")
    parser.add_argument("out", type=Path, help="folder for train.jsonl and test.jsonl")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", TRAIN), ("test", TEST)):
        cut(asked.medquad / f"{part}.parquet", rows).to_json(asked.out / f"{part}.jsonl", orient="records", lines=True)


if __name__ == "__main__":
    main()
