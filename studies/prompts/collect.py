"""From the folder of a comparison, a line for each run, with which tables.py works.

python studies/prompts/collect.py runs/office --study methods >> studies/prompts/office.jsonl
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="with METHOD/seed-N in it, as partita compare leaves it")
    options.add_argument("--study", required=True, help="what was varied")
    chosen = options.parse_args()
    folders = [path.parent for path in sorted(chosen.folder.glob("*/seed-*/result.json"))]
    if not folders:
        options.error(f"no finished run in {chosen.folder}")
    for folder in folders:
        print(json.dumps({"study": chosen.study, **line(folder)}))


def line(folder: Path) -> dict[str, Any]:
    config = tomllib.loads((folder / "config.toml").read_text())
    rows = [json.loads(row) for row in (folder / "rows.jsonl").read_text().splitlines()]
    asked = {row["round"] + 1: row["personal"]["accuracy"] for row in rows if row.get("personal")}
    last = asked[max(asked)]
    name, _, given = folder.parent.name.partition("_")
    return {
        "method": f"{name}({given.replace('_', ', ')})" if given else name,
        "seed": config["seed"],
        "lr": config["training"]["lr"],
        "clients": len(last),
        "bytes_up": rows[0]["bytes"]["up"] // len(rows[0]["cohort"]),
        "all": round(json.loads((folder / "result.json").read_text())["test"]["accuracy"], 4),
        "own": {client: round(value, 4) for client, value in last.items()},
        "own mean by round": {done: round(sum(each.values()) / len(each), 4) for done, each in asked.items()},
    }


if __name__ == "__main__":
    main()
