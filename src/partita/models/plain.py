"""Models from objects: any `torch.nn.Module`, with a loss of the user's own."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from partita.core import serialization, tensors
from partita.core.data import Examples
from partita.core.given import Given, hand_over, unchanged
from partita.core.model import Output
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.models import ModelError
from partita.models.dropout import use_keyed_dropout
from partita.models.functional import FunctionalModel, empty_slots
from partita.models.hugging_face import OPERATIONS, parameter_slots_of
from partita.models.lifting import why_one_by_one
from partita.models.loading import BATCH_NORMS
from partita.models.vmap_layers import use_vmap_layers
from partita.tasks import TaskInfo

Loss = Callable[[Any, torch.Tensor], torch.Tensor]  # (what the module returns, targets) -> (example,)
ROLES = {"norm": (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm), "embedding": (torch.nn.Embedding,)}
WEIGHTS = "model.safetensors"
TRIED = 2  # examples on which the module and the loss are tried before a run


@dataclass(frozen=True, eq=False)
class PlainModel(FunctionalModel):
    """A module that is not of transformers, as a function of its parameters.

    Parameters are tagged by the names in their path, by "layer.N" for a number in it, and by "head" for those of the
    last layer that has any, "norm" and "embedding".
    """

    def why_one_by_one(self, inputs: Tensors) -> str:
        return why_one_by_one(self, inputs)

    def compiles_by_layer(self) -> bool:
        return False

    def save_pretrained(self, params: Tensors, folder: str | Path) -> None:
        """Write the module's `state_dict` as a file of safetensors."""
        with self.installed(params):
            state = {name: value.detach().cpu() for name, value in self.module.state_dict().items()}
        (Path(folder) / WEIGHTS).write_bytes(serialization.save(state, {"format": "pt"}))


def hand_over_module(module: torch.nn.Module, loss: Loss | None = None) -> Given:
    """Let configs name a module and its loss by the digest of the weights and of the texts of their code.

    Raises:
        ModelError: If the module keeps statistics of batches, or has nothing to train.
    """
    for path, part in module.named_modules():
        if isinstance(part, (*BATCH_NORMS, torch.nn.SyncBatchNorm)):
            raise ModelError(
                f"'{path}' is a {type(part).__name__}, whose statistics over a batch differ between clients and are no "
                "parameters; replace it with GroupNorm or LayerNorm"
            )
    if not any(value.requires_grad for value in module.parameters()):
        raise ModelError("no parameter of the model requires a gradient, so nothing would train")
    return hand_over((module, loss), _digest_of, changes=True)


def _digest_of(handed: tuple[torch.nn.Module, Loss | None]) -> str:
    module, loss = handed
    state = hashlib.blake2b(digest_size=16)
    for code in (type(module), loss):
        state.update(f"{getattr(code, '__qualname__', code)}|".encode())
        with suppress(OSError, TypeError):  # typed into a shell, or not written in Python
            state.update(inspect.getsource(code).encode() if code is not None else b"")
    state.update(tensors.digest({name: value.detach() for name, value in module.state_dict().items()}).encode())
    return state.hexdigest()


def module(task: TaskInfo, key: Key, *, path: str) -> PlainModel:
    """A module that a program has handed over. It cannot be read from a file.

    It is called with the input of an example, or with several by name, and returns logits, (example, ...). Parameters
    that do not require a gradient never train or travel.
    """
    handed, loss = unchanged(path)
    module = copy.deepcopy(handed).to(device="cpu")
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    tags = _tags(module)
    module.train(False).requires_grad_(False)
    draws = use_keyed_dropout(module)
    use_vmap_layers(module)
    own = dict(module.named_parameters())
    slots = parameter_slots_of(module, trained)
    initial = {name: own[name].detach().clone() for name in slots}
    empty_slots(slots)
    model = PlainModel(
        name=type(handed).__name__,
        module=module,
        forward=_forward,
        initial=initial,
        tags={name: tags[name] for name in initial},
        frozen_tags={name: tags[name] for name in own.keys() - initial.keys()},
        parameter_slots=slots,
        kind=task.kind if loss is None else replace(task.kind, loss=loss),
        draws=draws,
        only_here="",
        operations=OPERATIONS,
    )
    _try(model, task)
    return model


def _forward(module: Any, inputs: Tensors) -> Output:
    [*values] = inputs.values()
    out = module(values[0]) if len(values) == 1 else module(**inputs)
    return Output(getattr(out, "logits", out))


def _try(model: PlainModel, task: TaskInfo) -> None:
    """Run the module and its loss on two examples, so that shapes that do not fit are refused early."""
    examples: Examples | None = getattr(task, "test", None)
    if examples is None or len(examples) < TRIED:
        return
    batch = examples.take(torch.arange(TRIED))
    try:
        logits = model(model.initial, batch.inputs).logits
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.inputs.items())
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{model.name} cannot run on {shapes}: {reason}; give inputs of the shape it takes") from error
    if not isinstance(logits, torch.Tensor) or len(logits) != TRIED:
        raise ModelError(f"{model.name} must return a tensor of logits, with one row for each example")
    classes = len(task.classes)
    if logits.ndim == 2 and logits.shape[1] < classes:
        raise ModelError(
            f"{model.name} returns {logits.shape[1]} logits, but the data has {classes} classes; give it one for each"
        )
    losses = model.losses(Output(logits), batch.targets)
    if losses.shape != (TRIED,):
        raise ModelError(
            f"the loss returns a tensor of shape {tuple(losses.shape)} for {TRIED} examples; it must return one loss "
            "for each, as with reduction='none'"
        )


def _tags(module: torch.nn.Module) -> dict[str, Names]:
    """Return the tags of all parameters. The last layer with parameters is the head, and in no other layer."""
    owners = [name.rpartition(".")[0] for name, _ in module.named_parameters()]
    tags: dict[str, Names] = {}
    for (name, _), path in zip(module.named_parameters(), owners, strict=True):
        steps, part = [step for step in path.split(".") if step], module.get_submodule(path)
        found = {step for step in steps if not step.isdigit()}
        if path == owners[-1]:
            found.add("head")
        elif number := next((step for step in steps if step.isdigit()), None):
            found.add(f"layer.{number}")
        found |= {role for role, kinds in ROLES.items() if isinstance(part, kinds)}
        tags[name] = frozenset(found or {"other"})
    return tags
