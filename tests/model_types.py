"""Tiny random models of many types of transformers, and what is checked of each of them."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from helpers import final_params, play
from torch import Tensor
from torch.func import functional_call
from transformers import CONFIG_MAPPING, PreTrainedModel

from partita.core.data import IGNORE_INDEX, Batch, ClientData
from partita.core.method import Method
from partita.core.model import layer_tags
from partita.core.rng import Key, seeded
from partita.core.settings import Run, Training
from partita.core.tensors import Tensors
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedper import fedper
from partita.models import split_qkv
from partita.models.functional import FunctionalModel, without_logs
from partita.models.hugging_face import from_module
from partita.tasks import KINDS

CLASSES, EXAMPLES, TOKENS, VOCABULARY, PAD, START, END, SIZE = 3, 4, 8, 32, 1, 2, 31, 16
# Options of a tiny config. Those that a type does not have are left out.
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "emb_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 24),
    **dict.fromkeys(("head_dim", "d_kv", "embedding_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts"), 2),
    "hidden_dim": 24,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 1,
    "type_vocab_size": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "image_size": SIZE,
    "patch_size": 4,
    "drop_path_rate": 0.0,
}
WINDOWS = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "num_attention_heads": None}
WINDOWS |= {"num_hidden_layers": None, "num_layers": None, "hidden_size": None}
TOWERS = {
    name: {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, **own}
    for name, own in {
        "vision_config": {"image_size": SIZE, "patch_size": 4},
        "text_config": {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS},
    }.items()
}
# By kind of task: the model types.
TYPES = {
    "text": """
        albert bart bert big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert electra
        ernie eurobert fnet gte ibert jina_embeddings_v3 layoutlm longformer mbart megatron-bert mobilebert
        modernbert mpnet mt5 mvp nomic_bert nystromformer plbart rembert roberta roberta-prelayernorm roformer tapas
        umt5 xlm xlm-roberta xlm-roberta-xl esm luke squeezebert t5 xlnet
    """,
    "image": """
        beit data2vec-vision deit dinov2 dinov2_with_registers ijepa vit clip convnext convnextv2 focalnet
        poolformer segformer siglip swin swinv2 vit_msn
    """,
    "lm": """
        apertus arcee biogpt bitnet bloom cohere cohere2 ctrl ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4
        gpt2 gpt_bigcode gpt_neox gpt_oss granite granitemoe helium llama modernbert-decoder
        ministral mistral mixtral mpt
        nemotron olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
        qwen3_moe seed_oss smollm3 stablelm starcoder2 xglm falcon gpt_neo gptj mamba rwkv
    """,
}
# By model type: the options that differ from TINY.
OPTIONS: dict[str, dict[str, Any]] = {
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "squeezebert": {"embedding_size": 16},
    "t5": {"decoder_start_token_id": START},
    "xlnet": {"d_head": 8, "d_inner": 24, "max_position_embeddings": None},
    "clip": TOWERS,
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "focalnet": {"embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [1, 1]}
    | {"focal_windows": [3, 3]},
    "poolformer": {"hidden_sizes": [8, 16], "depths": [1, 1], "patch_sizes": [3, 3], "strides": [2, 2]}
    | {"padding": [1, 1], "num_encoder_blocks": 2, "mlp_ratio": 2.0},
    "segformer": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
    | {"patch_sizes": [3, 3], "strides": [2, 2], "num_encoder_blocks": 2, "mlp_ratios": [2, 2]},
    "siglip": TOWERS,
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "falcon": {"head_dim": None, "new_decoder_architecture": False},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gptj": {"rotary_dim": 4},
}
CASES = [f"{model_type}-{kind}" for kind, types in TYPES.items() for model_type in types.split()]


@dataclass(frozen=True)
class Checked:
    """What was found of a type."""

    model_type: str
    kind: str
    layers: int
    roles: tuple[str, ...]  # the roles that parameters have, in the order of ROLES, "other" last
    one_by_one: str  # why clients train one at a time; "" if they train in blocks
    dropout: bool  # whether all its dropout is drawn by example; False: some drops nothing
    attention: bool  # whether attention depends only on query and key; False if the module returns no maps

    def to_markdown(self) -> str:
        """Return the row of the table in docs/reference/models.md."""
        missing = [role for role in ("query", "key", "value", "output", "mlp") if role not in self.roles]
        roles = "all" if not missing else f"without {', '.join(missing)}"
        roles += ", other" if "other" in self.roles else ""
        blocks = "one at a time" if self.one_by_one else "in blocks"
        scores = "yes" if self.attention else "–"
        dropout = "yes" if self.dropout else "in part"
        return f"| `{self.model_type}` | {self.kind} | {self.layers} | {roles} | {scores} | {blocks} | {dropout} |"


def module_of(case: str) -> PreTrainedModel:
    """Build a tiny random module."""
    model_type, _, kind = case.rpartition("-")
    make, own = CONFIG_MAPPING[model_type], OPTIONS.get(model_type, {})
    known = {field for field in TINY if hasattr(make(), field)} if "vision_config" not in own else set()
    options = {**{field: TINY[field] for field in known}, **own}
    config = make(**{field: value for field, value in options.items() if value is not None})
    config.num_labels = CLASSES
    config.pad_token_id, config.architectures = PAD, []
    auto_class = getattr(transformers, KINDS[kind].auto_class)
    with seeded(Key(0)), without_logs():
        module: PreTrainedModel = auto_class.from_config(config).eval()
    return module


def inputs_of(kind: str, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    if KINDS[kind].inputs == "image":
        return {"pixel_values": torch.randn(EXAMPLES, 3, SIZE, SIZE, generator=generator)}
    ids = torch.randint(4, END, (EXAMPLES, TOKENS), generator=generator)
    ids[:, -1] = END  # BART reads the class from the end token
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def targets_of(kind: str, seed: int = 0) -> Tensor:
    if kind == "lm":
        ids = inputs_of(kind, seed)["input_ids"]
        return torch.cat([ids[:, 1:], torch.full((EXAMPLES, 1), IGNORE_INDEX)], 1)
    return torch.randint(0, CLASSES, (EXAMPLES,), generator=torch.Generator().manual_seed(seed + 9))


class TwoClients:
    """Two clients with four examples each."""

    clients = ("a", "b")

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getitem__(self, client: str) -> ClientData:
        part = _Examples(self.kind, self.clients.index(client))
        return ClientData(part, part, part)


@dataclass(frozen=True)
class _Examples:
    kind: str
    seed: int

    def __len__(self) -> int:
        return EXAMPLES

    def take(self, indices: Tensor) -> Batch:
        inputs = {name: value[indices] for name, value in inputs_of(self.kind, self.seed).items()}
        return Batch(inputs, targets_of(self.kind, self.seed)[indices])


def perturbed(params: Tensors) -> Tensors:
    """Parameters away from the initialization, whose zeros and ones hide mistakes."""
    noise = {name: torch.randn(value.shape, generator=(Key(1) / name).generator()) for name, value in params.items()}
    return {name: value + 0.1 * noise[name] for name, value in params.items()}


def check(case: str) -> Checked:
    """Check a type: outputs, one round, frozen parameters, blocks, saving and roles.

    Raises:
        AssertionError: If a check fails.
    """
    model_type, _, kind = case.rpartition("-")
    module, inputs = module_of(case), inputs_of(kind)
    model = from_module(model_type, module_of(case), kind=KINDS[kind])
    with torch.no_grad():
        plain, own = module(**inputs).logits, model(model.initial, inputs)
    assert close(own.logits, plain), (own.logits - plain).abs().max()
    reason = model.why_one_by_one(inputs)
    params = perturbed(model.initial)
    with TemporaryDirectory() as folder:
        plain = check_saved(model, params, type(module), Path(folder), inputs)
    dropout = draws_all(model, kind)
    check_round(model, kind, together=not reason)
    roles = {tag for tags in model.tags.values() for tag in tags}
    found = tuple(role for role in (*ROLE_ORDER, "other") if role in roles)
    attention = check_attention(model, params, plain, inputs)
    return Checked(model_type, kind, len(layer_tags(model)), found, reason, dropout, attention)


def draws_all(model: FunctionalModel, kind: str) -> bool:
    """Return whether a round with the dropout of the model's config leaves none of it out."""
    run = Run(fedper(), Training(lr=0.1, optimizer="sgd", batch_size=2), rounds=1, key=Key(3))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        play(run, model, TwoClients(kind))
    return not any("drop" in str(each.message) for each in seen)


