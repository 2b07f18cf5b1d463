"""The model adapter against transformers: outputs, gradients, tags, folders, and blocks of clients."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import no_vmap_fallback
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn import functional
from transformers import (
    AttentionMaskInterface,
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from partita.core import tensors
from partita.core.memory import SizeError
from partita.core.model import TagError
from partita.core.rng import Key, seeded
from partita.core.tensors import Tensors
from partita.models import INDEX, ModelError, architectures, attention, build
from partita.models.architectures import ROLES, Architecture, table_tags
from partita.models.attention import ALIGNMENT, attention_hook, scaled_dot_product
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.models.plain import hand_over_module
from partita.models.pretrained import pretrained
from partita.models.vit import vit
from partita.tasks import IMAGE, LM, MULTI_LABEL_TEXT, TEXT, TaskKind
from partita.tasks import TOKENS as TAGGED


@dataclass(frozen=True)
class Images:
    classes: tuple[str, ...] = ("cat", "dog", "emu")
    channels: int = 1
    size: int = 4
    kind: TaskKind = IMAGE
    vocabulary_size: int = 0
    max_tokens: int = 0
    packed: bool = False
    tokenizer: Any = None
    normalization: Any = None


TASK, KEY = Images(), Key(7) / "model"
CLIENTS, EXAMPLES, TOKENS = 3, 5, 5


def small_vit(task: Images = TASK, key: Key = KEY, **options: object) -> FunctionalModel:
    return vit(task, key, **{"layers": 2, "width": 16, "heads": 2, **options})  # type: ignore[arg-type]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_images(seed: int = 0) -> Tensors:
    return {"pixel_values": noise(seed, EXAMPLES, TASK.channels, TASK.size, TASK.size)}


def perturbed(params: Tensors, seed: int = 1) -> Tensors:
    """Parameters away from the initialization, whose zeros and ones hide mistakes."""
    return {name: value + 0.3 * noise(seed, *value.shape) for name, value in params.items()}


def transformers_vit(model: FunctionalModel, params: Tensors, attention: str = "eager") -> ViTForImageClassification:
    """A transformers model with the same weights."""
    config = ViTConfig(**{**model.module.config.to_dict(), "attn_implementation": attention})
    with torch.random.fork_rng(devices=[]):
        module = ViTForImageClassification(config).eval()
    module.load_state_dict(params)
    return module


def stack_params(params: list[Tensors]) -> Tensors:
    return {name: torch.stack([tree[name] for tree in params]) for name in params[0]}


def close(left: Tensor, right: Tensor, tolerance: float = 1e-6) -> bool:
    return torch.allclose(left, right, rtol=0, atol=tolerance)


# Outputs, losses and gradients


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_vit_outputs_match_transformers(attention: str) -> None:
    model = small_vit()
    params, inputs = perturbed(model.initial), random_images()
    module = transformers_vit(model, params, attention)
    out = model(params, inputs)
    assert close(out.logits, module(**inputs).logits)
    assert out.features is not None
    assert close(out.features, module.vit(**inputs).last_hidden_state[:, 0])
    assert out.logits.std() > 0.1


def test_mean_of_example_losses_matches_transformers() -> None:
    model = small_vit()
    params, inputs, targets = perturbed(model.initial), random_images(), torch.tensor([0, 1, 2, 1, 0])
    losses = model.losses(model(params, inputs), targets)
    assert losses.shape == (EXAMPLES,)
    assert close(losses.mean(), transformers_vit(model, params)(**inputs, labels=targets).loss)


def test_gradients_match_transformers() -> None:
    model = small_vit()
    params, inputs, targets = perturbed(model.initial), random_images(), torch.tensor([0, 1, 2, 1, 0])
    module = transformers_vit(model, params, "sdpa")
    module(**inputs, labels=targets).loss.backward()
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = model.losses(model(leaves, inputs), targets).mean()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert close(grads[name], parameter.grad), name


def test_vit_has_the_initial_weights_and_the_results_of_transformers() -> None:
    model = small_vit(layers=3)
    with seeded(KEY):
        reference = ViTForImageClassification(ViTConfig(**model.module.config.to_dict())).eval()
    wanted = reference.state_dict()
    assert list(model.initial) == list(wanted)
    assert all(torch.equal(model.initial[name], value) for name, value in wanted.items())
    with torch.no_grad():
        assert torch.equal(model(model.initial, random_images()).logits, reference(**random_images()).logits)


def test_call_changes_neither_parameters_nor_module() -> None:
    model = small_vit(frozen=("embedding",))
    before, held = tensors.digest(model.initial), dict(model.module.named_parameters())
    first = model(model.initial, random_images()).logits
    model(perturbed(model.initial), random_images())
    with pytest.raises(ValueError, match="image size"):
        model(model.initial, {"pixel_values": torch.zeros(1, 1, 2, 2)})
    assert torch.equal(model(model.initial, random_images()).logits, first)
    assert tensors.digest(model.initial) == before
    assert {name: id(value) for name, value in model.module.named_parameters()} == {n: id(v) for n, v in held.items()}
    assert set(held) == set(small_vit().initial) - model.all_names()


@pytest.mark.parametrize(("change", "message"), [("drop", "missing: classifier.bias"), ("add", "unknown: extra")])
def test_call_with_missing_or_unknown_names_is_refused(change: str, message: str) -> None:
    model = small_vit()
    params = dict(model.initial)
    if change == "drop":
        del params["classifier.bias"]
    else:
        params["extra"] = torch.zeros(1)
    with pytest.raises(ModelError, match=message):
        model(params, random_images())


def test_tied_weights_are_one_parameter_in_two_places() -> None:
    def tied(params: Tensors) -> ViTForImageClassification:
        module = transformers_vit(small_vit(), params)
        module.vit.layers[1].mlp.fc1.weight = module.vit.layers[0].mlp.fc1.weight
        return module

    model = from_module("tied", tied(small_vit().initial))
    assert "vit.layers.1.mlp.fc1.weight" not in model.all_names()
    params = perturbed(small_vit().initial)
    out = model(tensors.select(params, model.all_names()), random_images())
    assert close(out.logits, tied(params)(**random_images()).logits)


def test_dropout_is_off_without_seeds() -> None:
    model = small_vit()
    params = perturbed(model.initial)
    config = ViTConfig(
        **model.module.config.to_dict() | {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    )
    with torch.random.fork_rng(devices=[]):
        dropping = from_module("dropping", ViTForImageClassification(config).train())
    state = torch.get_rng_state()
    assert torch.equal(dropping(params, random_images()).logits, model(params, random_images()).logits)
    assert torch.equal(torch.get_rng_state(), state)
    plain = from_module("plain", ViTForImageClassification(ViTConfig(**model.module.config.to_dict())))
    plain.module.train()
    plain.module.vit.layers[0].attention.attention_dropout = 0.5  # type: ignore[union-attr, index]
    with pytest.raises(ModelError, match=r"attention dropout 0.5.*eval mode"):
        plain(params, random_images())


# Tags


def test_vit_has_one_role_per_parameter_and_numbered_layers() -> None:
    model = small_vit(layers=3)
    by_role = {role: model.names(role) for role in ROLES}
    assert sum(map(len, by_role.values())) == len(model.all_names())
    assert frozenset().union(*by_role.values()) == model.all_names() == model.tags.keys()
    layers = [model.names(f"layer.{index}") for index in range(3)]
    assert [len(names) for names in layers] == [16, 16, 16]
    assert model.all_names() - layers[0] - layers[1] - layers[2] == (
        by_role["embedding"] | by_role["head"] | {"vit.layernorm.weight", "vit.layernorm.bias"}
    )
    with pytest.raises(TagError, match="Did you mean 'query'"):
        model.names("querry")


def test_attention_depends_only_on_tagged_parameters() -> None:
    """A layer's attention depends on its query, key and the norm before them, and on all that lies before the layer."""
    model = small_vit()
    params, inputs = perturbed(model.initial), random_images()

    def attentions(changed: Tensors) -> tuple[Tensor, ...]:  # by layer, each (example, head, query, key)
        return transformers_vit(model, changed)(**inputs, output_attentions=True).attentions

    with torch.no_grad():
        before = attentions(params)
        for name, tags in model.tags.items():
            after = attentions({**params, name: params[name] + 0.3 * noise(2, *params[name].shape)})
            for layer in range(2):
                own = f"layer.{layer}" in tags and (not tags.isdisjoint(("query", "key")) or "layernorm_before" in name)
                earlier = "embedding" in tags or (layer == 1 and "layer.0" in tags)
                if name in model.names("key") and name.endswith("bias"):
                    # It adds the same to all scores of a query, which softmax cancels.
                    assert close(after[layer], before[layer]), (name, layer)
                elif own or earlier:
                    assert not close(after[layer], before[layer], 1e-4), (name, layer)
                else:
                    assert torch.equal(after[layer], before[layer]), (name, layer)


