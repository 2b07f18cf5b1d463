"""A Vision Transformer with the names, the initial weights and the results of transformers' ViT.

Importing torch's largest libraries through transformers takes longer than a short run. This module needs torch alone;
transformers writes it when it is exported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from partita.models import ModelError
from partita.models.attention import NAME, layer_attention

STD = 0.02  # of the initial weights


@dataclass
class Config:
    """What transformers' config of a ViT says, as far as partita reads it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    image_size: int
    patch_size: int
    num_channels: int
    id2label: dict[int, str] = field(default_factory=dict)
    label2id: dict[str, int] = field(default_factory=dict)
    problem_type: str | None = None
    model_type: str = "vit"
    is_encoder_decoder: bool = False
    _attn_implementation: str = NAME

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)


class Logits(NamedTuple):
    """What the model returns, under transformers' name."""

    logits: torch.Tensor


class States(NamedTuple):
    """What the encoder returns, under transformers' name."""

    last_hidden_state: torch.Tensor  # (example, token, width)


class VisionTransformer(nn.Module):
    """Classifies images from the class token. `vit` is the encoder, `classifier` the head."""

    main_input_name = "pixel_values"
    name_or_path = ""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.vit = Encoder(config)
        self.vit.apply(_initialize)
        self.classifier = nn.Linear(config.hidden_size, len(config.id2label))
        self.classifier.apply(_initialize)

    @property
    def base_model(self) -> Encoder:
        return self.vit

    def forward(self, pixel_values: torch.Tensor) -> Logits:
        return Logits(self.classifier(self.vit(pixel_values).last_hidden_state[:, 0]))

    def to_transformers(self, state: Mapping[str, torch.Tensor]) -> Any:
        """Return transformers' module with these parameters."""
        from transformers import ViTConfig, ViTForImageClassification

        with torch.device("meta"):
            module = ViTForImageClassification(ViTConfig(**self.config.to_dict()))
        module.load_state_dict(dict(state), assign=True)
        return module

    def save_pretrained(self, folder: str | Path, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Write a folder of transformers."""
        self.to_transformers(state_dict).save_pretrained(folder)


class Encoder(nn.Module):
    """The patches with a class token, through all layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([GradientCheckpointingLayer(config) for _ in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=1e-12)

    def forward(self, pixel_values: torch.Tensor) -> States:
        states = self.embeddings(pixel_values)
        for layer in self.layers:
            states = layer(states)
        return States(self.layernorm(states))


class PatchEmbeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        patch = config.patch_size
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=patch, stride=patch)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        patches: torch.Tensor = self.projection(pixel_values)
        return patches.flatten(2).transpose(1, 2)


class Embeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, config.hidden_size))
        self.patch_embeddings, self.image_size = PatchEmbeddings(config), config.image_size
        patches = (config.image_size // config.patch_size) ** 2
        self.position_embeddings = nn.Parameter(torch.randn(1, patches + 1, config.hidden_size))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if pixel_values.shape[-2:] != (self.image_size, self.image_size):
            given = "x".join(map(str, pixel_values.shape[-2:]))
            raise ModelError(f"the model's image size is {self.image_size}x{self.image_size}, and an image has {given}")
        pixel_values = pixel_values.to(self.patch_embeddings.projection.weight.dtype)
        class_tokens = self.cls_token.expand(pixel_values.shape[0], -1, -1)
        return torch.cat((class_tokens, self.patch_embeddings(pixel_values)), dim=1) + self.position_embeddings


class GradientCheckpointingLayer(nn.Module):
    """A layer, with transformers' name for one whose activations can be recomputed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.mlp = MLP(config)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = self.attention(self.layernorm_before(states)) + states
        after: torch.Tensor = self.mlp(self.layernorm_after(states))
        return after + states


class Attention(nn.Module):
    is_causal = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_attention_heads, self.head_dim = config.num_attention_heads, width // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out, _ = layer_attention(self, query, key, value, None, scaling=self.scaling)
        mixed: torch.Tensor = self.o_proj(out.flatten(-2))
        return mixed


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(nn.functional.gelu(self.fc1(states)))
        return out


@torch.no_grad()
def _initialize(module: nn.Module) -> None:
    """Draw the weights in the order of transformers, after torch's own draws when the modules were made."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.normal_(module.weight, std=STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Embeddings):
        nn.init.trunc_normal_(module.position_embeddings, std=STD)
        nn.init.trunc_normal_(module.cls_token, std=STD)