ROLE_ORDER = ("query", "key", "value", "output", "mlp", "norm", "embedding", "head")


def check_saved(
    model: FunctionalModel, params: Tensors, kind: type[PreTrainedModel], folder: Path, inputs: Tensors
) -> PreTrainedModel:
    """The saved folder loads in plain transformers, with the same parameters bit for bit and the same outputs."""
    model.save_pretrained(params, folder)
    with without_logs():
        plain = kind.from_pretrained(folder, attn_implementation="eager").eval()
    joined, loaded = split_qkv.join(model.module, params), dict(plain.named_parameters())
    assert joined.keys() == loaded.keys(), joined.keys() ^ loaded.keys()
    assert all(torch.equal(joined[name], loaded[name]) for name in joined)
    with torch.no_grad():
        assert close(model(params, inputs).logits, plain(**inputs).logits)
    return plain


def check_round(model: FunctionalModel, kind: str, together: bool) -> None:
    """One round trains everything that the plan trains, and leaves what it freezes bit for bit as it was."""
    has_kernel = {"query", "key"} <= {tag for tags in model.tags.values() for tag in tags}
    method: Method = fedfrozen(warmup=0) if has_kernel else fedper()
    run = Run(method, Training(lr=0.1, optimizer="sgd", batch_size=2), rounds=1, key=Key(3))
    after = final_params(play(run, model, TwoClients(kind)))
    frozen = model.names("query", "key") if has_kernel else model.names("head")  # of the server, in FedPer
    for name, value in model.initial.items():
        assert after[name].isfinite().all(), name
        assert torch.equal(after[name], value) or name not in frozen, name
    moved = [name for name in model.initial if not torch.equal(after[name], model.initial[name])]
    assert len(moved) > 0.5 * (len(model.initial) - len(frozen)), sorted(model.initial.keys() - {*moved} - frozen)
    if together:
        both = final_params(play(run, model, TwoClients(kind), block=2))
        for name, value in both.items():
            assert torch.allclose(value, after[name], rtol=1e-4, atol=1e-5), name