def test_unknown_parameter_of_a_table_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"'vit.novel.weight' of 'vit'.*gives it nothing; add or correct its row"):
        table_tags("vit", ["vit.novel.weight"])
    twice = Architecture(((".*", "mlp"), ("a", "norm")), {})
    odd = Architecture((("a", "wheel"),), {})
    monkeypatch.setattr(architectures, "ARCHITECTURES", {"twice": twice, "odd": odd})
    with pytest.raises(ModelError, match=r"'a' of 'twice'.*gives it 'mlp', 'norm'"):
        table_tags("twice", ["a"])
    with pytest.raises(ModelError, match=r"'a' of 'odd'.*gives it 'wheel'"):
        table_tags("odd", ["a"])


# Keys


def test_initialization_depends_only_on_the_key(tmp_path: Path) -> None:
    small_vit(Images(classes=("a", "b"))).save_pretrained(small_vit(Images(classes=("a", "b"))).initial, tmp_path)

    def states() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]

    for make in (small_vit, lambda key=KEY: pretrained(TASK, key, path=str(tmp_path))):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            before = states()
            first = make()
            assert states() == before
            torch.manual_seed(2)
            again = make()
        assert tensors.equal(first.initial, again.initial)
        other = make(key=Key(8) / "model")
        assert not torch.equal(first.initial["classifier.weight"], other.initial["classifier.weight"])


