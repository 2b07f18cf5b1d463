"""Samples of a run: some test examples in full, with what the model says before and after training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from partita.core import tensors
from partita.core.data import IGNORE_INDEX, Batch
from partita.core.model import Model
from partita.core.tensors import Tensors
from partita.data import Task
from partita.evaluation import sample_texts
from partita.evaluation.entities import TagScheme
from partita.storage.png import data_uri, encode_png
from partita.tasks import (
    CHAT,
    CHOICE,
    IMAGE,
    IMAGE_REGRESSION,
    MULTI_LABEL_IMAGE,
    MULTI_LABEL_TEXT,
    SEQ2SEQ,
    TEXT,
    TEXT_REGRESSION,
    TOKENS,
    Normalization,
)

if TYPE_CHECKING:
    from partita.experiment.config_tables import EvaluateConfig

WRITERS = (CHAT, CHOICE, SEQ2SEQ)  # kinds whose examples have a text to write
CLASSIFIERS = (IMAGE, MULTI_LABEL_IMAGE, IMAGE_REGRESSION, TEXT, MULTI_LABEL_TEXT, TEXT_REGRESSION, TOKENS)
MAX_NEW_TOKENS = 64
THUMBNAIL = 32  # pixels of the longest side of a sample image
MAX_IMAGE = 3072  # bytes of a sample image; 4 kB as text
NOTHING = "none"  # no label or no entity


def sample_answers(
    wanted: EvaluateConfig, model: Model, task: Task, initial: Tensors, params: Tensors
) -> list[dict[str, Any]]:
    """Return the samples: "prompt", "reference", and what the model says "before" and "after" training.

    A sample of a task with images has the "image" as the address of a small PNG image, and an empty prompt.

    Args:
        wanted: The table `[evaluate]` of the config.
        model: The model.
        task: The task, whose test set is sampled.
        initial: All parameters before training.
        params: The server's parameters after training.
    """
    if task.kind in CLASSIFIERS:
        with torch.inference_mode():
            return _sample_predictions(task, model, (initial, params), wanted.samples)
    before, after = (
        sample_texts(model, each, task.test, wanted.samples, wanted.max_new_tokens or MAX_NEW_TOKENS)
        for each in (initial, params)
    )
    return [
        {"prompt": prompt, "reference": reference, "before": old, "after": new}
        for (prompt, reference, old), (_, _, new) in zip(before, after, strict=True)
    ]


def _sample_predictions(task: Task, model: Model, versions: Sequence[Tensors], count: int) -> list[dict[str, Any]]:
    """Return samples of a task with labels, tags or numbers. They are spread over the test set, which may be sorted."""
    count = min(count, len(task.test))
    batch = task.test.take(torch.arange(count) * len(task.test) // max(count, 1))
    device = next(iter(versions[0].values())).device
    inputs = tensors.to(batch.inputs, device)
    logits = [model(params, inputs).with_logits().logits.float().cpu() for params in versions]
    batch = Batch(tensors.to(batch.inputs, torch.device("cpu")), batch.targets.cpu())
    samples = []
    for place in range(count):
        before, after = (_said(task, batch, place, each[place]) for each in logits)
        shown = {"prompt": ""} if task.kind.inputs == "image" else {"prompt": _text(task, batch, place)}
        if task.kind.inputs == "image":
            shown["image"] = thumbnail(batch.inputs["pixel_values"][place], task.normalization)
        samples.append({**shown, "reference": _truth(task, batch, place), "before": before, "after": after})
    return samples


def _truth(task: Task, batch: Batch, place: int) -> str:
    """Return the target of an example as a text."""
    target = batch.targets[place]
    if task.kind.one_class:
        return task.classes[int(target)]
    if task.kind is TOKENS:
        return _entities(task, batch, place, target)
    if task.kind.outputs == "numbers":
        return _numbers(task, target)
    return _labels(task, target > 0)


def _said(task: Task, batch: Batch, place: int, logits: torch.Tensor) -> str:
    """Return a prediction as a text: a class with its probability, or what `_truth` says for other targets."""
    if not bool(logits.isfinite().all()):
        return "not a number"
    if task.kind.one_class:
        likely = int(logits.argmax())
        return f"{task.classes[likely]} ({float(logits.softmax(-1)[likely]):.0%})"
    if task.kind is TOKENS:
        return _entities(task, batch, place, logits.argmax(-1))
    if task.kind.outputs == "numbers":
        return _numbers(task, logits)
    return _labels(task, logits > 0)


def _labels(task: Task, chosen: torch.Tensor) -> str:
    names = [name for name, on in zip(task.classes, chosen.tolist(), strict=True) if on]
    return ", ".join(names) or NOTHING


def _numbers(task: Task, values: torch.Tensor) -> str:
    texts = [f"{value:.4g}" for value in values.flatten().tolist()]
    return texts[0] if len(texts) == 1 else ", ".join(map("{} {}".format, task.classes, texts))


def _text(task: Task, batch: Batch, place: int) -> str:
    """Return the text of an example. The texts of a pair are joined by a bar."""
    ids = batch.inputs["input_ids"][place][batch.inputs["attention_mask"][place] > 0]
    separator = getattr(task.tokenizer, "sep_token_id", None)
    cuts = [] if separator is None else (ids == separator).nonzero().flatten().tolist()
    parts = torch.tensor_split(ids, cuts)
    return " | ".join(text for part in parts if (text := _decoded(task, part)))


def _decoded(task: Task, ids: torch.Tensor) -> str:
    return str(task.tokenizer.decode(ids.tolist(), skip_special_tokens=True)).strip()


def _entities(task: Task, batch: Batch, place: int, tags: torch.Tensor) -> str:
    """Return the entities of an example as "type: words", in order.

    Args:
        task: The task.
        batch: The examples.
        place: The example.
        tags: The tag of each token, (token,). Only tokens with a target count.
    """
    ids, targets = batch.inputs["input_ids"][place], batch.targets[place]
    scored = (targets != IGNORE_INDEX).nonzero().flatten()  # (word,)
    end = int((batch.inputs["attention_mask"][place] > 0).nonzero().max()) + 1
    bounds = [*scored.tolist(), end]  # a word goes on to the next one
    scheme = TagScheme(task.classes)
    spans = scheme.spans(tags[scored].numpy(), (torch.arange(len(scored)) == 0).numpy())
    found = [
        f"{scheme.types[kind]}: {_decoded(task, ids[bounds[start] : bounds[stop]])}"
        for start, stop, kind in zip(spans.starts.tolist(), spans.ends.tolist(), spans.types.tolist(), strict=True)
    ]
    return "; ".join(found) or NOTHING


def thumbnail(pixels: torch.Tensor, normalization: Normalization | None) -> str:
    """Return an image as the address of a small PNG image.

    Args:
        pixels: The image as a model takes it, (channel, height, width).
        normalization: How its pixels were scaled. Default: the darkest one becomes black and the brightest white.
    """
    pixels = pixels[: 3 if len(pixels) >= 3 else 1].float()
    if normalization is not None:
        mean, std = (torch.tensor(values)[: len(pixels), None, None] for values in normalization)
        pixels = pixels * std + mean
    else:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low).clamp_min(1e-12)
    longest = min(THUMBNAIL, max(pixels.shape[1:]))
    while True:
        scale = min(1.0, longest / max(pixels.shape[1:]))
        height, width = (max(1, math.floor(side * scale)) for side in pixels.shape[1:])
        small = (
            torch.nn.functional.adaptive_avg_pool2d(pixels, (height, width))
            .clamp(0, 1)
            .mul(255)
            .round()
            .to(torch.uint8)
        )
        image = encode_png(small.permute(1, 2, 0).contiguous().numpy().tobytes(), width, height, len(small))
        if len(image) <= MAX_IMAGE:
            return data_uri(image)
        longest -= 2  # noise does not compress
