"""Pack a folder of weights into small files without loss, and unpack them on another machine.

python studies/backbone/pack.py pack FOLDER --out PARTS [--limit 60]     files of at most so many MB
python studies/backbone/pack.py unpack PARTS --out FOLDER

Weights that come from 8 bits with a step for each row are stored as one byte each, with the steps. Weights that come
from half precision are stored in half precision. All others stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

CODES, STEPS = ".codes", ".steps"


def packed(name: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors that stand for one, exactly."""
    if value.dtype == torch.float32:
        if value.ndim == 2 and (steps := row_steps(value)) is not None:
            return {name + CODES: (value / steps).round().to(torch.int8), name + STEPS: steps}
        if torch.equal(value.half().float(), value):
            return {name: value.half()}
    return {name: value}


def row_steps(value: Tensor) -> Tensor | None:
    """(row, 1): the step of which every entry of a row is a multiple, by -127 to 127 and bit for bit; None if none is.

    The largest entry is 127 steps, up to the rounding of their product.
    """
    most = value.abs().amax(1, keepdim=True)
    if not most.all():
        return None
    step, found, fits = most / 127, torch.zeros_like(most), torch.zeros_like(most, dtype=torch.bool)
    for _ in range(3):
        step = step.nextafter(torch.zeros_like(step))
    for _ in range(7):
        right = ((value / step).round() * step == value).all(1, keepdim=True)
        found, fits = torch.where(right & ~fits, step, found), fits | right
        step = step.nextafter(torch.full_like(step, torch.inf))
    return found if fits.all() else None


def unpacked(tensors: dict[str, Tensor], dtypes: dict[str, str]) -> dict[str, Tensor]:
    """The tensors as they were."""
    found = {}
    for name, dtype in dtypes.items():
        if name in tensors:
            found[name] = tensors[name].to(getattr(torch, dtype))
        else:
            found[name] = tensors[name + CODES].float() * tensors[name + STEPS]
    return found


def read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dict
                yield name, weights.get_tensor(name)


def pack(folder: Path, out: Path, limit: int) -> list[Path]:
    """Write the parts. Files that are not weights go into the first one's folder as they are."""
    out.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    dtypes, size = {}, 0
    for name, value in read(folder):
        dtypes[name] = str(value.dtype).removeprefix("torch.")
        small = packed(name, value)
        bytes_more = sum(tensor.nbytes for tensor in small.values())
        if size + bytes_more > limit * 1_000_000 and parts[-1]:
            parts.append({})
            size = 0
        parts[-1].update(small)
        size += bytes_more
    files = [out / f"part-{place}.safetensors" for place in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        save_file(part, file)
    (out / "dtypes.json").write_text(json.dumps(dtypes))
    for other in folder.iterdir():
        if other.is_file() and not other.name.startswith("model.safetensors") and other.suffix != ".safetensors":
            shutil.copyfile(other, out / other.name)
    return files


def unpack(parts: Path, out: Path) -> None:
    """Write the folder of weights. An index of several files is left out, since there is one file now."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(parts.glob("part-*.safetensors")):
        tensors |= load_file(file)
    out.mkdir(parents=True, exist_ok=True)
    dtypes = json.loads((parts / "dtypes.json").read_text())
    save_file(unpacked(tensors, dtypes), out / "model.safetensors", metadata={"format": "pt"})
    for other in parts.iterdir():
        if other.suffix != ".safetensors" and other.name != "dtypes.json":
            shutil.copyfile(other, out / other.name)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=60, help="MB of a file")
    asked = parser.parse_args(given)
    if asked.action == "unpack":
        unpack(asked.folder, asked.out)
        return
    for file in pack(asked.folder, asked.out, asked.limit):
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
