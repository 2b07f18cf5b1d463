"""What a LoRA adapter over a frozen base costs: memory of the base by storage, bytes sent, and memory of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partita.core.rng import Key
from partita.methods.lora import factors
from partita.models import ModelError
from partita.models.adapter import FunctionalModel, frozen_parameters
from partita.models.pretrained import stored_size
from partita.models.quantization import Mode
from partita.models.without_weights import module_without_weights

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
LOGIT_BYTES = 8  # a logit and its gradient in float32, for each token and word of a language model


@dataclass(frozen=True)
class StorageRow:
    """A frozen base in one kind of storage.

    Attributes:
        storage: "float32", "bfloat16", "8bit" or "4bit". With the last two, what is not a linear weight is bfloat16.
        base: Bytes of the base.
        training: Bytes for training all clients of a block: the base once, and for each client the adapter and the
            activations.
        problem: Why the base cannot be stored so; "" if it can.
    """

    storage: str
    base: int = 0
    training: int = 0
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
        trains: The number of elements that train: factors, and a head that is not tied to the embeddings.
        up: Bytes that a client sends, and receives, in a round.
        checkpoint: Bytes of the parameters in a checkpoint.
        per_client: Bytes of a client's values, gradients and two moments.
        activations: Bytes of a client's activations with the base in bfloat16; in float32 those of the layers double.
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
    adapted = model.low_rank(rank, ALPHA, ROLES, Key(0))
    trains = sum(adapted.initial[name].numel() for name in factors(adapted, head=True))
    config: Any = model.module.config
    tokens = _patches(config) if model.kind.inputs == "image" else tokens
    rows = []
    for storage, dtype, quantize in STORAGES:
        try:
            base = _base_bytes(path, kind, dtype, quantize)
        except ModelError as error:
            rows.append(StorageRow(storage, problem=str(error)))
            continue
        each = TRAINED_BYTES * trains + _activations(model, batch_size * tokens, dtype)
        rows.append(StorageRow(storage, base, base + clients * each))
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
        activations=_activations(model, batch_size * tokens, torch.bfloat16),
        storages=tuple(rows),
    )


def _base_bytes(path: str, kind: str, dtype: torch.dtype | None, quantize: Mode | None) -> int:
    module = module_without_weights(path, kind)[1]
    fixed = frozen_parameters(str(module.config.model_type), module, ("base",))
    return stored_size(module, fixed, dtype, quantize)


def _activations(model: FunctionalModel, tokens: int, dtype: torch.dtype | None) -> int:
    """Return the bytes of the activations of a client's batch."""
    config: Any = model.module.config
    config = getattr(config, "vision_config", config)
    widths = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", None) or 0
    layers = len({tag for tags in model.tags.values() for tag in tags if tag.startswith("layer.")})
    per_token = (
        ACTIVATION_BYTES * (2 if dtype is None else 1) * layers * (widths if isinstance(widths, int) else max(widths))
    )
    words = config.vocab_size if model.kind.outputs == "vocabulary" else 0
    return tokens * (per_token + LOGIT_BYTES * words)


def _patches(config: Any) -> int:
    """Return the number of patches of an image, for a model with patches of one size."""
    config = getattr(config, "vision_config", config)
    size, patch = (
        each[0] if isinstance(each, list | tuple) else each
        for each in (getattr(config, "image_size", 224), getattr(config, "patch_size", 16))
    )
    return int(size // patch) ** 2
