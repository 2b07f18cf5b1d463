"""Small models of every architecture, with inputs, targets and federations for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor

from partita.core.data import IGNORE_INDEX, Batch, ClientData
from partita.core.rng import Key, seeded
from partita.core.tensors import Tensors
from partita.models.architectures import ARCHITECTURES
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.tasks import KINDS, TaskKind

CLASSES, WORDS, PAD, END, TOKENS, EXAMPLES, LAYERS = 3, 20, 1, 19, 6, 4, 2
SIZES = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 24}
IMAGES = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1}
TEXTS = {**SIZES, "vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": END, "eos_token_id": END}
ENCODER = {**TEXTS, "max_position_embeddings": 12}
DECODER = {**TEXTS, "num_key_value_heads": 1, "max_position_embeddings": 12}
SUFFIX = {
    "image": "ForImageClassification",
    "text": "ForSequenceClassification",
    "tokens": "ForTokenClassification",
    "lm": "ForCausalLM",
}
# By model type: the prefix of transformers' classes, and the options of a tiny config.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", IMAGES),
    "deit": ("DeiT", IMAGES),
    "dinov2": ("Dinov2", {**IMAGES, "mlp_ratio": 2}),
    "dinov2_with_registers": ("Dinov2WithRegisters", {**IMAGES, "mlp_ratio": 2, "num_register_tokens": 2}),
    "bert": ("Bert", ENCODER),
    "roberta": ("Roberta", ENCODER),
    "electra": ("Electra", {**ENCODER, "embedding_size": 8}),
    "distilbert": (
        "DistilBert",
        {"vocab_size": WORDS, "pad_token_id": PAD, "dim": 16, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": 24}
        | {"max_position_embeddings": 12},
    ),
    "gpt2": ("GPT2", {**TEXTS, "n_positions": 12}),
    "llama": ("Llama", DECODER),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 3}),
    "qwen2": ("Qwen2", {**DECODER, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**DECODER, "head_dim": 8, "tie_word_embeddings": True}),
    "clip": ("CLIP", {"text_config": {**ENCODER}, "vision_config": IMAGES, "projection_dim": 8}),
}
CASE_NAMES = [f"{name}-{kind}" for name, row in ARCHITECTURES.items() for kind in row.heads] + ["clip-towers"]
SLOW_CASES = [f"{name}-{kind}" for name in ("mistral", "qwen2", "qwen3") for kind in ("text", "tokens")]
SLOW_CASES += ["roberta-tokens", "electra-tokens"]  # body and head are each covered by another case


@dataclass(frozen=True)
class Case:
    model: FunctionalModel
    params: Tensors
    plain: Any  # the same weights in transformers, with eager attention
    kind: TaskKind

    @property
    def each_token(self) -> bool:
        return self.kind.head in ("tokens", "lm")


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def perturbed(params: Tensors, seed: int = 1) -> Tensors:
    """Parameters away from the initialization, whose zeros and ones hide mistakes."""
    return {name: value + 0.3 * noise(seed, *value.shape) for name, value in params.items()}


def kind_of(case: str) -> TaskKind:
    return KINDS["image" if case == "clip-towers" else case.partition("-")[2]]


def class_of(case: str) -> Any:
    name, _, kind = case.partition("-")
    if case in ("clip-towers", "gpt2-lm"):
        return transformers.CLIPModel if kind == "towers" else transformers.GPT2LMHeadModel
    return getattr(transformers, TINY[name][0] + SUFFIX[kind])


def module_of(case: str, **options: Any) -> Any:
    stem, sizes = TINY[case.partition("-")[0]]
    config = getattr(transformers, f"{stem}Config")(**{**sizes, **options}, num_labels=CLASSES)
    with seeded(Key(0)):
        return class_of(case)(config).eval()


def make_model(
    case: str, frozen: tuple[str, ...] = (), sizes: dict[str, int] | None = None, **options: Any
) -> FunctionalModel:
    fixed = class_texts() if case == "clip-towers" else None
    module = module_of(case, **(sizes or {}))
    return from_module(case, module, frozen, kind=kind_of(case), fixed=fixed, **options)


@cache
def make_case(case: str) -> Case:
    model = make_model(case)
    params = perturbed(model.initial)
    with TemporaryDirectory() as folder:
        model.save_pretrained(params, folder)
        plain = class_of(case).from_pretrained(folder, attn_implementation="eager").eval()
    return Case(model, params, plain, kind_of(case))


def random_texts(seed: int, left: bool = False) -> Tensors:
    """Texts of all lengths, padded on one side."""
    ids = torch.randint(PAD + 1, END, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(seed))
    lengths = torch.tensor([TOKENS, 3, 1, 4]).roll(seed)
    mask = torch.arange(TOKENS) < lengths[:, None]
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long()}


def class_texts() -> Tensors:
    """The texts of three classes, each with its end token."""
    ids = torch.tensor([[2, 3, END, PAD], [4, END, PAD, PAD], [5, 6, 7, END]])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def inputs_of(case: Case, seed: int = 0, left: bool = False) -> Tensors:
    return {"pixel_values": noise(seed, EXAMPLES, 1, 8, 8)} if case.kind.inputs == "image" else random_texts(seed, left)


def targets_of(case: Case, seed: int = 0) -> Tensor:
    drawn = torch.randint(0, CLASSES, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(seed + 9))
    return drawn.where(random_texts(seed)["attention_mask"] == 1, IGNORE_INDEX) if case.each_token else drawn[:, 0]


@dataclass(frozen=True)
class TensorExamples:
    inputs: Tensors
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> Batch:
        return Batch({name: value[indices] for name, value in self.inputs.items()}, self.targets[indices])


class ThreeClients:
    """Three clients with four examples each."""

    clients = ("a", "b", "c")

    def __init__(self, it: Case) -> None:
        self.it = it

    def __getitem__(self, client: str) -> ClientData:
        seed = self.clients.index(client)
        part = TensorExamples(inputs_of(self.it, seed), targets_of(self.it, seed))
        return ClientData(part, part, part)
