"""Many model types of transformers: outputs, one round, frozen parameters, blocks, saving, and roles."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_types import CASES, TwoClients, check, inputs_of, module_of, perturbed
from packaging.version import Version
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS
from torch import nn
from transformers import CONFIG_MAPPING

from partita.core.data import Batch
from partita.core.model import TagError, layer_tags
from partita.methods.fedfrozen import fedfrozen
from partita.methods.safl import safl
from partita.models import ModelError, split_qkv
from partita.models.architectures import ARCHITECTURES, tags_of
from partita.models.architectures.general import FUSED, PROJECTIONS, find_layers, general_tags
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.models.lifting import why_one_by_one
from partita.tasks import KINDS
from partita.testing.conformance import check_method

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "models.md"
FAST = ("xlm-roberta-text", "deberta-v2-text", "t5-text", "swin-image", "gemma2-lm")
# Types that users ask for by name.
WANTED = "xlm-roberta deberta-v2 modernbert albert mpnet gemma phi qwen2 mistral t5 bart swin beit siglip segformer"
WANTED += " dinov2_with_registers clip esm camembert gemma2 gemma3_text phi3"


def model_of(case: str) -> FunctionalModel:
    model_type, _, kind = case.rpartition("-")
    return from_module(model_type, module_of(case), kind=KINDS[kind])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in FAST)) for case in CASES])
def test_type_runs_freezes_saves_and_equals_transformers(case: str) -> None:
    assert check(case).to_markdown() in PAGE.read_text(), "run scripts/write_models.py"


def test_page_lists_all_checked_types_and_those_that_users_ask_for() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = {(model_type.strip(" `"), kind.strip()) for model_type, kind in rows}
    assert listed == {tuple(case.rsplit("-", 1)) for case in CASES}
    assert len({model_type for model_type, _ in listed}) >= 60
    assert {model_type for model_type, _ in listed} >= {*WANTED.split()}


# Roles


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_naming_patterns_agree_with_the_tables_of_known_types(model_type: str) -> None:
    case = next(case for case in CASES if case.rpartition("-")[0] == model_type)
    module = module_of(case)
    split_qkv.split(module)
    exact, general = tags_of(module), general_tags(module)
    tied = {name for name, tags in exact.items() if {"embedding", "head"} <= tags}
    assert {name: tags - {"vision"} for name, tags in exact.items() if name not in tied} == {
        name: general[name] for name in exact if name not in tied
    }


@pytest.mark.slow
def test_layers_of_stages_blocks_and_parallel_lists_are_found() -> None:
    found = {case: [layer.paths for layer in find_layers(module_of(case))] for case in ("swin-image", "t5-text")}
    assert found["swin-image"] == [
        (f"swin.encoder.layers.{stage}.blocks.{block}",) for stage in range(2) for block in range(2)
    ]
    assert found["t5-text"] == [
        (f"transformer.{part}.block.{number}",) for part in ("encoder", "decoder") for number in range(2)
    ]
    first = find_layers(module_of("xlm-text"))[0]
    assert {path.split(".")[1] for path in first.paths} == {"attentions", "layer_norm1", "ffns", "layer_norm2"}
    assert [layer.number for layer in find_layers(module_of("fnet-text"))] == [0, 1]


def test_target_modules_of_peft_have_a_role() -> None:
    """PEFT adapts queries and values unless told otherwise, so its table names them for many types."""
    unknown = set()
    for targets in PEFT_TARGETS.values():
        for target in [] if isinstance(targets, str) else targets:  # a string is a pattern of whole paths
            patterns = (*PROJECTIONS, FUSED)
            if not any(re.fullmatch(pattern, target.rpartition(".")[2], re.IGNORECASE) for pattern in patterns):
                unknown.add(target)
    mlp = {"gate_proj", "up_proj", "down_proj", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h", "w1", "w2", "w3"}
    assert unknown <= mlp | NOT_ATTENTION, unknown - mlp - NOT_ATTENTION


NOT_ATTENTION = {"x_proj", "embeddings", "receptance", "r_proj"}  # of Mamba, RWKV and XLNet's positions


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "mixtral", "olmo2", "smollm3"])
def test_tensor_parallel_plans_of_transformers_agree(model_type: str) -> None:
    """A plan splits queries, keys and values by output, and outputs by input; both lie inside layers."""
    plan = CONFIG_MAPPING[model_type]().base_model_tp_plan
    tags = general_tags(module_of(f"{model_type}-lm"))
    checked = 0
    for path, how in plan.items():
        names = [name for name in tags if name.startswith("model." + path.replace("*", "0") + ".")]
        for name in names:
            roles = {"colwise": {"query", "key", "value", "mlp", "other"}, "rowwise": {"output", "mlp"}}.get(how)
            if roles is not None:
                assert tags[name] & roles, (name, how)
                assert "layer.0" in tags[name]
                checked += 1
    assert checked >= 2


def test_missing_role_is_named_with_what_was_found() -> None:
    model = model_of("falcon-lm")
    with pytest.raises(TagError, match=r"no parameter of falcon is tagged 'query'; it has: .*other.*query_key_value"):
        model.names("query")


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("case", ["gpt_neox-lm", "bloom-lm", "phi3-lm", "modernbert-text", "persimmon-lm", "mpt-lm"])
def test_split_projection_computes_the_same_and_joins_bit_for_bit(case: str) -> None:
    module, inputs = module_of(case), inputs_of(case.rpartition("-")[2])
    before, state = module(**inputs).logits, {name: value.clone() for name, value in module.state_dict().items()}
    split_qkv.split(module)
    assert torch.allclose(module(**inputs).logits, before, atol=1e-6)
    parts = {name.rsplit(".", 2)[1] for name, _ in module.named_parameters()}
    assert {"query", "key", "value"} <= parts
    joined = split_qkv.join(module, module.state_dict())
    assert joined.keys() == state.keys()
    assert all(torch.equal(joined[name], value) for name, value in state.items())


def test_frozen_embedding_is_everything_before_the_first_layer() -> None:
    for case in ("xlm-roberta-text", "deberta-v2-text", "swin-image"):
        model_type, _, kind = case.rpartition("-")
        model = from_module(model_type, module_of(case), ["embedding"], kind=KINDS[kind])
        assert [name for name in model.frozen_tags if "LayerNorm" in name or "embeddings.norm" in name], case
        assert not [name for name in model.initial if ".embeddings." in name], case
        assert "head" in {tag for tags in model.tags.values() for tag in tags}


# Two speeds


def test_reason_for_training_one_by_one_is_given() -> None:
    assert model_of("xlm-roberta-text").why_one_by_one(inputs_of("text")) == ""
    assert "torch.vmap cannot lift it" in model_of("mpnet-text").why_one_by_one(inputs_of("text"))
    # torch 2.9 fails before it comes to histc.
    old = Version(torch.__version__) < Version("2.10")
    expected = "torch.vmap cannot lift it" if old else "histc client by client"
    assert expected in model_of("mixtral-lm").why_one_by_one(inputs_of("lm"))


def test_forward_pass_that_vmap_changes_is_not_lifted() -> None:
    model = model_of("xlm-roberta-text")

    class Leaky(nn.Module):
        """Gives each call another result, which vmap calls once for all clients."""

        calls = 0

    def forward(module: nn.Module, inputs: object) -> object:
        Leaky.calls += 1
        out = type(model).__call__(model, model.initial, inputs)  # type: ignore[arg-type]
        return type(out)(out.logits + Leaky.calls, out.features)

    assert why_one_by_one(replace(model, forward=forward), inputs_of("text")) == "torch.vmap changes its result"  # type: ignore[arg-type]


# Methods


@pytest.mark.parametrize("case", ["deberta-v2-text", "t5-text", "swin-image", "siglip-image", "segformer-image"])
def test_attention_scores_of_other_types_are_shares_that_differ_by_layer(case: str) -> None:
    model, kind = model_of(case), case.rpartition("-")[2]
    batch = TwoClients(kind)["a"].train.take(torch.arange(4))
    scores = model.attention(perturbed(model.initial), batch, "auto")
    assert list(scores) == layer_tags(model)
    for score in scores.values():
        assert score.shape[0] == 4
        assert bool(((score >= 0) & (score <= 1 + 1e-5)).all())
    means = [float(score.mean()) for score in scores.values()]
    assert max(means) - min(means) > 1e-4


def test_attention_scores_match_the_attention_maps() -> None:
    """mpnet's own code returns maps, and xlm-roberta's attention is replaced: both score the first token."""
    for case in ("mpnet-text", "xlm-roberta-text"):
        model, inputs = model_of(case), inputs_of("text")
        params = perturbed(model.initial)
        batch = Batch(inputs, torch.zeros(4, dtype=torch.long))
        plain = module_of(case)
        plain.set_attn_implementation("eager")
        plain.load_state_dict(params, strict=False)
        maps = plain(**inputs, output_attentions=True).attentions
        for layer, score in model.attention(params, batch, "cls").items():
            expected = maps[int(layer.removeprefix("layer."))][..., 0].mean(-1)  # (example, head)
            assert torch.allclose(score, expected, atol=1e-5), (case, layer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "case"),
    [("fedfrozen", "deberta-v2-text"), ("safl", "deberta-v2-text"), ("safl", "t5-text"), ("safl", "swin-image")],
)
def test_fedfrozen_and_safl_conform_on_other_types(method: str, case: str) -> None:
    """The checked round above freezes queries and keys of every type."""
    model = model_of(case)
    built = fedfrozen(warmup=1) if method == "fedfrozen" else safl(k=2, probe=4)
    model = replace(model, initial=perturbed(model.initial))
    found = check_method(built, model, TwoClients(case.rpartition("-")[2]))
    assert found.bytes_up > 0


def test_wrong_tokens_for_a_type_are_refused_with_those_that_fit() -> None:
    swin, t5 = model_of("swin-image"), model_of("t5-text")
    with pytest.raises(ModelError, match=r"'cls' needs a first token .* swin lacks; set it to 'auto', 'salient'"):
        swin.attention(swin.initial, TwoClients("image")["a"].train.take(torch.arange(2)), "cls")
    with pytest.raises(ModelError, match=r"all tokens of swin are patches; set it to 'auto', 'salient'"):
        swin.attention(swin.initial, TwoClients("image")["a"].train.take(torch.arange(2)), "content")
    with pytest.raises(ModelError, match=r"'cls' needs a first token .* t5 lacks; set it to 'auto', 'content'"):
        t5.attention(t5.initial, TwoClients("text")["a"].train.take(torch.arange(2)), "cls")
