"""Starting points: configs for a data set, as commented TOML, and the examples with the data that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from partita.core.options import OptionError, closest_match
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.inspection import Findings
from partita.data.synthetic_files import (
    CONVERSATION_WORDS,
    DATE_WORDS,
    STATEMENT_WORDS,
    WORDS,
    write_conversations,
    write_dates,
    write_notes,
    write_pictures,
    write_scenes,
    write_statements,
)
from partita.experiment.config import ConfigError, headings, parse
from partita.experiment.reference import about, keys_under
from partita.methods import NEEDS_DUAL_ENCODER, NEEDS_FACTORS, NEEDS_SGD

EXAMPLES = ("chat", "clinical", "dates", "digits", "language_model", "prompts", "scenes", "statements", "ten_thousand")
# Folders that an example's config names, which are written with it.
FOLDERS = {
    "chat": ("conversations", "tiny-llama"),
    "clinical": ("notes", "tiny-encoder"),
    "dates": ("dates", "tiny-t5"),
    "prompts": ("pictures",),
    "scenes": ("scenes", "tiny-segformer"),
    "statements": ("statements", "tiny-encoder"),
}
ENCODER = "distilbert/distilbert-base-uncased"
# The model for a task, if no other is given; `ENCODER` for all other texts.
DEFAULT_MODELS = {
    "lm": "distilbert/distilgpt2",
    "chat": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "seq2seq": "google-t5/t5-small",
    "segmentation": "nvidia/mit-b0",
}
CLIENTS = 4
BUILT_IN = ("digits", "synthetic")  # tasks without a path


def config_for(
    findings: Findings | None,
    model: str | None = None,
    clients: int | None = None,
    method: str = "fedavg",
    task: str = "digits",
    longest: int | None = None,
) -> dict[str, Any]:
    """Return a raw config for a data set.

    Args:
        findings: What is in the data set; None for a built-in task.
        model: Folder or Hub id of a pretrained model. Default: DistilBERT for texts, a small new ViT for images.
        clients: Number of clients. Default: one per site if there is a site column, else 4.
        method: Name of the method.
        task: The built-in task, if `findings` is None.
        longest: Maximum number of tokens that the model takes, if known.

    Raises:
        DataError: If no task fits the data.
    """
    if findings is not None and findings.task is None:
        raise DataError(f"{findings.problems[0]}; name the columns with --text and --label, or change the data")
    data = {"name": task} if findings is None else _data(findings, model, longest)
    image = findings is None or "image" in findings.roles
    by_site = findings is not None and findings.site is not None and len(findings.sites) > 1 and clients is None
    split: dict[str, Any] = {"name": "iid", "clients": clients or CLIENTS}
    if by_site and findings is not None:
        split = {"name": "by_column", "column": findings.site}
    parts = method.split("+")
    if "lora" not in parts and any(part in NEEDS_FACTORS for part in parts):
        parts = ["lora", *parts]
    table = _model(data["name"], model, image, parts)
    return {
        "rounds": 10,
        "data": data,
        "split": split,
        "model": table,
        "training": {**_optimizer(table["name"] == "pretrained", image, parts), "batch_size": 16, "epochs": 1},
        "method": {"name": "+".join(parts)},
    }


def _optimizer(pretrained: bool, image: bool, methods: Sequence[str]) -> dict[str, Any]:
    """Return what studies/recipe and studies/baselines found to be a good start."""
    if any(part in NEEDS_SGD for part in methods):
        return {"optimizer": "sgd", "lr": 0.01 if pretrained else 0.03}
    if not pretrained or "lora" in methods or "flora" in methods:
        return {"optimizer": "adamw", "lr": 1e-3}
    if image:  # without layer decay, such a rate destroys what the lower layers know
        return {"optimizer": "adamw", "lr": 1e-4, "layer_decay": 0.75}
    return {"optimizer": "adamw", "lr": 5e-5}


def _data(findings: Findings, model: str | None, longest: int | None) -> dict[str, Any]:
    table: dict[str, Any] = {"name": findings.task, "path": findings.path, **findings.roles}
    if "image" in findings.roles:
        model = model or DEFAULT_MODELS.get(str(findings.task))
        table["size"] = 32 if model is None else _image_size(model)
    elif findings.task == "lm":
        table |= {"block_size": min(128, longest or 128)} | ({"group": findings.site} if findings.site else {})
    else:
        table["max_length"] = min(256, longest or 256)
    return table


def _image_size(model: str) -> int:
    file = Path(model) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        size = config.get("vision_config", config).get("image_size", 224)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return int(size[0] if isinstance(size, list) else size)


def _model(task: str, path: str | None, image: bool, methods: Sequence[str]) -> dict[str, Any]:
    if any(part in NEEDS_DUAL_ENCODER for part in methods):
        return {"name": "clip", **({"path": path} if path else {"shape": "tiny"})}
    if path is None and image and task not in DEFAULT_MODELS:
        return {"name": "vit", "layers": 2, "width": 64, "patch": 4 if task in BUILT_IN else 8}
    return {"name": "pretrained", "path": path or DEFAULT_MODELS.get(task, ENCODER)}


def to_commented_toml(raw: Mapping[str, Any], introduction: str = "") -> str:
    """Return a config as TOML, with the meaning of each key as a comment.

    Args:
        raw: The config. It is validated first.
        introduction: Lines for the top of the file.

    Raises:
        OptionError: If the config is not valid.
    """
    parse(raw)
    tables: dict[str, Mapping[str, Any]] = {
        "": {key: value for key, value in raw.items() if not isinstance(value, Mapping)}
    }
    tables |= {key: value for key, value in raw.items() if isinstance(value, Mapping)}
    blocks = [introduction] if introduction else []
    for table, values in tables.items():
        named = [f"{table} {part}" for part in str(values.get("name", "")).split("+")]
        found = [heading for heading in (named if "name" in values else [table]) if heading in headings()]
        meanings = {key.name: key.meaning for heading in found for key in keys_under(heading)}
        meanings["name"] = " ".join(map(about, found))
        lines = [tomli_w.dumps({key: value}).strip() for key, value in values.items()]
        width = min(40, max(map(len, lines), default=0))
        shown = [
            f"{line:<{width}}  # {meanings[key].replace('`', '')}" for line, key in zip(lines, values, strict=True)
        ]
        blocks.append("\n".join([f"[{table}]", *shown] if table else shown))
    return "\n\n".join(blocks) + "\n"


def write_new(file: Path, text: str) -> None:
    """Write a new file.

    Raises:
        ConfigError: If the file exists, or cannot be written.
    """
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists already; move it away, or name another file with --out") from error
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error


def write_example(name: str, file: Path) -> list[Path]:
    """Write an example's config and the folders that it names, next to where it will be run: the current folder.

    Returns:
        What was written.

    Raises:
        OptionError: If there is no such example.
        ConfigError: If something that would be written exists already.
    """
    if name not in EXAMPLES:
        raise OptionError(f"there is no example '{name}'; {closest_match(name, EXAMPLES)}")
    folders = [Path(folder) for folder in FOLDERS.get(name, ())]
    for path in (file, *folders):
        if path.exists():
            raise ConfigError(f"{path} exists already; move it away, or run this in an empty folder")
    write_new(file, files("partita").joinpath("examples", f"{name}.toml").read_text(encoding="utf-8"))
    key = Key(0) / "example"
    if name == "chat":
        from partita.models.tiny_decoder import write_tiny_decoder

        write_conversations(folders[0], key / "conversations")
        write_tiny_decoder(folders[1], CONVERSATION_WORDS, key / "model")
    elif name == "clinical":
        from partita.models.tiny_encoder import write_tiny_encoder

        write_notes(folders[0], key / "notes")
        write_tiny_encoder(folders[1], WORDS, key / "model")
    elif name == "dates":
        from partita.models.tiny_seq2seq import write_tiny_seq2seq

        write_dates(folders[0], key / "dates")
        write_tiny_seq2seq(folders[1], DATE_WORDS, key / "model")
    elif name == "prompts":
        write_pictures(folders[0], key / "pictures")
    elif name == "scenes":
        from partita.models.tiny_segformer import write_tiny_segformer

        write_scenes(folders[0], key / "scenes")
        write_tiny_segformer(folders[1], key / "model")
    elif name == "statements":
        from partita.models.tiny_encoder import write_tiny_encoder

        write_statements(folders[0], key / "statements")
        write_tiny_encoder(folders[1], (*WORDS, *STATEMENT_WORDS), key / "model")
    return [file, *folders]
