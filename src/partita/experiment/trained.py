"""The trained model of a run as a module of its own library: of transformers, of PEFT, or the user's own class."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from partita.core.given import given, is_given
from partita.experiment.export import ExportError, export_model, form_of
from partita.experiment.recorded_model import RecordedModel
from partita.models.functional import without_logs
from partita.models.plain import PlainModel


def trained_module(recorded: RecordedModel, client: str | None = None) -> Any:
    """Return a new module with the trained weights.

    A module that was handed over with an adapter of PEFT comes back with one. An adapter that the run added is merged
    into the weights.

    Args:
        recorded: The model of a run.
        client: The client whose own model to return; None for the server's.

    Raises:
        ExportError: If the model has prompts, which are no module of transformers.
    """
    experiment, path = recorded.experiment, recorded.experiment.config.model.get("path")
    model = experiment.model
    if isinstance(model, PlainModel):
        module, _ = given(path).value
        trained: torch.nn.Module = copy.deepcopy(module)
        with model.installed(recorded.params(client)):
            trained.load_state_dict(model.module.state_dict())
        return trained
    form = form_of(recorded)
    if form == "prompts":
        raise ExportError("prompts are no module of transformers; use run.functional(), or run.export(folder)")
    adapted = form == "adapter" and is_given(path)
    with tempfile.TemporaryDirectory() as place, without_logs():
        folder = Path(place) / "model"
        export_model(recorded, folder, client, merge=form == "adapter" and not adapted)
        if adapted:
            from peft import PeftModel

            return PeftModel.from_pretrained(copy.deepcopy(given(path).value).unload(), folder, is_trainable=False)
        kind: Any = getattr(transformers, experiment.federation.task.kind.auto_class)
        return kind.from_pretrained(folder)
