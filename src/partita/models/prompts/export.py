"""Write trained prompts as a folder that loads without partita."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from partita.core import serialization
from partita.core.model import Model
from partita.core.tensors import Tensors
from partita.models.architectures.dual_encoders import image_tower_spec, text_tower_spec
from partita.models.functional import without_logs
from partita.models.prompts.dual_encoder import DualEncoder
from partita.models.prompts.feature_adapter import FeatureAdapter
from partita.models.prompts.feature_cache import CachedFeatures
from partita.models.prompts.low_rank_prompts import LowRankPrompts
from partita.models.prompts.optimal_transport import OptimalTransportPrompts
from partita.models.prompts.prompts import DualPrompts, PromptModel

VALUES, ABOUT, LOADER, TOWERS = "prompts.safetensors", "prompts.json", "load_prompts.py", "towers"
# By type of model, the name of its kind in prompts.json, as the loader reads it.
KINDS: dict[type, str] = {
    DualEncoder: "template",
    DualPrompts: "prompts",
    LowRankPrompts: "low-rank",
    FeatureAdapter: "adapter",
    CachedFeatures: "cache",
    OptimalTransportPrompts: "transport",
}


def has_prompts(model: Model) -> bool:
    """Return whether a model is a dual encoder, with or without prompts."""
    return type(model) in KINDS


def save_prompts(
    model: Model, params: Tensors, folder: Path, classes: tuple[str, ...], source: str = "", method: str = ""
) -> None:
    """Write the prompts, their description and the loader. The frozen towers stay where they are.

    Args:
        model: A dual encoder, with or without prompts.
        params: Its parameters.
        folder: The folder to write.
        classes: The class names.
        source: Hub id or name of the folder with the towers. Empty: the towers are random, so they are written too.
        method: The method that trained the prompts, for the description.
    """
    towers = model.towers if isinstance(model, PromptModel) else model
    assert isinstance(towers, DualEncoder)
    folder.mkdir(parents=True, exist_ok=True)
    vision, text = (str(getattr(towers.module, f"{tower}_model").config.model_type) for tower in ("vision", "text"))
    names, rest = [label.replace("_", " ") for label in classes], towers.template.partition("{}")[2]
    about: dict[str, Any] = {
        "format": 1,
        "kind": KINDS[type(model)],
        "method": method,
        "classes": list(classes),
        "template": towers.template,
        "towers": source or TOWERS,
        "tower_types": {"vision": vision, "text": text},
        "dtype": str(towers.module.dtype).removeprefix("torch."),
        "fusion": model.fusion if isinstance(model, DualPrompts) else "none",
        "template_tokens": _tokens(towers, [towers.template.format(name) for name in names]),
        "name_tokens": _tokens(towers, [name + rest for name in names]),
        "start_tokens": text_tower_spec(text).start_tokens,
        "reads_padding": text_tower_spec(text).full_length,
        "image_tokens": image_tower_spec(vision).image_tokens,
        "needs": ["torch", "transformers", "safetensors"],
    }
    if isinstance(model, OptimalTransportPrompts):
        options = {"mass": model.mass, "smoothing": model.smoothing, "iterations": model.iterations}
        about["transport"] = options
    if isinstance(model, CachedFeatures):
        about["cache"] = {"beta": model.beta}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    (folder / VALUES).write_bytes(serialization.save({name: params[name].cpu() for name in sorted(params)}, {}))
    (folder / LOADER).write_text(files("partita").joinpath(f"templates/{LOADER}").read_text(encoding="utf-8"))
    if not source:
        with without_logs():
            towers.module.save_pretrained(folder / TOWERS)


def _tokens(towers: DualEncoder, texts: list[str]) -> dict[str, list[list[int]]]:
    ids, mask = towers.tokenize(texts)
    return {"input_ids": ids.tolist(), "attention_mask": mask.long().tolist()}