# Frozen


def test_frozen_parameters_stay_inside_the_module() -> None:
    whole, part = small_vit(), small_vit(frozen=["embedding", "layer.0", "classifier.bias"])
    inside = whole.names("embedding", "layer.0") | {"classifier.bias"}
    assert part.all_names() == part.tags.keys() == whole.all_names() - inside
    held = dict(part.module.named_parameters())
    assert held.keys() == inside
    assert not any(value.requires_grad for value in held.values())
    assert torch.equal(part(part.initial, random_images()).logits, whole(whole.initial, random_images()).logits)
    with pytest.raises(TagError, match="embedding"):
        part.names("embedding")
    part.to(torch.device("cpu"))
    assert torch.equal(part(part.initial, random_images()).logits, whole(whole.initial, random_images()).logits)


def test_frozen_weights_are_saved_with_the_rest(tmp_path: Path) -> None:
    model = small_vit(frozen=["query", "key"])
    params = perturbed(model.initial)
    model.save_pretrained(params, tmp_path)
    loaded = ViTForImageClassification.from_pretrained(tmp_path)
    assert close(loaded(**random_images()).logits, model(params, random_images()).logits)


@pytest.mark.parametrize(
    ("frozen", "message"),
    [(["querry"], "tagged 'querry'; did you mean 'query'"), (ROLES, "no parameter of vit is left")],
)
def test_invalid_frozen_tags_are_refused(frozen: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        small_vit(frozen=frozen)


# Folders


def test_saved_folder_loads_in_transformers_and_back_bit_for_bit(tmp_path: Path) -> None:
    model = small_vit()
    params = perturbed(model.initial)
    model.save_pretrained(params, tmp_path)
    assert "partita" not in (tmp_path / "config.json").read_text()
    loaded = ViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded(**random_images()).logits, model(params, random_images()).logits)
    assert loaded.config.id2label == {0: "cat", 1: "dog", 2: "emu"}
    again = build("pretrained", TASK, KEY, path=str(tmp_path))
    assert tensors.equal(again.initial, params)
    assert again.tags == model.tags


def test_head_is_new_only_when_classes_differ_or_on_request(tmp_path: Path) -> None:
    params = perturbed(small_vit().initial)
    small_vit().save_pretrained(params, tmp_path)
    body = params.keys() - small_vit().names("head")
    other = pretrained(Images(classes=("a", "b")), KEY, path=str(tmp_path))
    fresh = pretrained(TASK, KEY, path=str(tmp_path), fresh_head=True)
    for model, classes in ((other, 2), (fresh, 3)):
        assert tensors.equal(tensors.select(model.initial, body), tensors.select(params, body))
        assert model.initial["classifier.weight"].shape == (classes, 16)
        assert model.initial["classifier.weight"].abs().max() < 0.1
        assert model.initial["classifier.bias"].abs().max() == 0


def test_checkpoint_without_a_head_gets_a_new_one(tmp_path: Path) -> None:
    model = small_vit()
    body = transformers_vit(model, perturbed(model.initial)).vit
    backbone = ViTModel(body.config)
    backbone.load_state_dict(body.state_dict(), strict=False)
    backbone.save_pretrained(tmp_path)
    loaded = pretrained(TASK, KEY, path=str(tmp_path))
    assert torch.equal(loaded.initial["vit.layernorm.weight"], body.layernorm.weight)
    asked_for = pretrained(TASK, KEY, path=str(tmp_path), fresh_head=True)
    assert torch.equal(loaded.initial["classifier.weight"], asked_for.initial["classifier.weight"])


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, changes: Tensors, drop: str = "") -> None:
    file = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if not drop or not name.endswith(drop)}
    save_file({**kept, **changes}, file, metadata={"format": "pt"})