def check_attention(model: FunctionalModel, params: Tensors, plain: PreTrainedModel, inputs: Tensors) -> bool:
    """The attention of the last layer depends on no value, output or feed-forward parameter of its layer."""
    last = layer_tags(model)[-1]
    inside = [name for name, tags in model.tags.items() if last in tags]
    before = _last_map(model, params, plain, inputs)
    if model.name == "albert":  # all layers share their parameters, so each depends on all of them
        return False
    if before is None or not {"query", "key"} <= {tag for name in inside for tag in model.tags[name]}:
        return False
    for name in inside:
        changed = {**params, name: params[name] + 0.5 * torch.randn(params[name].shape, generator=Key(2).generator())}
        after = _last_map(model, changed, plain, inputs)
        assert after is not None
        if model.tags[name] & {"value", "output", "mlp"} and not re.search(CROSSES, name):
            assert torch.equal(after, before), name
        elif model.tags[name] & {"query", "key"} and name.endswith("weight") and not re.search(CROSSES, name):
            assert not torch.equal(after, before), name
    return True


CROSSES = r"(?i)encdec|encoder_attn|fc1|fc2"  # BART's decoder has no maps of cross-attention among `attentions`


def _last_map(model: FunctionalModel, params: Tensors, plain: PreTrainedModel, inputs: Tensors) -> Tensor | None:
    joined = split_qkv.join(model.module, params)
    try:
        with torch.no_grad():
            out = functional_call(plain, joined, kwargs={**inputs, "output_attentions": True})
    except (TypeError, ValueError, AttributeError):  # the type has no attention maps
        return None
    maps = getattr(out, "attentions", None) or getattr(out, "decoder_attentions", None)
    return maps[-1] if maps is not None and len(maps) and maps[-1] is not None else None


def close(left: Tensor, right: Tensor) -> bool:
    """Relative to the largest number if it exceeds 1."""
    return torch.allclose(left, right, rtol=0, atol=1e-5 * max(1.0, float(right.abs().max())))
