"""Make CLIP's image tower take smaller images: its position embeddings are interpolated, as DINOv2 does by itself.

python studies/frozen/shrink.py FOLDER OUT SIDE     SIDE in pixels, a multiple of the patch
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch.nn import functional


def main() -> None:
    match sys.argv[1:]:
        case [source, out, side]:
            shrink(Path(source), Path(out), int(side))
        case _:
            raise SystemExit(__doc__)


def shrink(source: Path, out: Path, side: int) -> None:
    config = json.loads((source / "config.json").read_text())
    if side % config["patch_size"]:
        raise SystemExit(f"SIDE is {side}; it must be a multiple of the patch, {config['patch_size']}")
    grid, before = side // config["patch_size"], config["image_size"] // config["patch_size"]
    weights = load_file(source / "model.safetensors")
    [name] = [name for name in weights if name.endswith("position_embedding.weight")]
    first, rest = weights[name][:1], weights[name][1:]  # the class token has a position of its own
    square = rest.T.reshape(1, -1, before, before)
    resized = functional.interpolate(square, (grid, grid), mode="bicubic", align_corners=False, antialias=True)
    weights[name] = first.new_empty(grid * grid + 1, first.shape[1])
    weights[name][:1], weights[name][1:] = first, resized[0].flatten(1).T
    shutil.copytree(source, out, dirs_exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "image_size": side}, indent=2) + "\n")


if __name__ == "__main__":
    main()
