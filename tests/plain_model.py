"""An image model without transformers: a site that builds it starts in half the time."""

from __future__ import annotations

from torch import Tensor

from partita.core.model import Output
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.tasks import TaskInfo
from partita.testing.toy import ToyTransformer


class Plain(ToyTransformer):
    """An image of 16 pixels as four tokens."""

    def _run(self, params: Tensors, inputs: Tensors) -> tuple[Output, list[Tensor]]:
        return super()._run(params, {"x": inputs["pixel_values"].reshape(-1, 4, 4)})


def plain(task: TaskInfo, key: Key) -> Plain:
    return Plain(classes=len(task.classes), key=key)
