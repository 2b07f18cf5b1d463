"""A trained model as a module of its own library: of transformers, of PEFT, or the user's own class."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import transformers

from partita.core.given import given, is_given, unchanged
from partita.core.model import Model
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.functional import FunctionalModel, without_logs
from partita.models.peft_adapters import AdaptedModel
from partita.models.plain import PlainModel


@runtime_checkable
class CopiesModule(Protocol):
    """A model of a module that another program runs."""

    def trained(self, params: Tensors) -> Any:
        """Return a copy of the module with these parameters."""
        ...


def trained_module(model: Model, params: Tensors, path: str | None) -> Any:
    """Return a new module with these parameters.

    A module that was handed over with an adapter of PEFT comes back with one. Another adapter is merged into the
    weights.

    Args:
        model: The model.
        params: Its parameters.
        path: Where it comes from, as in `[model]`.

    Raises:
        ModelError: If it is no module of transformers, PEFT or the user.
    """
    if isinstance(model, CopiesModule):
        return model.trained(params)
    if isinstance(model, PlainModel):
        module = copy.deepcopy(given(path).value[0])
        with model.installed(params):
            module.load_state_dict(model.module.state_dict())
        return module
    if not isinstance(model, FunctionalModel):
        raise ModelError(f"{model.name} is no module of transformers; use run.functional(), or run.export(folder)")
    with tempfile.TemporaryDirectory() as place, without_logs():
        folder = Path(place)
        if isinstance(model, AdaptedModel):
            if is_given(path) and hasattr(given(path).value, "unload"):
                model.save_pretrained(params, folder)
                from peft import PeftModel

                return PeftModel.from_pretrained(copy.deepcopy(unchanged(path)).unload(), folder)
            model.save_merged(params, folder)
        else:
            model.save_pretrained(params, folder)
        kind: Any = getattr(transformers, model.kind.auto_class)
        return kind.from_pretrained(folder, trust_remote_code=False, use_safetensors=True, local_files_only=True)
