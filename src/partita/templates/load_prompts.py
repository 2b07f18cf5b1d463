"""Load prompts that partita trained for a frozen CLIP, SigLIP or other dual encoder.

This file needs torch, transformers and safetensors only. `load_prompts(folder)` returns a module from pixel values
(example, channel, height, width) to logits (example, class). Prompts enter the towers by hooks, so the towers are
those of transformers, unchanged. `prompts.json` holds the class names and their tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModel


def load_prompts(folder: str | Path, towers: str | Path | None = None) -> Prompted:
    """Load the prompts in a folder with their dual encoder.

    Args:
        folder: The exported folder.
        towers: Folder or Hub id of the dual encoder. Default: the one that `prompts.json` names.
    """
    folder = Path(folder)
    about = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    inside = folder / "towers"
    source = towers or (inside if inside.is_dir() else about["towers"])
    model = AutoModel.from_pretrained(source, dtype=getattr(torch, about["dtype"]), trust_remote_code=False)
    return Prompted(model.eval().requires_grad_(False), load_file(folder / "prompts.safetensors"), about)


class Prompted(torch.nn.Module):
    """A dual encoder with prompts.

    Attributes:
        classes: The class names, in the order of the logits.
    """

    def __init__(self, model: Any, values: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.about, self.classes = model, about, about["classes"]
        self.values = torch.nn.ParameterDict({name.replace(".", "/"): value for name, value in values.items()})

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        own = {name.replace("/", "."): value for name, value in self.values.items()}
        scale, kind = own["logit_scale"].exp(), self.about["kind"]
        if kind == "transport":
            patches = functional.normalize(self.patches(pixel_values), dim=-1)
            contexts = [own[f"prompt.text.{owner}"] for owner in ("global", "local")]
            texts = functional.normalize(torch.stack([self.texts(context) for context in contexts]), dim=-1)
            similarity = torch.einsum("epf,ocf->ecpo", patches, texts)  # (example, class, patch, owner)
            return scale * (self.transport(1 - similarity) * similarity).sum((-1, -2))
        context, prompts = (self.fuse(own, tower) for tower in ("text", "vision"))
        if kind == "low-rank":
            context = own["prompt.text.global"] + own["prompt.text.left"] @ own["prompt.text.right"]
        image = self.image(pixel_values, prompts)
        if kind == "adapter":
            weight, bias = own["adapter.in.weight"], own["adapter.in.bias"]
            inner = functional.linear(image.to(weight.dtype), weight, bias).tanh()
            image = image * functional.linear(inner, own["adapter.out.weight"], own["adapter.out.bias"]).softmax(-1)
        image, texts = functional.normalize(image, dim=-1), functional.normalize(self.texts(context), dim=-1)
        logits = scale * image @ texts.mT
        return logits + self.votes(own, image) if kind == "cache" else logits

    def votes(self, own: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        """Return what the client's own images say, (example, class): weighted similarities to those in its cache."""
        keys = own["cache.keys"]  # (class, shot, feature); a row of zeros is empty
        cosines = torch.einsum("ef,csf->ecs", image.to(keys.dtype), keys)
        near = ((cosines - 1) * self.about["cache"]["beta"]).exp()
        return own["cache.weight"] * (near * (keys != 0).any(-1)).sum(-1)

    def texts(self, context: torch.Tensor | None) -> torch.Tensor:
        """Return the features of the class texts, (class, feature), with `context` (token, width) before the name."""
        tower = self.model.text_model
        rows = self.about["template_tokens" if context is None else "name_tokens"]
        ids, mask = (torch.tensor(rows[key], device=self.model.device) for key in ("input_ids", "attention_mask"))
        embedding = tower.get_input_embeddings()
        if context is not None:
            start, limit = self.about["start_tokens"], tower.config.max_position_embeddings
            room = ids[:, :1].expand(-1, len(context))  # the hook replaces their embeddings
            ids = torch.cat([ids[:, :start], room, ids[:, start:]], 1)[:, :limit]
            mask = torch.cat([torch.ones_like(room), mask], 1)[:, :limit]

            def insert(_: Any, __: Any, states: torch.Tensor) -> torch.Tensor:
                own = context.to(states.dtype).expand(len(states), -1, -1)
                return torch.cat([states[:, :start], own, states[:, start + len(context) :]], 1)

            hook = embedding.register_forward_hook(insert)
        try:
            seen = None if self.about["reads_padding"] else mask
            return _features(self.model.get_text_features(input_ids=ids, attention_mask=seen))
        finally:
            if context is not None:
                hook.remove()

    def image(self, pixel_values: torch.Tensor, prompts: torch.Tensor | None) -> torch.Tensor:
        """Return image features (example, feature), with prompts (layer, token, width) in the first layers."""
        encoder, first = self.model.vision_model.encoder, self.about["image_tokens"]
        layers = encoder.layers if hasattr(encoder, "layers") else encoder.layer

        def insert(number: int, added: torch.Tensor) -> Any:
            def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
                states = args[0] if args else kwargs["hidden_states"]
                own = added.to(states.dtype).expand(len(states), -1, -1)
                rest = states[:, first + (own.shape[1] if number else 0) :]  # replaces those of the layer before
                states = torch.cat([states[:, :first], own, rest], 1)
                return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

            return hook

        hooks = [
            layers[number].register_forward_pre_hook(insert(number, added), with_kwargs=True)
            for number, added in enumerate(() if prompts is None else prompts)
        ]
        try:
            return _features(self.model.get_image_features(pixel_values=pixel_values.to(self.model.dtype)))
        finally:
            for hook in hooks:
                hook.remove()

    def patches(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features of the patches, (example, patch, feature)."""
        tower = self.model.vision_model
        states = tower(pixel_values=pixel_values.to(self.model.dtype)).last_hidden_state
        states = states[:, self.about["image_tokens"] + getattr(tower.config, "num_register_tokens", 0) :]
        if tower.config.model_type == "clip_vision_model":  # the others end with their norm
            states = tower.post_layernorm(states)
        projection = getattr(self.model, "visual_projection", None)
        return _features(states if projection is None else projection(states))

    def fuse(self, own: dict[str, torch.Tensor], tower: str) -> torch.Tensor | None:
        """Combine the shared and the client's own prompts of a tower; None if it has none."""
        parts = {owner: own[name] for owner in ("global", "local") if (name := f"prompt.{tower}.{owner}") in own}
        fusion = self.about["fusion"]
        if len(parts) < 2:
            return next(iter(parts.values()), None)
        if fusion == "none":
            return torch.cat([parts["global"], parts["local"]], -2)
        if fusion == "mean":
            return (parts["global"] + parts["local"]) / 2
        found = []
        for owner, other in ("local", "global"), ("global", "local"):
            if f"fusion.{tower}.{owner}.query" in own:
                names = (f"fusion.{tower}.{owner}.{part}" for part in ("query", "key", "value", "output"))
                query, key, value, output = (own[name] for name in names)
                scores = (parts[owner] @ query.mT) @ (parts[other] @ key.mT).mT / parts[owner].shape[-1] ** 0.5
                found.append(parts[owner] + scores.softmax(-1) @ (parts[other] @ value.mT) @ output.mT)
        return sum(found[1:], found[0]) / len(found)

    def transport(self, cost: torch.Tensor) -> torch.Tensor:
        """Return the transport plan from patches to texts, (..., patch, text), by Sinkhorn's iterations."""
        options = self.about["transport"]
        patches, texts = cost.shape[-2:]
        kernel = ((cost.amin(-2, keepdim=True) - cost) / options["smoothing"]).exp()
        left, right = torch.ones_like(cost[..., 0]), torch.ones_like(cost[..., 0, :])
        for _ in range(options["iterations"]):
            left = (1 / patches / (kernel @ right.unsqueeze(-1)).squeeze(-1)).clamp(max=1)
            right = options["mass"] / texts / (kernel.mT @ left.unsqueeze(-1)).squeeze(-1)
        return left.unsqueeze(-1) * kernel * right.unsqueeze(-2)


def _features(found: Any) -> torch.Tensor:
    """Return features in float32 or better. transformers 5 wraps the pooled ones."""
    features: torch.Tensor = getattr(found, "pooler_output", found)
    return features.to(torch.promote_types(features.dtype, torch.float32))