def break_folder(folder: Path, fault: str) -> Images:
    if fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "no weights":
        (folder / "model.safetensors").unlink()
    elif fault == "unreadable":
        edit_config(folder, model_type="nonsense")
    elif fault == "other type":
        BertConfig().save_pretrained(folder)
    elif fault == "other head":
        T5Config().save_pretrained(folder)
    elif fault == "missing":
        edit_weights(folder, {}, drop="layernorm.weight")
    elif fault == "unexpected":
        edit_weights(folder, {"vit.novel": torch.zeros(1)})
    elif fault == "shape":
        edit_weights(folder, {"vit.layernorm.weight": torch.zeros(3)})
    elif fault == "size":
        return Images(size=8)
    elif fault == "channels":
        return Images(channels=3)
    return TASK


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no config", "has no config.json; give a folder written by save_pretrained"),
        ("no weights", r"has no weights that can be loaded: .*model.safetensors"),
        ("unreadable", r"has a model type that transformers \S+ does not know: .*nonsense.*; upgrade transformers, or"),
        ("other type", "supports 'bert' for tasks of kind text or tokens, not image; choose another model"),
        ("other head", "is a 't5', for which transformers has no AutoModelForImageClassification.* tasks of kind text"),
        ("missing", "lacks: vit.layernorm.weight;"),
        ("unexpected", "has, but this model does not have: vit.novel;"),
        ("shape", "has with another shape: vit.layernorm.weight;"),
        ("size", "takes images of size 4, but the task's images have size 8; resize the task's images to 4"),
        ("channels", "takes images with 1 channels, but the task's have 3; load the task's images with 1"),
    ],
)
def test_faulty_model_folder_is_refused_with_a_remedy(fault: str, message: str, tmp_path: Path) -> None:
    small_vit().save_pretrained(small_vit().initial, tmp_path)
    task = break_folder(tmp_path, fault)
    with pytest.raises(ModelError, match=message) as caught:
        pretrained(task, KEY, path=str(tmp_path))
    assert "type" in fault or str(tmp_path) in str(caught.value)


def test_model_too_large_for_memory_is_refused_before_allocation(tmp_path: Path) -> None:
    small_vit().save_pretrained(small_vit().initial, tmp_path)
    edit_config(tmp_path, intermediate_size=10**12)
    with pytest.raises(SizeError, match=r"the model of '.*' in float32 would take .* TB, but .* are free; choose a sm"):
        pretrained(TASK, KEY, path=str(tmp_path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "there is no folder './nowhere'"),
        (
            "nobody/nothing",
            "there is no folder 'nobody/nothing' here, no model .* earlier, and HF_HUB_OFFLINE is set; give a folder",
        ),
    ],
)
def test_missing_model_folder_is_refused(path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        pretrained(TASK, KEY, path=path)


# Other kinds of task


@dataclass(frozen=True)
class Texts(Images):
    channels: int = 0
    size: int = 0
    kind: TaskKind = TEXT


TINY_TEXT = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "intermediate_size": 16, "max_position_embeddings": 8, "bos_token_id": 8, "eos_token_id": 8
}  # fmt: skip
WORDS = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 8]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}


def save_random(module: type, config: PreTrainedConfig, folder: Path) -> str:
    with seeded(KEY):
        module(config).save_pretrained(folder)
    return str(folder)


