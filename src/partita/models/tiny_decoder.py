"""A tiny random LLaMA or GPT-2 with a tokenizer of whole words and a chat template, as a folder: to try things out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from transformers import BertTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from partita.core.rng import Key, seeded
from partita.models.functional import without_logs
from partita.models.tiny_encoder import SPECIAL

ROLES = ("[SYSTEM]", "[USER]", "[ASSISTANT]", "[TOOL]")  # tokens that start a turn
TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] | upper + '] ' + message['content'] + ' ' + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[ASSISTANT] ' }}{% endif %}"
)


def write_tiny_decoder(
    folder: Path,
    words: Iterable[str],
    key: Key,
    layers: int = 2,
    width: int = 64,
    kind: Literal["llama", "gpt2"] = "llama",
    positions: int = 128,
) -> None:
    """Write a transformers folder with a random model that knows these words and can chat.

    Args:
        folder: Folder to create.
        words: The vocabulary. Other words become the unknown token.
        key: Key for the weights.
        layers: Number of layers.
        width: Hidden size.
        kind: Architecture.
        positions: Maximum number of tokens of a text.
    """
    vocabulary = {word: place for place, word in enumerate((*SPECIAL, *ROLES, *sorted(set(words))))}
    end = vocabulary["[SEP]"]
    sizes: dict[str, Any] = {"vocab_size": len(vocabulary), "max_position_embeddings": positions}
    sizes |= {"bos_token_id": vocabulary["[CLS]"], "eos_token_id": end, "pad_token_id": vocabulary["[PAD]"]}
    with without_logs(), seeded(key):
        if kind == "llama":
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
            llama = LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, **sizes)
            LlamaForCausalLM(llama).save_pretrained(folder)
        else:
            gpt2 = GPT2Config(n_embd=width, n_layer=layers, n_head=4, **sizes)
            GPT2LMHeadModel(gpt2).save_pretrained(folder)
        tokenizer = BertTokenizer(
            vocab=vocabulary,
            model_max_length=positions,
            eos_token="[SEP]",
            additional_special_tokens=list(ROLES),
            chat_template=TEMPLATE,
        )
        tokenizer.save_pretrained(folder)
