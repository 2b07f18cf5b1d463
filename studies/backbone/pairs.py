"""The four dual encoders of studies/prompts/clip, with what is left of their data, in one command.

python studies/backbone/pairs.py --images CLIP --text BGE --data DATA --out pairs

Both folders of weights may be packed (pack.py); they are unpacked first. Each pair is fitted twice: by the names of
other classes only (pairs/NAME-names), and with 8 public images of each tested class (pairs/NAME). The zero-shot
accuracies of all go to pairs/results-clip.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from align import Settings, align
from pack import unpack

PUBLIC, SIZE, MOST = 8, 112, 4000
# By pair: what the fit learns from, what it is tested on, and the train and test images left for clients.
PAIRS: dict[str, tuple[tuple[str, ...], str, tuple[int, int] | None]] = {
    "office": (("tinyimagenet32", "caltech101"), "office_caltech10", None),
    "pacs": (("tinyimagenet32", "caltech101"), "pacs", (2400, 1000)),
    "caltech": (("tinyimagenet32",), "caltech101", (2400, 1000)),
    "cifar100": (("tinyimagenet32", "caltech101"), "cifar100", (2400, 1000)),
}


def unpacked(folder: Path, out: Path) -> str:
    """Return a folder of weights, unpacked if it is packed."""
    if not (folder / "dtypes.json").exists():
        return str(folder)
    if not (out / folder.name / "model.safetensors").exists():
        unpack(folder, out / folder.name)
    return str(out / folder.name)


def summary(result: dict[str, Any], per_class: int) -> dict[str, Any]:
    """Return what a report keeps: no lists of classes and rows, which alignment.json has."""
    cut = {
        name: {key: value for key, value in facts.items() if key != "rows"}
        for name, facts in result["public"]["cut"].items()
    }
    kept = {key: value for key, value in result.items() if key != "names"}
    return {"per_class": per_class, **kept, "public": {**result["public"], "cut": cut}}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, help="folder of CLIP ViT-B/16's image encoder")
    parser.add_argument("--text", type=Path, required=True, help="folder of BGE-small")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(PAIRS), default=list(PAIRS))
    parser.add_argument("--per-class", type=int, default=24, help="images of each class to learn from")
    parser.add_argument("--most", type=int, default=MOST, help="images of each test part")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(given)
    asked.out.mkdir(parents=True, exist_ok=True)
    images, text = (unpacked(folder, asked.out / "towers") for folder in (asked.images, asked.text))
    report = asked.out / "results-clip.json"
    found = json.loads(report.read_text()) if report.exists() else {}
    for name in asked.only:
        learn, test, keep = PAIRS[name]
        for place, public in (f"{name}-names", 0), (name, PUBLIC):
            settings = Settings(
                images,
                text,
                tuple(str(asked.data / folder) for folder in learn),
                (str(asked.data / test),),
                SIZE,
                asked.per_class,
                asked.most,
                False,
                0,
                asked.device,
                public,
                keep,
            )
            result = align(settings, asked.out / place)
            found[place] = summary(result, asked.per_class)
            report.write_text(json.dumps(found, indent=1) + "\n")
            print(place, result["zero_shot"], f"{result['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