def test_tokens_outside_the_model_vocabulary_are_refused(tmp_path: Path) -> None:
    path = save_random(GPT2LMHeadModel, GPT2Config(**TINY_TEXT), tmp_path)
    pretrained(Texts(vocabulary_size=9), KEY, path=path)
    with pytest.raises(ModelError, match=r"contain token 9, but .* has 9 tokens, 0 to 8; remove data.tokenizer"):
        pretrained(Texts(vocabulary_size=10), KEY, path=path)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("task", "shape"),
    [
        (Texts(), (2, 3)),
        (Texts(kind=MULTI_LABEL_TEXT), (2, 3)),
        (Texts(kind=TAGGED), (2, 3, 3)),
        (Texts(kind=LM, classes=()), (2, 3, 9)),
    ],
)
def test_one_checkpoint_loads_for_every_kind_of_task(task: Texts, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Written by transformers for one task and read for another: the body stays, the head is drawn from the key."""
    path = save_random(GPT2LMHeadModel, GPT2Config(**TINY_TEXT), tmp_path)
    model = pretrained(task, KEY, path=path, frozen=("embedding",), checkpointing=True)
    body = load_file(tmp_path / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(model.initial["transformer.h.0.attn.c_attn.key.weight"], body[:, 16:32])
    assert model.kind is task.kind
    assert model(model.initial, WORDS).logits.shape == shape
    assert "transformer.wte.weight" not in model.initial
    again = pretrained(task, KEY, path=path, frozen=("embedding",))
    assert tensors.equal(model.initial, again.initial)
    if task.kind is LM:
        return
    head = min(model.names("head"))
    other = pretrained(task, Key(8), path=path)
    assert torch.equal(other.initial[head], model.initial[head]) == head.endswith("bias")
    params = perturbed(model.initial)
    model.save_pretrained(params, tmp_path / "tuned")
    tuned = pretrained(task, Key(8), path=str(tmp_path / "tuned"))
    assert tensors.equal(tensors.select(tuned.initial, model.all_names()), tensors.select(params, model.all_names()))
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog", "2": "emu"}
    assert config.get("problem_type") == task.kind.problem_type


def test_tuned_decoder_works_in_transformers(tmp_path: Path) -> None:
    """Transformers accepts a batch of texts only if the config names a padding token."""
    path = save_random(GPT2LMHeadModel, GPT2Config(**TINY_TEXT), tmp_path)
    model = pretrained(Texts(), KEY, path=path)
    params = perturbed(model.initial)
    model.save_pretrained(params, tmp_path / "tuned")
    plain = GPT2ForSequenceClassification.from_pretrained(tmp_path / "tuned").eval()
    assert close(plain(**WORDS).logits, model(params, WORDS).logits)


def test_pretraining_heads_are_dropped_and_missing_weights_refused(tmp_path: Path) -> None:
    path = save_random(BertForMaskedLM, BertConfig(**TINY_TEXT), tmp_path)
    model = pretrained(Texts(), KEY, path=path)  # its prediction head is dropped, its pooler and head are new
    assert model.initial["bert.pooler.dense.weight"].abs().max() < 0.2
    with pytest.raises(ModelError, match="supports 'bert' for tasks of kind text or tokens, not lm"):
        pretrained(Texts(kind=LM), KEY, path=path)
    save_random(GPT2Model, GPT2Config(**TINY_TEXT, tie_word_embeddings=False), tmp_path / "body")
    with pytest.raises(ModelError, match=r"lacks: lm_head\.weight; give a complete checkpoint"):
        pretrained(Texts(kind=LM), KEY, path=str(tmp_path / "body"))
    with pytest.raises(ModelError, match="fresh_head = true, but this model has no head"):
        pretrained(Texts(kind=LM), KEY, path=str(tmp_path / "body"), fresh_head=True)


def test_distilled_deit_gets_a_plain_head(tmp_path: Path) -> None:
    config = DeiTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=4,
                        patch_size=2, num_channels=1)  # fmt: skip
    path = save_random(DeiTForImageClassificationWithTeacher, config, tmp_path)
    model = pretrained(TASK, KEY, path=path)
    assert model(model.initial, random_images()).logits.shape == (EXAMPLES, 3)


def test_dinov2_accepts_image_sizes_divisible_by_its_patches(tmp_path: Path) -> None:
    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=1, image_size=8,
                          patch_size=2, num_channels=1)  # fmt: skip
    path = save_random(Dinov2ForImageClassification, config, tmp_path)
    model = pretrained(TASK, KEY, path=path)
    params, inputs = [perturbed(model.initial, seed) for seed in range(2)], random_images()
    with no_vmap_fallback():  # the position embeddings are interpolated under vmap too
        together = torch.vmap(lambda one: model(one, inputs).logits)(stack_params(params))
    assert close(together[1], model(params[1], inputs).logits, 1e-5)
    with pytest.raises(ModelError, match=r"into patches of 2, but the task's images have size 5; resize .* to 6"):
        pretrained(Images(size=5), KEY, path=path)


@pytest.mark.slow
def test_clip_compares_images_with_class_texts(tmp_path: Path) -> None:
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text_config = {**tower, "vocab_size": 8, "max_position_embeddings": 8, "eos_token_id": 1, "bos_token_id": 0}
    sight = {**tower, "image_size": 4, "patch_size": 2, "num_channels": 1}
    path = save_random(CLIPModel, CLIPConfig(text_config=text_config, vision_config=sight, projection_dim=8), tmp_path)
    with pytest.raises(
        ModelError, match="has no tokenizer, but class names need one; copy the files of the original model's"
    ):
        pretrained(TASK, KEY, path=path, prompt="a {}")
    vocabulary = ["<start>", "<end>", "<pad>", "a", "cat", "dog", "emu", "photo"]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 0), ("<end>", 1)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(path)
    model = pretrained(TASK, KEY, path=path, prompt="a photo {}", frozen=("text",))
    assert model.fixed["input_ids"].tolist() == [[0, 3, 7, 4, 1], [0, 3, 7, 5, 1], [0, 3, 7, 6, 1]]
    plain = CLIPModel.from_pretrained(path).eval()
    assert close(model(model.initial, random_images()).logits, plain(**random_images(), **model.fixed).logits_per_image)
    assert not any(name.startswith("text") for name in model.all_names())
    save_random(CLIPVisionModelWithProjection, CLIPVisionConfig(**sight, projection_dim=8), tmp_path / "tower")
    alone = pretrained(TASK, KEY, path=str(tmp_path / "tower"))
    held = load_file(tmp_path / "tower" / "model.safetensors")
    assert all(torch.equal(alone.initial[name], held[name]) for name in alone.names("vision"))
    assert alone(alone.initial, random_images()).logits.shape == (EXAMPLES, 3)
    with pytest.raises(ModelError, match=r"lacks: .*text_model"):
        pretrained(TASK, KEY, path=str(tmp_path / "tower"), prompt="a {}")
    for wrong in ("a photo", None):
        where = path if wrong else str(tmp_path / "vit")
        small_vit().save_pretrained(small_vit().initial, tmp_path / "vit")
        with pytest.raises(ModelError, match=r"it needs a 'clip' model, an image task with classes, and \{\} as"):
            pretrained(TASK, KEY, path=where, prompt=wrong or "a {}")


# Building by name


def test_every_model_in_the_index_can_be_built(tmp_path: Path) -> None:
    small_vit().save_pretrained(small_vit().initial, tmp_path)
    held = hand_over_module(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(TASK.channels * TASK.size**2, 3)))
    for name in set(INDEX) - {"trainer"}:  # the model of a Trainer, which runs it
        needed = {"pretrained": {"path": str(tmp_path)}, "clip": {"shape": "tiny"}, "module": {"path": held.name}}
        model = build(name, TASK, KEY, **needed.get(name, {}))
        assert model(model.initial, random_images()).logits.shape == (EXAMPLES, 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vitt", {}, "unknown model 'vitt'; did you mean 'vit'"),
        ("vit", {"layer": 3}, "unknown key 'model.layer'; did you mean 'layers'"),
        ("vit", {"task": 3}, "unknown key 'model.task'"),
        ("vit", {"width": "wide"}, "model.width is 'wide'; it must be a whole number"),
        ("pretrained", {}, "'model.path' is missing; it must be a text"),
        ("vit", {"width": 18, "heads": 4}, "width 18 is not divisible by 4 heads; use a width of 20"),
        ("vit", {"patch": 3}, "image size 4 is not divisible by patch size 3; use a patch of 1, 2, 4"),
        ("vit", {"layers": 0}, "model.layers is 0; it must be a whole number from 1 to 1,000"),
    ],
)
def test_invalid_model_options_are_refused_with_a_remedy(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, TASK, KEY, **options)


def test_image_model_refuses_a_task_without_images(tmp_path: Path) -> None:
    for name, options in (("vit", {}), ("pretrained", {"path": str(tmp_path)})):
        with pytest.raises(ModelError, match="this model needs square images"):
            build(name, Images(channels=0, size=0), KEY, **options)


def test_model_can_be_pickled() -> None:
    model = small_vit(frozen=["embedding"])
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(copy.initial, random_images()).logits, model(model.initial, random_images()).logits)


# Blocks of clients


def make_block() -> tuple[FunctionalModel, list[Tensors], Tensor, Tensor]:
    model = small_vit()
    inputs = torch.stack([random_images(client)["pixel_values"] for client in range(CLIENTS)])
    targets = torch.arange(CLIENTS * EXAMPLES).view(CLIENTS, EXAMPLES) % 3
    return model, [perturbed(model.initial, seed=client) for client in range(CLIENTS)], inputs, targets


def test_vit_block_matches_single_clients() -> None:
    model, params, inputs, targets = make_block()

    def losses(one: Tensors, pixels: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        out = model(one, {"pixel_values": pixels})
        return out.logits, model.losses(out, target)

    together = {name: value.requires_grad_() for name, value in stack_params(params).items()}
    with no_vmap_fallback():
        logits, loss = torch.vmap(losses)(together, inputs, targets)
        grads = torch.autograd.grad(loss.mean(1).sum(), list(together.values()))
    for client, one in enumerate(params):
        leaves = {name: value.clone().requires_grad_() for name, value in one.items()}
        alone_logits, alone = losses(leaves, inputs[client], targets[client])
        assert close(logits[client], alone_logits, 1e-5)
        assert close(loss[client], alone, 1e-5)
        for name, lifted, own in zip(
            together, grads, torch.autograd.grad(alone.mean(), list(leaves.values())), strict=True
        ):
            assert close(lifted[client], own, 1e-5), name


def test_block_can_share_parameters_that_are_not_stacked() -> None:
    model, params, inputs, _ = make_block()
    body = {name: value for name, value in params[0].items() if name not in model.names("head")}
    heads = stack_params([tensors.select(one, model.names("head")) for one in params])

    def logits(head: Tensors, pixels: Tensor) -> Tensor:
        return model({**body, **head}, {"pixel_values": pixels}).logits

    with no_vmap_fallback():
        lifted = torch.vmap(lambda head, pixels: model({**body, **head}, {"pixel_values": pixels}).logits)(
            heads, inputs
        )
    for client, one in enumerate(params):
        assert close(lifted[client], logits(tensors.select(one, model.names("head")), inputs[client]), 1e-5)


def test_per_example_gradients_need_no_vmap_fallback_on_a_vit() -> None:
    model, (params, *_), inputs, targets = make_block()

    def loss(one: Tensors, pixels: Tensor, target: Tensor) -> Tensor:
        return model.losses(model(one, {"pixel_values": pixels[None]}), target[None])[0]

    with no_vmap_fallback():
        lifted = torch.vmap(torch.func.grad(loss), (None, 0, 0))(params, inputs[0], targets[0])
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    for example in range(EXAMPLES):
        own = torch.autograd.grad(loss(leaves, inputs[0, example], targets[0, example]), list(leaves.values()))
        for name, grad in zip(leaves, own, strict=True):
            assert close(lifted[name][example], grad, 1e-5), name


def test_masked_tokens_are_ignored_in_a_block_and_alone() -> None:
    drawn, params, inputs, _ = make_block()
    model = from_module("vit", transformers_vit(drawn, drawn.initial))
    mask = noise(5, CLIENTS, EXAMPLES, TOKENS) > -0.5  # (client, example, token)
    mask[:, :, 0] = True

    def logits(one: Tensors, pixels: Tensor, seen: Tensor) -> Tensor:
        return model(one, {"pixel_values": pixels, "attention_mask": seen}).logits

    with no_vmap_fallback():
        lifted = torch.vmap(logits)(stack_params(params), inputs, mask)
    for client, one in enumerate(params):
        facts = {"pixel_values": inputs[client], "attention_mask": mask[client]}
        reference = transformers_vit(model, one)(**facts).logits
        assert close(model(one, facts).logits, reference)
        assert close(lifted[client], reference, 1e-5)
        assert not close(reference, transformers_vit(model, one)(pixel_values=inputs[client]).logits, 1e-3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["none", "causal", "bool", "float"]),
    rows=st.sampled_from([1, 3]),
    shared=st.sampled_from(["nothing", "query", "mask"]),
    tokens=st.integers(1, 6),
    sharing=st.sampled_from([1, 2]),
    aligned=st.sampled_from([1, 4]),
)
def test_scaled_dot_product_matches_the_softmax_formula(
    seed: int, kind: str, rows: int, shared: str, tokens: int, sharing: int, aligned: int
) -> None:
    # (client, example, head, token, width); `sharing` heads of the query share one of key and value.
    query, key, value = (noise(seed + i, 2, 3, 2 * (sharing if i == 0 else 1), tokens, 4) for i in range(3))
    raw = noise(seed + 3, 2, rows, 1, tokens, tokens)
    mask = {"bool": (raw > 0) | torch.eye(tokens, dtype=torch.bool), "float": raw}.get(kind)
    before = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    bias = {"none": torch.zeros(()), "causal": torch.where(before, 0.0, -torch.inf), "float": raw}.get(kind)
    if bias is None:
        assert mask is not None
        bias = torch.where(mask, 0.0, -torch.inf)
    if shared == "query":
        query = query[:1].expand_as(query)
    if shared == "mask" and mask is not None:
        mask, bias = mask[0], bias[0]

    def attended(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None = None) -> Tensor:
        return scaled_dot_product(q, k, v, m, 0.7, causal=kind == "causal")

    each_key, each_value = (part.repeat_interleave(sharing, 2) for part in (key, value))
    weights = torch.softmax(query @ each_key.mT * 0.7 + bias, -1)
    expected = weights @ each_value
    dims = (None if shared == "query" else 0, 0, 0, None if mask is None or shared == "mask" else 0)
    own_query = query[0] if shared == "query" else query
    with no_vmap_fallback(), patch.dict(ALIGNMENT, {"cpu": aligned}):
        lifted = torch.vmap(attended, dims)(own_query, key, value, mask)
        squares = torch.vmap(  # torch.func.grad under vmap uses the written-out path
            torch.func.grad(lambda v, q, k, m: attended(q, k, v, m).square().sum() / 2), (0, dims[0], 0, dims[3])
        )(value, own_query, key, mask)
        across = torch.vmap(attended, (0, 1, 2))(query, key.movedim(0, 1), value.movedim(0, 2))
    assert close(lifted, expected, 1e-5)
    if mask is None:
        assert close(across, expected, 1e-5)
    assert close(squares, (weights.mT @ expected).unflatten(2, (2, sharing)).sum(3), 1e-5)
    single = None if mask is None else mask if shared == "mask" else mask[0]
    assert close(attended(query[0], key[0], value[0], single), expected[0], 1e-5)


def test_attention_over_only_padding_is_finite() -> None:
    query, mask = noise(0, 2, 1, 3, 4), torch.zeros(2, 1, 3, 3, dtype=torch.bool)
    assert scaled_dot_product(query, query, query, mask, None).isfinite().all()
    grad = torch.func.grad(lambda q: scaled_dot_product(q, q, q, mask, None).sum())(query)
    assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
def test_short_bfloat16_backward_on_a_cpu_avoids_the_fused_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [noise(i, 2, 2, 5, 4) for i in range(3)]
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool).tril(3) if kind == "padding" else None
    fused, calls = functional.scaled_dot_product_attention, []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(0) or fused(*a, **k))

    def outputs_and_gradients(dtype: torch.dtype) -> list[Tensor]:
        leaves = [part.detach().to(dtype).requires_grad_() for part in parts]
        out = scaled_dot_product(*leaves, mask, None, kind == "causal")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    exact = outputs_and_gradients(torch.float32)
    assert calls.pop() == 0
    for half, full in zip(outputs_and_gradients(torch.bfloat16), exact, strict=True):
        assert half.dtype == torch.bfloat16
        assert close(half.float(), full, 0.05)
    assert not calls
    scaled_dot_product(*(part.bfloat16() for part in parts), mask, None)
    monkeypatch.setitem(attention.SHORT, "cpu", 4)
    outputs_and_gradients(torch.bfloat16)
    assert len(calls) == 2


@pytest.mark.parametrize("recording", [False, True])
def test_no_attention_mask_is_built_when_lengths_suffice(recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    mask = AttentionMaskInterface._global_mapping["partita"]
    facts = {"batch_size": 2, "q_length": 4, "kv_length": 4}
    before = torch.ones(4, 4, dtype=torch.bool).tril()
    assert mask(**facts) is None
    assert mask(**facts, allow_is_causal_skip=False, allow_is_bidirectional_skip=True) is None
    assert torch.equal(mask(**facts, allow_is_causal_skip=False)[1, 0], before)
    assert torch.equal(mask(**facts, local_size=3)[1, 0], before)
    assert torch.equal(mask(**{**facts, "q_length": 2})[1, 0], before[:2])
    padding = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    assert torch.equal(mask(**facts, attention_mask=padding.bool())[:, 0, -1], padding.bool())
    model, seen = small_vit(), []

    def watch(module: object, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *more: Any) -> Tensor:
        seen.append(mask)
        return scaled_dot_product(query, key, value, mask, *more)

    with attention_hook(watch):
        model(model.initial, random_images())
    assert len(seen) == 2
    assert seen == [None, None]


@pytest.mark.parametrize("bias", [None, "float", "with Boolean mask"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_changed_scores_match_their_formula_with_equal_gradients(
    bias: str | None, softcap: float | None, sinks: bool, causal: bool
) -> None:
    """T5 adds a position bias to the scores, Gemma 2 caps them, and gpt-oss adds the score of an empty token."""
    from transformers import AttentionInterface

    attention = AttentionInterface._global_mapping["partita"]
    query, key, value = (noise(seed, 2, 3, 5, 4).double().requires_grad_() for seed in range(3))
    position_bias, sink = noise(3, 1, 3, 5, 5).double().requires_grad_(), noise(4, 3).double().requires_grad_()
    mask = (torch.arange(5) < torch.tensor([[5], [3]]))[:, None, None] if bias == "with Boolean mask" else None
    given = {"softcap": softcap, "s_aux": sink if sinks else None, "position_bias": position_bias if bias else None}
    causal = causal and mask is None
    out, _ = attention(torch.nn.Identity(), query, key, value, mask, is_causal=causal, **given)

    scores = query @ key.mT / 2
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores + position_bias if bias else scores
    seen = torch.ones(5, 5).tril().bool() if causal else mask if mask is not None else torch.ones(5, 5).bool()
    scores = scores.masked_fill(~seen, -torch.inf)
    column = sink.view(1, 3, 1, 1).expand(2, 3, 5, 1) if sinks else torch.full((2, 3, 5, 1), -torch.inf)
    reference = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value
    assert close(out, reference.transpose(1, 2))
    leaves = [query, key, value, *([position_bias] if bias else []), *([sink] if sinks else [])]
    ours, theirs = (torch.autograd.grad(each.square().sum(), leaves) for each in (out, reference))
    assert all(map(close, ours, theirs))


@pytest.mark.slow
def test_a_block_compiles_into_one_graph() -> None:
    model, params, inputs, _ = make_block()

    def logits(together: Tensors, pixels: Tensor) -> Tensor:
        return torch.vmap(lambda one, image: model(one, {"pixel_values": image}).logits)(together, pixels)

    together = stack_params(params)
    compiled = torch.compile(logits, backend="eager", fullgraph=True)
    assert close(compiled(together, inputs), logits(together, inputs), 1e-5)
