"""A tiny random SegFormer without a head, as a folder: to try things out without a download."""

from __future__ import annotations

from pathlib import Path

from transformers import SegformerConfig, SegformerModel

from partita.core.rng import Key, seeded
from partita.models.functional import without_logs


def write_tiny_segformer(folder: Path, key: Key, width: int = 32) -> None:
    """Write a transformers folder with a random SegFormer of two stages, for images of three channels.

    Args:
        folder: Folder to create.
        key: Key for the weights.
        width: Hidden size of the second stage, and of the head. The first has half of it.
    """
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[width // 2, width],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        decoder_hidden_size=width,
    )
    with without_logs(), seeded(key):
        SegformerModel(config).save_pretrained(folder)
