"""Attention scores of layers and heads, against the attention maps of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architecture_fixtures import (
    CASE_NAMES,
    END,
    EXAMPLES,
    LAYERS,
    PAD,
    SLOW_CASES,
    TOKENS,
    Case,
    TensorExamples,
    inputs_of,
    make_case,
    make_model,
    noise,
    random_texts,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partita.core.data import IGNORE_INDEX, Batch
from partita.core.model import Model, TagError, input_side_names, layer_tags
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.attention import attention_hook, scaled_dot_product
from partita.models.attention_scores import _Scores, resolve_tokens
from partita.models.frozen_cache import cache_frozen
from partita.testing.toy import ToyPopulation, ToyTransformer

CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_CASES else name for name in CASE_NAMES]
TAGS = {"O": 0, "B-drug": 1, "I-drug": 2}


def case_with_tags(case: str) -> Case:
    it = make_case(case)
    if it.kind.head == "tokens":
        it.model.module.config.label2id = TAGS
    return it


def make_batch(it: Case, left: bool = False) -> Batch:
    inputs = inputs_of(it, left=left)
    if not it.each_token:
        return Batch(inputs, torch.zeros(EXAMPLES).long())
    drawn = torch.randint(0, 3, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))
    return Batch(inputs, drawn.where(inputs["attention_mask"] == 1, IGNORE_INDEX))


def attention_maps(it: Case, inputs: Tensors) -> list[Tensor]:
    """Attention maps of each layer: (example, head, query, key)."""
    with torch.no_grad():
        out = it.plain(**inputs, **it.model.fixed, output_attentions=True)
    return list((out.vision_model_output if hasattr(out, "vision_model_output") else out).attentions)


def expected_scores(maps: list[Tensor], marked: Tensor, seen: Tensor) -> Tensor:
    """(example, layer, head) by the formula: a mean over visible queries of the sum over marked keys."""
    scores = []
    for alpha in maps:
        marked_attention = torch.einsum("ehij,ej->ehi", alpha.double(), marked.double())
        scores.append((marked_attention * seen[:, None]).sum(-1) / seen.sum(-1)[:, None])
    return torch.stack(scores, 1)


def stack_layers(scores: dict[str, Tensor]) -> Tensor:
    assert list(scores) == [f"layer.{number}" for number in range(LAYERS)]
    return torch.stack(list(scores.values()), 1)


def marked_and_seen(it: Case, batch: Batch, tokens: str, count: int) -> tuple[Tensor, Tensor]:
    """Marked and visible tokens, row by row in plain Python."""
    seen = batch.inputs.get("attention_mask", torch.ones(EXAMPLES, count))
    marked = torch.zeros(EXAMPLES, count)
    registers = 2 if "register" in it.model.name else 0
    for row in range(EXAMPLES):
        valid = [place for place in range(count) if seen[row, place]]
        if tokens == "cls":
            chosen = valid[:1]
        elif tokens == "entities":
            chosen = [place for place in valid if int(batch.targets[row, place]) in (1, 2)]
        elif it.kind.head == "image":
            chosen = valid[1 + registers + it.model.name.startswith("deit") :]
        elif "lm" in it.model.name or it.model.name.startswith(("gpt2", "llama", "mistral", "qwen")):
            chosen = [place for place in valid[1:] if int(batch.inputs["input_ids"][row, place]) not in (PAD, END)]
        else:
            chosen = valid[1:-1]
        marked[row, chosen] = 1
    return marked, seen


@pytest.mark.parametrize("case", CASES)
def test_attention_scores_match_transformers_attention_maps(case: str) -> None:
    it = case_with_tags(case)
    for left in (False,) if it.kind.head == "image" else (False, True):
        batch = make_batch(it, left)
        plain = attention_maps(it, batch.inputs)
        decodes = case.startswith(("gpt2", "llama", "mistral", "qwen"))
        words = ["content"] + (["entities"] if it.kind.head == "tokens" else []) + ([] if decodes else ["cls"])
        for tokens in words:
            scores = stack_layers(it.model.attention(it.params, batch, tokens))
            marked, seen = marked_and_seen(it, batch, tokens, plain[0].shape[-1])
            expected = expected_scores(plain, marked, seen)
            assert (scores - expected).abs().max() < 1e-5, (left, tokens)
            assert scores.std() > 1e-3
            assert 0 <= scores.min() <= scores.max() <= 1


@pytest.mark.parametrize(
    ("case", "means"),
    [
        ("vit-image", "cls"),
        ("bert-tokens", "entities"),
        ("bert-text", "cls"),
        ("clip-towers", "cls"),
        ("gpt2-text", "pooled"),
        ("llama-text", "pooled"),
        ("llama-lm", "content"),
        ("llama-tokens", "entities"),
    ],
)
def test_auto_tokens_resolve_by_task_and_architecture(case: str, means: str) -> None:
    assert resolve_tokens(case_with_tags(case).model, "auto") == means


@pytest.mark.parametrize(
    ("case", "tokens", "message"),
    [
        ("bert-text", "all", "does not distinguish layers: softmax makes attention to all tokens 1 in every layer"),
        ("gpt2-lm", "last", "in a decoder only the last token attends to the last token.*'auto', 'content'"),
        ("llama-lm", "bos", "in a decoder it is an attention sink"),
        ("llama-tokens", "first", "'auto', 'entities' or 'content'"),
        ("llama-text", "cls", "'cls' is for encoders, but llama-text is a decoder"),
        ("bert-text", "entities", "is for token classification tasks; set it to 'auto', 'cls' or 'content'"),
        ("bert-text", "contents", "did you mean 'content'"),
    ],
)
def test_uninformative_tokens_are_refused_with_a_reason(case: str, tokens: str, message: str) -> None:
    it = case_with_tags(case)
    with pytest.raises(ModelError, match=message):
        it.model.attention(it.params, make_batch(it), tokens)


def test_entities_without_bio_tags_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case_with_tags("bert-tokens")
    monkeypatch.setattr(it.model.module.config, "label2id", {"yes": 0, "no": 1, "maybe": 2})
    with pytest.raises(ModelError, match="has only: yes, no, maybe; use BIO tags"):
        it.model.attention(it.params, make_batch(it), "entities")


@pytest.mark.parametrize("case", ["bert-text", "llama-text"])
def test_attention_scores_ignore_padding(case: str) -> None:
    it = case_with_tags(case)
    batch = make_batch(it)
    wide = {"input_ids": PAD, "attention_mask": 0}
    longer = {n: torch.cat([v, torch.full((EXAMPLES, 3), wide[n])], 1) for n, v in batch.inputs.items()}
    one, two = (it.model.attention(it.params, Batch(each, batch.targets), "content") for each in (batch.inputs, longer))
    assert all(torch.allclose(one[layer], two[layer], atol=1e-6) for layer in one)
    alone = {name: value[1:2, :3] for name, value in random_texts(0).items()}  # of three tokens, without any padding
    three = it.model.attention(it.params, Batch(alone, batch.targets[1:2]), "content")
    assert all(torch.allclose(one[layer][1:2], three[layer], atol=1e-6) for layer in one)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor created."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, given=(), named=None):  # type: ignore[no-untyped-def]
        out = function(*given, **(named or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.numel())
        return out


@pytest.mark.parametrize("case", ["bert-text", "gpt2-lm", "llama-lm"])
def test_attention_scores_never_allocate_an_attention_map(case: str) -> None:
    length = 512
    model = make_model(case, sizes={"n_positions" if "gpt2" in case else "max_position_embeddings": length})
    ids = torch.randint(2, END, (1, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with LargestTensor() as largest:
        model.attention(model.initial, Batch(inputs, torch.zeros(1).long()), "content")
    assert 0 < largest.numbers < length * 150 < length * length


def test_default_attention_scale_uses_the_true_head_width() -> None:
    """The value tensors are wider during scoring, which must not change the scale."""
    seen = []

    def scored(module: Any, *given: Any) -> Tensor:
        watch = _Scores(it.model, batch, "cls", None, {module: "layer.0"})
        open_scale = (*given[:4], None, given[5])
        assert torch.allclose(watch(module, *open_scale), scaled_dot_product(*open_scale), atol=1e-6)
        seen.append(watch.scores["layer.0"])
        return scaled_dot_product(*given)

    it = case_with_tags("vit-image")
    batch = make_batch(it)
    with attention_hook(scored):
        it.model(it.params, batch.inputs)
    assert torch.allclose(torch.stack(seen, 1), stack_layers(it.model.attention(it.params, batch, "cls")), atol=1e-6)


def test_scoring_does_not_change_the_model() -> None:
    it = case_with_tags("bert-text")
    batch, state = make_batch(it), torch.get_rng_state()
    before = it.model(it.params, batch.inputs).logits
    it.model.attention(it.params, batch, "cls")
    assert torch.equal(before, it.model(it.params, batch.inputs).logits)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ModelError, match="called with exactly the parameters"):
        it.model.attention({}, batch, "cls")
    assert torch.equal(before, it.model(it.params, batch.inputs).logits)


@pytest.mark.parametrize("case", ["gpt2-text", "vit-image"])
def test_bfloat16_scores_are_float32_and_close(case: str) -> None:
    it = case_with_tags(case)
    batch = make_batch(it)
    half = make_model(case, dtype=torch.bfloat16)
    one, two = (stack_layers(model.attention(it.params, batch, "auto")) for model in (it.model, half))
    assert two.dtype == torch.float32
    assert 0 < (one - two).abs().max() < 0.05


def test_low_rank_scores_equal_those_of_the_merged_model() -> None:
    it = case_with_tags("bert-text")
    model = it.model.low_rank(2, 4.0, ("query", "value"), Key(1))
    params = {name: value + 0.1 * noise(5, *value.shape) for name, value in model.initial.items()}
    batch = make_batch(it)
    merged = it.model.attention(model.merged(params), batch, "cls")  # type: ignore[attr-defined]
    assert (stack_layers(model.attention(params, batch, "cls")) - stack_layers(merged)).abs().max() < 1e-5
    assert not any("lora" in name for name in model.head_dimensions())


def test_cached_layers_are_not_scored_and_other_scores_are_unchanged() -> None:
    it = case_with_tags("llama-tokens")
    frozen = make_model("llama-tokens", frozen=("embedding", "layer.0"))
    frozen.module.config.label2id = TAGS
    batch = make_batch(it)
    above, (cached,) = cache_frozen(frozen, TensorExamples(batch.inputs, batch.targets))
    scores = above.attention(above.initial, cached.take(torch.arange(EXAMPLES)), "entities")
    assert list(scores) == ["layer.1"]
    whole = it.model.attention(it.model.initial, batch, "entities")["layer.1"]
    assert torch.allclose(scores["layer.1"], whole, atol=1e-5)
    with pytest.raises(ModelError, match=r"needs token ids, which are not cached; set engine.cache_frozen = false"):
        above.attention(above.initial, cached.take(torch.arange(EXAMPLES)), "content")


def test_checkpointing_does_not_change_attention_scores() -> None:
    it = case_with_tags("vit-image")
    saving = make_model("vit-image", checkpointing=True)
    batch = make_batch(it)
    one, two = (stack_layers(model.attention(it.params, batch, "cls")) for model in (it.model, saving))
    assert torch.equal(one, two)


# Heads


@pytest.mark.parametrize("case", [*(name for name in CASE_NAMES if name.endswith(("-image", "-text"))), "qwen3-lm"])
def test_head_dimensions_separate_attention_heads(case: str) -> None:
    """Zeroing one head's part of the values or of the output removes exactly that head."""
    it = case_with_tags(case)
    parts, inputs = it.model.head_dimensions(), inputs_of(it)
    tags = it.model.tags
    assert parts.keys() <= it.model.names("query", "key", "value", "output")
    for role, dims in (("query", 2), ("key", 2), ("value", 2), ("output", 2)):
        matrices = [n for n in it.model.names(role) if it.params[n].ndim == dims]
        assert set(matrices) <= parts.keys()
    for name, (dim, count) in parts.items():
        assert it.params[name].shape[dim] % count == 0
    if case.startswith(("llama", "mistral", "qwen")):  # two heads of the query share one of key and value
        return

    def without(role: str) -> Tensor:
        params = dict(it.params)
        for name in it.model.names(role) & it.model.names("layer.0") & parts.keys():
            dim, count = parts[name]
            params[name] = params[name].clone()
            params[name].chunk(count, dim)[0].zero_()
        return it.model(params, inputs).logits

    with torch.no_grad():
        assert torch.allclose(without("value"), without("output"), atol=1e-5)
        assert not torch.allclose(without("value"), it.model(it.params, inputs).logits, atol=1e-3)
        swapped = dict(it.params)
        for name, (dim, count) in parts.items():
            if "layer.0" in tags[name]:
                swapped[name] = torch.cat(it.params[name].chunk(count, dim)[::-1], dim)
        assert torch.allclose(it.model(swapped, inputs).logits, it.model(it.params, inputs).logits, atol=1e-5)


