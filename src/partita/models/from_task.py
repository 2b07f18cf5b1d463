"""What is known of a model before its library is imported: its path, and what it takes from its task."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.core.given import given, is_given
from partita.models import ModelError
from partita.tasks import TaskInfo

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
REMEDY = "give a folder written by save_pretrained, or the id of a model on the Hub"


def check_path(path: str) -> None:
    """Raise a ModelError if a path is neither a folder with a model nor the id of one on the Hub."""
    if is_given(path):
        given(path)
        return
    folder = Path(path).is_dir()
    if folder and not (Path(path) / "config.json").is_file():
        raise ModelError(f"the folder '{path}' has no config.json; give a folder written by save_pretrained")
    if not folder and not HUB_ID.fullmatch(path):
        raise ModelError(f"there is no folder '{path}'; {REMEDY}")


def check_has_images(task: TaskInfo) -> None:
    """Raise a ModelError if the task has no square images."""
    if not (task.channels and task.size):
        raise ModelError("this model needs square images, but the task has none; choose an image task")


def set_labels(config: Any, task: TaskInfo) -> None:
    """Write the names of the outputs and the problem type of the task into the config."""
    config.problem_type = task.kind.problem_type
    config.id2label = dict(enumerate(task.classes))
    config.label2id = {label: index for index, label in enumerate(task.classes)}


def processor_of(task: TaskInfo) -> Any:
    """Return what turns raw inputs into those of the model, for transformers: the tokenizer, or an image processor.

    None if the task has neither. Pipelines of transformers read images as RGB, so grayscale images have none.
    """
    if task.normalization is None or task.channels != 3:
        return task.tokenizer
    mean, std = (list(values) * (3 // len(values)) for values in task.normalization)
    return ImageProcessor(task.kind.head == "segmentation", task.size, tuple(mean), tuple(std))


@dataclass(frozen=True)
class ImageProcessor:
    """What turns images into the model's input, for transformers. It is built when it is saved."""

    segments: bool
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the image processor of transformers into a folder."""
        from partita.models.functional import without_logs

        with without_logs():
            # Here, because they log that they work without torchvision too.
            from transformers import SegformerImageProcessor, ViTImageProcessor

            kind: Any = SegformerImageProcessor if self.segments else ViTImageProcessor
            size = {"height": self.size, "width": self.size}
            # resample = 3 is bicubic, with which tasks resize images.
            kind(size=size, image_mean=list(self.mean), image_std=list(self.std), resample=3).save_pretrained(folder)
