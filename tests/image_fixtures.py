"""An image federation for methods that need a Hugging Face model: the smallest ViT, four clients."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from helpers import toy_run
from torch import Tensor

from partita.core.data import Batch, ClientData
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.engines.simulation import SimulationEngine
from partita.models.functional import FunctionalModel
from partita.models.peft_adapters import AdaptedModel
from partita.models.prompts.clip import clip
from partita.models.prompts.dual_encoder import DualEncoder
from partita.models.vit import vit
from partita.tasks import IMAGE, TaskKind


@dataclass(frozen=True)
class Images:
    """Images that serve as a task and as its examples."""

    pixels: Tensor  # (example, channel, size, size)
    labels: Tensor
    classes: tuple[str, ...] = ("cat", "dog", "emu")
    channels: int = 1
    size: int = 2
    kind: TaskKind = IMAGE
    vocabulary_size: int = 0
    tokenizer: Any = None
    normalization: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Batch:
        return Batch({"pixel_values": self.pixels[indices]}, self.labels[indices])


def random_images(count: int, seed: int = 0) -> Images:
    draw = (Key(seed) / "pictures").generator()
    pixels = torch.randn(count, 1, 2, 2, generator=draw)
    return Images(pixels, (pixels.sum((1, 2, 3)) > 0).long() + (pixels[:, 0, 0, 0] > 0.5).long())


class ImageClients:
    """Clients by name, each with the given number of images, different ones or the same."""

    def __init__(self, same: bool = False, **sizes: int) -> None:
        self.clients = tuple(sizes)
        self.parts = {
            client: random_images(size, 0 if same else place) for place, (client, size) in enumerate(sizes.items())
        }

    def __getitem__(self, client: str) -> ClientData:
        part = self.parts[client]
        return ClientData(part, part, part)


FOUR = ImageClients(a=9, b=5, c=12, h=7)


@dataclass(frozen=True, eq=False)
class ExtensibleViT(FunctionalModel):
    """A ViT that supports low-rank factors, and uses a tiny CLIP where prompts are requested."""

    def prompted(self, kind: str, key: Key, **options: Any) -> Model:
        return tiny_clip().prompted(kind, key, **options)


def small_vit(layers: int = 1, frozen: tuple[str, ...] = ()) -> FunctionalModel:
    made = vit(random_images(1), Key(1), layers=layers, width=4, heads=1, mlp_ratio=1, patch=1, frozen=frozen)
    return ExtensibleViT(**{each.name: getattr(made, each.name) for each in fields(made)})


def tiny_clip(dtype: Literal["float32", "bfloat16", "float64"] = "float64") -> DualEncoder:
    """A random CLIP, in float64 so that blocks can be compared beyond float32 rounding."""
    return clip(random_images(1), Key(1), shape="tiny", dtype=dtype)  # type: ignore[arg-type]


def low_rank_vit(rank: int = 2, alpha: float = 3.0, layers: int = 1, frozen: tuple[str, ...] = ()) -> AdaptedModel:
    """A ViT with factors beside its weights, which can train too."""
    model = small_vit(layers, frozen).low_rank(rank, alpha, ("query", "value"), Key(2))
    assert isinstance(model, AdaptedModel)
    return model


def adapted_vit(layers: int = 1, key: Key | None = None, kind: str = "lora", **options: Any) -> AdaptedModel:
    """A ViT of which only an adapter and the head train."""
    model = small_vit(layers).adapted(kind, key or Key(2), **{"rank": 2, "alpha": 3.0, **options})
    assert isinstance(model, AdaptedModel)
    return model


def clients_keep_momentum(method: Method) -> bool:
    """Whether clients keep their optimizer's state for the next round."""
    assert method.extend
    run, model = toy_run(method, 1, SGD(momentum=0.9)), method.extend(tiny_clip("float32"), Key(4))
    engine = SimulationEngine(run, model, FOUR)
    next(rounds(run, model, engine))
    kept = [engine.store.load(client, 1).memory for client in FOUR.clients]
    return all(memory.get("optimizer.momentum") for memory in kept)