# Layers


def test_input_side_names_are_those_before_the_layers() -> None:
    expected = {
        "bert-text": "bert.embeddings.LayerNorm.bias",
        "clip-towers": "vision_model.pre_layrnorm.bias",
        "gpt2-lm": "transformer.wte.weight",
        "llama-lm": "model.embed_tokens.weight",
    }
    for case, name in expected.items():
        model = make_case(case).model
        assert name in (before := input_side_names(model))
        assert model.names("embedding") <= before
        assert not before & model.names(*layer_tags(model))
    assert not any("final" in name or "post" in name for name in input_side_names(make_case("clip-towers").model))
    assert "logit_scale" not in input_side_names(make_case("clip-towers").model)
    assert input_side_names(ToyTransformer()) == {"embed.weight"}
    assert layer_tags(ToyTransformer(layers=12)) == [f"layer.{number}" for number in range(12)]


def test_toy_model_scores_its_first_token_and_a_plain_model_refuses() -> None:
    model, examples = ToyTransformer(), ToyPopulation()["c3"].train
    scores = model.attention(model.initial, examples.take(torch.arange(5)), "auto")
    assert [value.shape for value in scores.values()] == [(5, 1)] * 2
    assert all(0 < float(value.mean()) < 1 for value in scores.values())
    still = {n: v * 0 if "query" in n else v for n, v in model.initial.items()}
    even = model.attention(still, examples.take(torch.arange(5)), "auto")
    assert all(torch.allclose(value, torch.tensor(0.25)) for value in even.values())
    plain = Model()
    plain.name = "plain"
    with pytest.raises(TagError, match="plain cannot report its attention; use a Hugging Face model"):
        plain.attention({}, Batch({}, torch.zeros(1)), "auto")
    with pytest.raises(TagError, match="plain cannot separate its heads"):
        plain.head_dimensions()
