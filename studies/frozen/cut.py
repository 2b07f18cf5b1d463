"""Cut a data set to its first training rows, so that every machine draws from the same ones.

python studies/frozen/cut.py FOLDER OUT ROWS     FOLDER has train.parquet and test.parquet; the test part stays whole
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pyarrow import parquet


def main() -> None:
    match sys.argv[1:]:
        case [source, out, rows]:
            cut(Path(source), Path(out), int(rows))
        case _:
            raise SystemExit(__doc__)


def cut(source: Path, out: Path, rows: int) -> None:
    table = parquet.read_table(source / "train.parquet")
    if rows > len(table):
        raise SystemExit(f"ROWS is {rows}, but the training part has {len(table)} rows")
    out.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.slice(0, rows), out / "train.parquet")
    shutil.copyfile(source / "test.parquet", out / "test.parquet")


if __name__ == "__main__":
    main()
