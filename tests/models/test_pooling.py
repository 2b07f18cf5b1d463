"""Text encoders whose head reads the mean of all tokens, and the tag of the pooler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architecture_fixtures import make_case, make_model, module_of, perturbed, random_texts
from example_fixtures import write_encoder
from test_export import text_model

from partita import models
from partita.core.rng import Key
from partita.models import ModelError
from partita.models.architectures import ARCHITECTURES, Pooling
from partita.models.frozen_cache import FrozenForward
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module

ENCODERS = ["bert-text", "roberta-text", "electra-text", "distilbert-text"]


@pytest.mark.parametrize("case", ENCODERS)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "unit_mean"])
def test_mean_pooling_equals_the_masked_mean_of_transformers_states(case: str, left: bool, pooling: Pooling) -> None:
    plain = make_case(case).plain
    model = make_model(case, pooling=pooling)
    params = {name: make_case(case).params[name] for name in model.initial}
    texts = random_texts(2, left)
    out = model(params, texts)
    with torch.no_grad():
        states = plain.base_model(**texts).last_hidden_state
    rows = []
    for row, mask in zip(states, texts["attention_mask"], strict=True):
        kept = [state for state, real in zip(row, mask.tolist(), strict=True) if real]
        rows.append(sum(kept[1:], kept[0]) / len(kept))
    features = torch.stack(rows)
    if pooling == "unit_mean":
        features = features / features.square().sum(-1, keepdim=True).sqrt()
    assert torch.allclose(out.features, features, atol=1e-5)  # type: ignore[arg-type]
    with torch.no_grad():
        if case == "distilbert-text":
            expected = plain.classifier(torch.relu(plain.pre_classifier(features)))
        else:
            expected = plain.classifier(features if case == "bert-text" else features[:, None])
    assert torch.allclose(out.logits, expected, atol=1e-5)
    assert not torch.allclose(out.logits, make_case(case).model(make_case(case).params, texts).logits, atol=1e-3)


def test_mean_pooling_without_a_mask_is_the_plain_mean() -> None:
    model = make_model("bert-text", pooling="mean")
    params = perturbed(model.initial)
    ids = random_texts(0)["input_ids"]
    whole = model(params, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert torch.allclose(model(params, {"input_ids": ids}).logits, whole.logits, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "unit_mean"])
def test_mean_pooling_ignores_padding(pooling: Pooling) -> None:
    model = make_model("bert-text", pooling=pooling)
    params, texts = perturbed(model.initial), random_texts(1)
    wider = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in texts.items()}
    assert torch.allclose(model(params, texts).logits, model(params, wider).logits, atol=1e-5)


def test_mean_pooling_has_no_pooler_and_a_linear_head() -> None:
    model = make_model("bert-text", frozen=("base",), pooling="mean")
    assert model.initial.keys() == {"classifier.weight", "classifier.bias"}
    assert not any("pooler" in name for name in [*model.initial, *model.frozen_tags])


def test_mean_pooling_trains_on_cached_states() -> None:
    model = make_model("bert-text", frozen=("base",), pooling="mean")
    texts = random_texts(1)
    layers = model.module.base_model.get_submodule("encoder.layer")
    states = FrozenForward(model, list(layers)[-1])(texts)  # type: ignore[call-overload]
    mask = texts["attention_mask"].unsqueeze(-1)
    features = (states * mask).sum(1) / mask.sum(1)
    assert torch.allclose(model(model.initial, texts).features, features, atol=1e-5)  # type: ignore[arg-type]


def test_features_of_length_one_bound_the_gradient_of_a_linear_head() -> None:
    model = make_model("bert-text", frozen=("base",), pooling="unit_mean")
    texts = random_texts(1)
    for scale in (0.1, 30.0):  # weights under which examples are fitted, and weights under which they are far off
        params = {name: (scale * value).requires_grad_() for name, value in perturbed(model.initial).items()}
        out = model(params, texts)
        assert torch.allclose(out.features.norm(dim=-1), torch.ones(len(out.logits)), atol=1e-5)  # type: ignore[union-attr]
        for row in out.logits:
            loss = torch.nn.functional.cross_entropy(row, row.detach().argmin())
            gradient = torch.autograd.grad(loss, [*params.values()], retain_graph=True)
            # |p - y| <= sqrt(2), and a feature of length 1 beside the bias's input of 1 has a length of sqrt(2)
            assert sum(float(part.square().sum()) for part in gradient) <= 4 + 1e-4


@pytest.mark.parametrize("case", ["bert-tokens", "llama-text", "vit-image"])
@pytest.mark.parametrize("pooling", ["mean", "unit_mean"])
def test_mean_pooling_is_refused_where_it_has_no_meaning(case: str, pooling: Pooling) -> None:
    with pytest.raises(ModelError, match=f"pooling = '{pooling}' is for text classification with one of bert, distilb"):
        make_model(case, pooling=pooling)


def test_mean_pooling_is_no_folder_of_transformers(tmp_path: Path) -> None:
    task, model, _ = text_model(tmp_path)
    path = str(write_encoder(tmp_path / "other"))
    mean = models.build("pretrained", task, Key(0), path=path, pooling="unit_mean")
    assert isinstance(mean, FunctionalModel)
    adapted = mean.low_rank(2, 4.0, ("query",), Key(1))
    for each in (mean, adapted):
        with pytest.raises(ModelError, match="reads a mean of all tokens"):
            each.save_pretrained(each.initial, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    model.save_pretrained(model.initial, tmp_path / "saved")


def test_pooler_is_a_part_of_the_head_with_a_tag_of_its_own() -> None:
    model = make_model("bert-text")
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert model.names("pooler") == pooler
    assert model.names("head") == pooler | {"classifier.weight", "classifier.bias"}
    alone = from_module("bert", module_of("bert-text"), ("base", "pooler"))
    assert alone.initial.keys() == {"classifier.weight", "classifier.bias"}
    assert {name for name, row in ARCHITECTURES.items() if row.pooling} == {"bert", "roberta", "electra", "distilbert"}
