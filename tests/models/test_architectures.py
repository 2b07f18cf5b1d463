"""Every architecture against transformers: outputs, roles, saving, losses, and blocks of clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_fixtures import (
    CASE_NAMES,
    CLASSES,
    END,
    EXAMPLES,
    LAYERS,
    PAD,
    SLOW_CASES,
    TOKENS,
    Case,
    ThreeClients,
    class_of,
    inputs_of,
    make_case,
    make_model,
    module_of,
    noise,
    perturbed,
    random_texts,
    targets_of,
)
from helpers import no_vmap_fallback
from torch import Tensor
from torch.func import functional_call

from partita.core.data import IGNORE_INDEX
from partita.core.tensors import Tensors
from partita.methods.fedfrozen import fedfrozen
from partita.models import ModelError, split_qkv
from partita.models.architectures import table_tags
from partita.models.attention import attention_hook, scaled_dot_product
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.tasks import LM, MULTI_LABEL_TEXT
from partita.tasks.losses import token_cross_entropy
from partita.testing.conformance import check_method

CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_CASES else name for name in CASE_NAMES]
LANGUAGE_MODELS = [name for name in CASE_NAMES if name.endswith("-lm")]
ONE_PER_ARCHITECTURE = [
    name for name in CASE_NAMES if name.endswith(("-image", "-text", "-towers")) and name not in SLOW_CASES
]
ONE_PER_ARCHITECTURE += [name for name in LANGUAGE_MODELS if name.replace("-lm", "-text") in SLOW_CASES]


def logits_of(out: Any) -> Tensor:
    return out.logits_per_image if hasattr(out, "logits_per_image") else out.logits


def close(left: Tensor, right: Tensor, tolerance: float = 1e-6) -> bool:
    """Relative to the largest number if it exceeds 1, because float32 is no more precise."""
    return torch.allclose(left, right, rtol=0, atol=tolerance * max(1.0, float(right.detach().abs().max())))


# Outputs


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_outputs_of_every_architecture_match_transformers(case: str) -> None:
    it = make_case(case)
    for left in (False,) if it.kind.head == "image" else (False, True):
        inputs = inputs_of(it, left=left)
        with torch.no_grad():
            out, plain = it.model(it.params, inputs), logits_of(it.plain(**inputs, **it.model.fixed))
        logits = out.logits
        if it.each_token:  # what transformers computes for padding depends on the kernel
            logits, plain = (each[inputs["attention_mask"] == 1] for each in (logits, plain))
        assert close(logits, plain), (left, (logits - plain).abs().max())
        assert logits.std() > 0.05
        assert out.features is not None
        assert out.features.shape[0] == EXAMPLES
        assert out.features.ndim == 2


@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_language_models_are_causal_without_a_mask(case: str) -> None:
    it = make_case(case)
    ids = random_texts(0)["input_ids"].clamp(min=PAD + 1)
    with torch.no_grad():
        logits = it.model(it.params, {"input_ids": ids}).logits
        assert close(logits, it.plain(input_ids=ids).logits)
        changed = it.model(it.params, {"input_ids": torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % END], 1)}).logits
    assert torch.equal(logits[:, :-1], changed[:, :-1])
    assert not close(logits[:, -1], changed[:, -1], 1e-3)


# Roles


BEFORE_ATTENTION = ("layernorm_before", "norm1", "ln_1", "input_layernorm", "layer_norm1")


def attention_maps(it: Case, params: Tensors) -> dict[str, tuple[Tensor, ...]]:
    """Attention maps by tower and layer: (example, head, query, key)."""
    plain_names = split_qkv.join(it.model.module, params)
    with torch.no_grad():
        out = functional_call(
            it.plain, plain_names, kwargs={**inputs_of(it), **it.model.fixed, "output_attentions": True}
        )
    if hasattr(out, "text_model_output"):
        return {"vision": out.vision_model_output.attentions, "text": out.text_model_output.attentions}
    return {"": out.attentions}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", ONE_PER_ARCHITECTURE)
def test_attention_depends_only_on_the_query_and_key_of_its_layer(case: str) -> None:
    it = make_case(case)
    rotary = case.startswith(("llama", "mistral", "qwen"))
    before = attention_maps(it, it.params)
    for name, tags in it.model.tags.items():
        after = attention_maps(it, {**it.params, name: it.params[name] + 0.3 * noise(2, *it.params[name].shape)})
        for tower, layers in before.items():
            for layer, old in enumerate(layers):
                new = after[tower][layer]
                here = f"layer.{layer}" in tags and (not tower or tower in tags)
                if here and "key" in tags and name.endswith("bias") and not rotary:
                    # It adds the same to all scores of a query, which softmax cancels.
                    assert close(new, old, 1e-5), (name, tower, layer)
                elif here and (tags & {"query", "key"} or any(norm in name for norm in BEFORE_ATTENTION)):
                    assert not close(new, old, 1e-4), (name, tower, layer)
                elif here or ("head" in tags and "embedding" not in tags) or (tower and tower not in tags):
                    assert torch.equal(new, old), (name, tower, layer)


@pytest.mark.parametrize("case", CASES)
def test_every_architecture_has_one_role_per_parameter_and_numbered_layers(case: str) -> None:
    it = make_case(case)
    for name, tags in it.model.tags.items():
        roles = tags & {"query", "key", "value", "output", "mlp", "norm", "embedding", "head"}
        tied = case in ("gpt2-lm", "qwen3-lm") and "embedding" in tags and "wpe" not in name
        assert roles == {"embedding", "head"} if tied else len(roles) == 1, name
    assert {tag for tags in it.model.tags.values() for tag in tags if tag.startswith("layer.")} == {
        "layer.0",
        "layer.1",
    }
    sizes = [len(it.model.names(f"layer.{layer}")) for layer in range(LAYERS)]
    assert sizes[0] == sizes[1] > 8
    assert it.model.names("query", "key", "value", "output", "mlp") <= it.model.names("layer.0", "layer.1")
    if case == "clip-towers":
        assert it.model.names("vision") | it.model.names("text") == it.model.all_names() - {"logit_scale"}
        assert not it.model.names("vision") & it.model.names("text")


def test_gpt2_projection_is_split_into_query_key_and_value() -> None:
    it = make_case("gpt2-lm")
    site = "transformer.h.0.attn.c_attn"
    assert it.model.initial[f"{site}.query.weight"].shape == (16, 16)
    assert it.model.names("value") == {
        f"transformer.h.{layer}.attn.c_attn.value.{leaf}" for layer in range(LAYERS) for leaf in ("weight", "bias")
    }
    joined = torch.cat([it.params[f"{site}.{part}.weight"] for part in ("query", "key", "value")], 1)
    assert torch.equal(it.plain.transformer.h[0].attn.c_attn.weight, joined)


# Blocks of clients


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_every_architecture_match_single_clients(case: str) -> None:
    it = make_case(case)
    params = [perturbed(it.params, seed) for seed in (3, 4)]
    inputs, targets = [inputs_of(it, seed) for seed in (0, 1)], [targets_of(it, seed) for seed in (0, 1)]

    def losses(one: Tensors, given: Tensors, target: Tensor) -> Tensor:
        out = it.model(one, given)
        assert out.features is not None
        return it.model.losses(out, target) + out.features.square().mean(1)

    together = {name: torch.stack([one[name] for one in params]).requires_grad_() for name in params[0]}
    given = {name: torch.stack([one[name] for one in inputs]) for name in inputs[0]}
    with no_vmap_fallback():
        lifted = torch.vmap(losses)(together, given, torch.stack(targets))
        slopes = torch.autograd.grad(lifted.mean(1).sum(), list(together.values()), allow_unused=True)
    for client in range(2):
        leaves = {name: value.clone().requires_grad_() for name, value in params[client].items()}
        alone = losses(leaves, inputs[client], targets[client])
        assert torch.allclose(lifted[client], alone, rtol=1e-5, atol=1e-5)
        own = torch.autograd.grad(alone.mean(), list(leaves.values()), allow_unused=True)
        for name, many, one in zip(together, slopes, own, strict=True):
            if one is None:
                assert many is None
                # Only pretraining uses the mask token, and CLIP's classification head skips the post layer norm.
                assert "mask_token" in name or (case == "clip-image" and "post_layernorm" in name), name
            else:
                assert close(many[client], one, 1e-5 * max(1.0, float(one.abs().max()))), name


@pytest.mark.parametrize("case", ["bert-text", "gpt2-lm", "mistral-lm", "clip-towers"])
def test_per_example_gradients_need_no_vmap_fallback_on_text_models(case: str) -> None:
    it = make_case(case)
    inputs, targets = inputs_of(it), targets_of(it)

    def loss(one: Tensors, given: Tensors, target: Tensor) -> Tensor:
        return it.model.losses(it.model(one, {name: value[None] for name, value in given.items()}), target[None])[0]

    with no_vmap_fallback():
        lifted = torch.vmap(torch.func.grad(loss), (None, 0, 0))(it.params, inputs, targets)
    for example in range(EXAMPLES):
        leaves = {name: value.clone().requires_grad_() for name, value in it.params.items()}
        alone = loss(leaves, {name: value[example] for name, value in inputs.items()}, targets[example])
        for name, own in zip(leaves, torch.autograd.grad(alone, list(leaves.values())), strict=True):
            assert torch.allclose(lifted[name][example], own, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("case", ["roberta-tokens", "gpt2-lm", "llama-lm"])
def test_padding_embedding_gets_the_same_gradient_in_a_block_and_alone(case: str) -> None:
    """Plain vmap would skip the padding embedding for the first client of a block only."""
    it = make_case(case)
    ids, targets = (
        torch.stack([random_texts(seed)["input_ids"] for seed in (0, 1)]),
        torch.zeros(EXAMPLES, TOKENS).long(),
    )

    def loss(one: Tensors, tokens: Tensor) -> Tensor:
        return it.model.losses(it.model(one, {"input_ids": tokens}), targets).mean()

    [table] = [name for name in it.params if "word_embeddings" in name or "wte" in name or "embed_tokens" in name]
    embedded = torch.stack([it.params[table]] * 2).requires_grad_()
    lifted = torch.vmap(lambda own, tokens: loss({**it.params, table: own}, tokens))(embedded, ids)
    slopes = torch.autograd.grad(lifted.sum(), embedded)[0]  # (client, token, width)
    for client in range(2):
        alone = it.params[table].clone().requires_grad_()
        own = torch.autograd.grad(loss({**it.params, table: alone}, ids[client]), alone)[0]
        assert close(slopes[client], own, 1e-5)
        assert own[PAD].abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("bert-text", {"num_hidden_layers": 1}),
        pytest.param("gpt2-lm", {"n_layer": 1}, marks=pytest.mark.slow),
        pytest.param("clip-towers", {}, marks=pytest.mark.slow),
    ],
)
def test_fedfrozen_conforms_on_text_and_clip_models(case: str, sizes: dict[str, int]) -> None:
    model = make_model(case, sizes=sizes)
    # Start with non-zero biases: a zero key bias would move by rounding alone, which cannot be compared.
    found = check_method(fedfrozen(), replace(model, initial=perturbed(model.initial)), ThreeClients(make_case(case)))
    assert found.block_difference < 1e-5
    assert found.bytes_up > 0


# Losses


@pytest.mark.parametrize("case", ["bert-tokens", "llama-tokens"])
def test_token_loss_is_the_mean_over_labeled_tokens(case: str) -> None:
    it = make_case(case)
    inputs, targets = random_texts(0), targets_of(it)
    with torch.no_grad():
        losses = it.model.losses(it.model(it.params, inputs), targets)
        for example in range(EXAMPLES):
            one = {name: value[example : example + 1] for name, value in inputs.items()}
            reference = it.plain(**one, labels=targets[example : example + 1]).loss
            assert close(losses[example], reference)


@pytest.mark.parametrize("case", ["gpt2-lm", "qwen2-lm"])
def test_language_model_loss_matches_transformers(case: str) -> None:
    it = make_case(case)
    ids = random_texts(0)["input_ids"].clamp(min=PAD + 1)
    targets = torch.cat([ids[:, 1:], torch.full((EXAMPLES, 1), IGNORE_INDEX)], 1)
    with torch.no_grad():
        losses = it.model.losses(it.model(it.params, {"input_ids": ids}), targets)
        assert losses.shape == (EXAMPLES,)
        assert close(losses.mean(), it.plain(input_ids=ids, labels=ids).loss)


def test_multi_label_loss_matches_transformers() -> None:
    module = module_of("bert-text", problem_type="multi_label_classification")
    targets = (noise(5, EXAMPLES, CLASSES) > 0).float()
    with torch.no_grad():
        reference = module(**random_texts(0), labels=targets).loss
        model = from_module("bert", module, kind=MULTI_LABEL_TEXT)
        losses = model.losses(model(model.initial, random_texts(0)), targets)
    assert losses.shape == (EXAMPLES,)
    assert close(losses.mean(), reference)


def test_example_without_labeled_tokens_has_zero_loss() -> None:
    logits, targets = noise(0, 2, 3, 4).requires_grad_(), torch.tensor([[IGNORE_INDEX] * 3, [1, IGNORE_INDEX, 2]])
    losses = token_cross_entropy(logits, targets)
    assert losses[0] == 0
    assert torch.autograd.grad(losses.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("case", ["gpt2-lm", "llama-lm", "mistral-lm", "qwen3-lm"])
def test_texts_without_padding_need_no_mask(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a CUDA graph, where transformers would build one. Mistral's window needs one."""
    it, masks = make_case(case), list[Tensor | None]()
    ids = inputs_of(it)["input_ids"]
    full = it.model(it.params, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits

    def watch(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        masks.append(mask)
        return scaled_dot_product(query, key, value, mask, *rest)

    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    with attention_hook(watch):
        out = it.model(it.params, {"input_ids": ids}).logits
    assert torch.allclose(out, full, atol=1e-5)
    assert masks
    assert all((mask is None) == (case != "mistral-lm") for mask in masks)


# Memory


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("case", ["vit-image", "bert-text", "gpt2-lm", "qwen2-lm", "clip-towers"])
def test_checkpointing_gives_equal_gradients_with_less_memory(case: str) -> None:
    def slopes(model: FunctionalModel) -> tuple[tuple[Tensor, ...], int]:
        leaves = {name: value.clone().requires_grad_() for name, value in it.params.items()}
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):  # type: ignore[func-returns-value]
            loss = model.losses(model(leaves, inputs), targets).mean()
        return torch.autograd.grad(loss, list(leaves.values())), sum(value.numel() for value in kept)

    it, state = make_case(case), torch.get_rng_state()
    inputs, targets = inputs_of(it), targets_of(it)
    saving = make_model(case, checkpointing=True)
    (again, less), (once, much) = slopes(saving), slopes(it.model)
    assert all(map(torch.equal, again, once))
    assert less < 0.7 * much
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part.training for part in saving.module.modules() if isinstance(part, torch.nn.Dropout))
    with pytest.raises(ModelError, match=r"model\.checkpointing = false"):
        torch.func.grad(lambda one: saving(one, inputs).logits.sum())(it.params)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("case", ["gpt2-text", "llama-lm", "clip-image"])
