"""What a LoRA adapter over a frozen base costs: memory of the base by storage, bytes sent, and memory of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partita.core.rng import Key
from partita.models import ModelError
from partita.models.adapter_options import frozen_part
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import frozen_parameters
from partita.models.loading import stored_size
from partita.models.quantization import Mode
from partita.models.without_weights import module_without_weights
from partita.tasks.chunked_loss import CHUNK

# How the base can be stored: the name, `model.dtype` and `model.quantize`.
STORAGES: tuple[tuple[str, torch.dtype | None, Mode | None], ...] = (
    ("float32", None, None),
    ("bfloat16", torch.bfloat16, None),
    ("8bit", torch.bfloat16, "8bit"),
    ("4bit", torch.bfloat16, "4bit"),
)
ROLES, ALPHA = ("query", "value"), 16.0
VALUE_BYTES = 4  # of a trained parameter, a gradient or a moment: they are float32 whatever the base is
TRAINED_BYTES = 4 * VALUE_BYTES  # the value, its gradient, and two moments of AdamW
# Of the activations of a layer, for each token and unit of width, in 16 bits: Korthikanti et al. (2022), without maps
# of attention, which partita never stores.
ACTIVATION_BYTES = 34
INPUT_BYTES = 2  # of the input of a layer, which is all that `model.checkpointing` keeps
LOGIT_BYTES = 8  # of a logit in a chunk: in 16 bits, in float32, and its gradient


@dataclass(frozen=True)
class StorageRow:
    """A frozen base in one kind of storage.

    Attributes:
        storage: "float32", "bfloat16", "8bit" or "4bit". With the last two, what is not a linear weight is bfloat16.
        base: Bytes of the base.
        training: Bytes for training all clients of a block: the base once, and for each client the adapter and the
            activations.
        recomputing: The same with `model.checkpointing`.
        problem: Why the base cannot be stored so; "" if it can.
    """

    storage: str
    base: int = 0
    training: int = 0
    recomputing: int = 0
    problem: str = ""


@dataclass(frozen=True)
class AdapterTable:
    """A LoRA adapter over a frozen base.

    Attributes:
        rank: The rank of the factors.
        roles: The roles of the adapted weights.
        clients: The number of clients that train together.
        batch_size: The examples in a batch.
        tokens: The tokens of an example.
        trains: The number of elements that train: factors, and a task's head.
        up: Bytes that a client sends, and receives, in a round.
        checkpoint: Bytes of the parameters in a checkpoint.
        per_client: Bytes of a client's values, gradients and two moments.
        activations: Bytes of a client's activations with the base in bfloat16; in float32 they double.
        storages: One row for each kind of storage.
    """

    rank: int
    roles: tuple[str, ...]
    clients: int
    batch_size: int
    tokens: int
    trains: int
    up: int
    checkpoint: int
    per_client: int
    activations: int
    storages: tuple[StorageRow, ...]


def adapter_table(
    model: FunctionalModel, path: str, kind: str, rank: int, clients: int, batch_size: int, tokens: int
) -> AdapterTable:
    """Compute the costs of a LoRA adapter, from a model without weights.

    Args:
        model: The model.
        path: Folder or Hub id.
        kind: Name of the kind of task.
        rank: The rank of the factors.
        clients: The number of clients that train together.
        batch_size: The examples in a batch.
        tokens: The tokens of an example of text; an image has as many as patches.

    Raises:
        ModelError: If the model has no linear layer for factors.
    """
    adapted = model.adapted("lora", Key(0), rank=rank, alpha=ALPHA, roles=ROLES)
    trains = sum(value.numel() for value in adapted.initial.values())
    frozen = frozen_part(True, model.kind.outputs)
    logits = LOGIT_BYTES * CHUNK if model.kind.outputs == "vocabulary" else 0
    config: Any = model.module.config
    tokens = _patches(config) if model.kind.inputs == "image" else tokens
    rows = []
    for storage, dtype, quantize in STORAGES:
        try:
            base = _base_bytes(path, kind, frozen, dtype, quantize)
        except ModelError as error:
            rows.append(StorageRow(storage, problem=str(error)))
            continue
        kept, recomputed = _activations(model, batch_size * tokens, dtype)
        whole = base + clients * TRAINED_BYTES * trains + logits
        rows.append(StorageRow(storage, base, whole + clients * kept, whole + clients * recomputed))
    return AdapterTable(
        rank=rank,
        roles=ROLES,
        clients=clients,
        batch_size=batch_size,
        tokens=tokens,
        trains=trains,
        up=VALUE_BYTES * trains,
        checkpoint=VALUE_BYTES * trains,
        per_client=TRAINED_BYTES * trains,
        activations=_activations(model, batch_size * tokens, torch.bfloat16)[0],
        storages=tuple(rows),
    )


def _base_bytes(path: str, kind: str, frozen: str, dtype: torch.dtype | None, quantize: Mode | None) -> int:
    module = module_without_weights(path, kind)[1]
    fixed = frozen_parameters(str(module.config.model_type), module, (frozen,))
    return stored_size(module, fixed, dtype, quantize)


def _activations(model: FunctionalModel, tokens: int, dtype: torch.dtype | None) -> tuple[int, int]:
    """Return the bytes of the activations of a client's batch: all of them, and what checkpointing keeps."""
    config: Any = model.module.config
    config = getattr(config, "vision_config", config)
    widths = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", None) or 0
    width = widths if isinstance(widths, int) else max(widths)
    layers = len({tag for tags in model.tags.values() for tag in tags if tag.startswith("layer.")})
    units = tokens * width * (2 if dtype is None else 1)
    return ACTIVATION_BYTES * layers * units, (INPUT_BYTES * layers + ACTIVATION_BYTES) * units


def _patches(config: Any) -> int:
    """Return the number of patches of an image, for a model with patches of one size."""
    config = getattr(config, "vision_config", config)
    size, patch = (
        each[0] if isinstance(each, list | tuple) else each
        for each in (getattr(config, "image_size", 224), getattr(config, "patch_size", 16))
    )
    return int(size // patch) ** 2
