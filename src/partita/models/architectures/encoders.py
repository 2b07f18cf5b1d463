"""Text encoders: BERT (also MiniLM), RoBERTa, ELECTRA, DistilBERT. Features are those of the first token."""

from __future__ import annotations

from typing import Any

import torch

from partita.core.model import Output
from partita.core.tensors import Tensors
from partita.models.architectures.spec import Architecture, Forward, InputSide, head_dropout, tag_rules

_EMBEDDINGS = {
    r"embeddings\.(word|position|token_type)_embeddings\..+": "embedding",
    r"embeddings\.LayerNorm\..+": "norm",
    r"embeddings_project\..+": "embedding",
}
_HEADS = ((r"(pre_)?classifier\..+", "head"),)


def like_bert(body: str, text: Forward) -> Architecture:
    """Return the architecture of a BERT-like encoder.

    Args:
        body: Name of the encoder in the module.
        text: Forward function of text classification.
    """
    layer = {
        r"attention\.self\.query\..+": "query",
        r"attention\.self\.key\..+": "key",
        r"attention\.self\.value\..+": "value",
        r"attention\.output\.dense\..+": "output",
        r"(intermediate|output)\.dense\..+": "mlp",
        r"(attention\.)?output\.LayerNorm\..+": "norm",
    }
    return Architecture(
        roles=(
            *tag_rules(rf"{body}\.", _EMBEDDINGS),
            *tag_rules(rf"{body}\.encoder\.layer\.(?P<layer>\d+)\.", layer),
            (rf"{body}\.pooler\..+", "head", "pooler"),  # only text classification uses it
            *_HEADS,
        ),
        heads={"text": text, "tokens": all_tokens},
        pooling={"mean": from_mean, "unit_mean": from_unit_mean},
        start=InputSide("input_ids", ("embeddings", "embeddings_project"), "encoder.layer"),
    )


def pooled(module: Any, inputs: Tensors) -> Output:
    """Classify texts from the pooled first token. A `Forward` of `module` and `inputs`."""
    out = module.base_model(**inputs)
    return Output(module.classifier(head_dropout(module, out.pooler_output)), out.last_hidden_state[:, 0])


def all_tokens(module: Any, inputs: Tensors) -> Output:
    """Pass all tokens to the head. A text classification head selects the first token itself.

    A `Forward` of `module` and `inputs`.
    """
    state = module.base_model(**inputs).last_hidden_state  # (example, token, width)
    return Output(module.classifier(head_dropout(module, state)), state[:, 0])


def from_mean(module: Any, inputs: Tensors) -> Output:
    """Classify texts from the mean of all tokens that are not padding. A `Forward` of `module` and `inputs`."""
    return _classify(module, _mean(module, inputs))


def from_unit_mean(module: Any, inputs: Tensors) -> Output:
    """Classify texts from that mean, scaled to a length of one. A `Forward` of `module` and `inputs`."""
    return _classify(module, torch.nn.functional.normalize(_mean(module, inputs), dim=-1))


def _classify(module: Any, features: torch.Tensor) -> Output:
    if isinstance(module.classifier, torch.nn.Linear):
        return Output(module.classifier(head_dropout(module, features)), features)
    return Output(module.classifier(features.unsqueeze(-2)), features)  # RoBERTa's head selects the first token


def _mean(module: Any, inputs: Tensors) -> torch.Tensor:
    """Return the mean over the tokens that are not padding, (example, width)."""
    states = module.base_model(**inputs).last_hidden_state  # (example, token, width)
    attention_mask = inputs.get("attention_mask")
    if attention_mask is None:
        return states.mean(-2)
    weights = attention_mask.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(-2) / weights.sum(-2).clamp(min=1)


def _through_relu(module: Any, inputs: Tensors) -> Output:
    features = module.base_model(**inputs).last_hidden_state[:, 0]  # first token of (example, token, width)
    return _relu_head(module, features)


def _mean_through_relu(module: Any, inputs: Tensors) -> Output:
    return _relu_head(module, _mean(module, inputs))


def _unit_mean_through_relu(module: Any, inputs: Tensors) -> Output:
    return _relu_head(module, torch.nn.functional.normalize(_mean(module, inputs), dim=-1))


def _relu_head(module: Any, features: torch.Tensor) -> Output:
    hidden = torch.nn.functional.relu(module.pre_classifier(features))
    return Output(module.classifier(head_dropout(module, hidden)), features)


DISTILBERT = Architecture(
    roles=(
        *tag_rules(r"distilbert\.", _EMBEDDINGS),
        *tag_rules(
            r"distilbert\.transformer\.layer\.(?P<layer>\d+)\.",
            {
                r"attention\.q_lin\..+": "query",
                r"attention\.k_lin\..+": "key",
                r"attention\.v_lin\..+": "value",
                r"attention\.out_lin\..+": "output",
                r"ffn\..+": "mlp",
                r"(sa|output)_layer_norm\..+": "norm",
            },
        ),
        *_HEADS,
    ),
    heads={"text": _through_relu, "tokens": all_tokens},
    pooling={"mean": _mean_through_relu, "unit_mean": _unit_mean_through_relu},
    start=InputSide("input_ids", ("embeddings",), "transformer.layer"),
)