def test_bfloat16_model_holds_trainable_parameters_in_float32(case: str, tmp_path: Path) -> None:
    it = make_case(case)
    model = make_model(case, frozen=("embedding", "layer.0"), dtype=torch.bfloat16)
    assert {value.dtype for value in model.module.parameters()} == {torch.bfloat16}
    assert {value.dtype for value in model.initial.values()} == {torch.float32}
    inputs = inputs_of(it)
    leaves = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    out = model(leaves, inputs)
    assert out.logits.dtype == torch.float32
    slopes = torch.autograd.grad(model.losses(out, targets_of(it)).mean(), list(leaves.values()), allow_unused=True)
    assert {slope.dtype for slope in slopes if slope is not None} == {torch.float32}
    exact = it.model(it.model.initial, inputs).logits
    assert close(out.logits, exact, 0.05)
    assert not torch.equal(out.logits, exact)
    model.save_pretrained(model.initial, tmp_path)
    plain = class_of(case).from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert plain.dtype == torch.bfloat16
    out = model(model.initial, inputs)  # without gradients, since the backward pass uses another attention path
    given = {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}
    seen = inputs["attention_mask"] == 1 if it.each_token else slice(None)
    assert torch.equal(plain(**given).logits.float()[seen], out.logits[seen])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", ["gpt2-lm", "qwen3-lm"])
def test_tied_weights_stay_tied_when_frozen_saved_and_loaded(case: str, tmp_path: Path) -> None:
    for frozen in ((), ("embedding", "query")):
        model = make_model(case, frozen=frozen)
        params = perturbed(model.initial)
        model.save_pretrained(params, tmp_path)
        plain = class_of(case).from_pretrained(tmp_path).eval()
        assert plain.lm_head.weight is plain.get_input_embeddings().weight
        ids = random_texts(0)["input_ids"]
        assert close(model(params, {"input_ids": ids}).logits, plain(input_ids=ids).logits)


def test_older_parameter_names_have_the_same_role() -> None:
    layer = "dinov2.encoder.layer.0.attention."
    old = {"attention.query": "query", "attention.key": "key", "attention.value": "value", "output.dense": "output"}
    tags = table_tags("dinov2", [f"{layer}{name}.weight" for name in old])
    assert list(tags.values()) == [frozenset({role, "layer.0"}) for role in old.values()]


def test_unsupported_task_of_an_architecture_is_refused() -> None:
    with pytest.raises(ModelError, match="supports 'bert' for tasks of kind text or tokens, not lm; choose"):
        from_module("bert", module_of("bert-text"), kind=LM)
