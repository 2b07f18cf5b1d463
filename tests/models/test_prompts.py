"""Frozen dual encoders with learned prompts, against transformers and written-out formulas."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dual_encoder_fixtures
import image_fixtures
import numpy as np
import pyarrow
import pytest
import torch
from helpers import final_params, play, toy_run
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from study_fixtures import load_script
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, CLIPVisionConfig, CLIPVisionModelWithProjection

from partita.core import serialization, tensors
from partita.core.model import Model, TagError
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.tensors import Tensors
from partita.data import load
from partita.engines.simulation import SimulationEngine
from partita.experiment.builder import build as build_experiment
from partita.experiment.config import parse
from partita.methods import NEEDS_DUAL_ENCODER, build
from partita.methods.pfeddc import pfeddc
from partita.models import ModelError
from partita.models.prompts.clip import SHAPES, clip
from partita.models.prompts.optimal_transport import sinkhorn
from partita.models.prompts.prompts import QUERY_OWNERS, fuse
from partita.testing.toy import ToyTransformer

KEY = Key(5)
CACHE = {"shots": 2, "alpha": 1.0, "beta": 5.5}
PIXELS = {"pixel_values": dual_encoder_fixtures.images().double()}
PROMPT = "a photo of a {}."
CLASS_NAMES = tuple(name.replace("_", " ") for name in dual_encoder_fixtures.CLASSES)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-6) -> bool:
    return torch.allclose(left.double(), right.double(), rtol=tolerance, atol=tolerance)


def perturbed(model: Model, size: float = 0.5) -> Tensors:
    """Parameters away from the initial values, whose zeros hide mistakes; the temperature stays."""
    return {
        name: value
        if name == "logit_scale"
        else value + size * torch.randn(value.shape, generator=(KEY / name).generator())
        for name, value in model.initial.items()
    }


def transformers_logits(pair: str, **more: Any) -> Tensor:
    """The logits computed by transformers alone."""
    tokenizer, module = dual_encoder_fixtures.tokenizer_of(pair), dual_encoder_fixtures.transformers_model(pair)
    # SigLIP reads the last token of texts that are padded to its length, and attends to the padding.
    padding: Any = {"padding": "max_length", "max_length": 16} if pair == "siglip" else {"padding": True}
    tokens = tokenizer([PROMPT.format(name) for name in CLASS_NAMES], **padding, return_tensors="pt")
    for unused in ("token_type_ids", *(["attention_mask"] if pair == "siglip" else [])):
        tokens.pop(unused, None)
    with torch.no_grad():
        # SigLIP's bias is the same for all classes, so it changes no prediction and no loss.
        bias = module.logit_bias if pair == "siglip" else 0
        return module(**PIXELS, **tokens, **more).logits_per_image - bias


# ---- the towers


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("pair", dual_encoder_fixtures.PAIRS)
def test_dual_encoder_logits_match_transformers(pair: str) -> None:
    towers = dual_encoder_fixtures.load_pair(pair)
    expected = transformers_logits(pair)
    assert expected.std(1).min() > 0.004, "classes can be told apart"
    assert close(towers(towers.initial, PIXELS).logits, expected)
    half = dual_encoder_fixtures.load_pair(pair, dtype="float32")
    assert close(half(half.initial, PIXELS).logits, expected, 1e-5)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("pair", dual_encoder_fixtures.PAIRS)
def test_empty_vision_prompts_change_nothing(pair: str) -> None:
    towers = dual_encoder_fixtures.load_pair(pair)
    model = towers.prompted("prompts", KEY, vision_tokens=0)
    assert torch.equal(model(model.initial, PIXELS).logits, towers(towers.initial, PIXELS).logits)
    empty = towers.encode_image(PIXELS["pixel_values"], torch.zeros(2, 0, towers.width("vision")))
    assert close(empty, towers.encode_image(PIXELS["pixel_values"]))


def test_class_names_are_tokenized_by_the_clip_tokenizer() -> None:
    towers, tokenizer = dual_encoder_fixtures.load_pair(), dual_encoder_fixtures.byte_pair_tokenizer()
    ids, seen = towers.tokenize([f"{name}." for name in CLASS_NAMES])
    expected = tokenizer([f"{name}." for name in CLASS_NAMES], padding=True, return_tensors="pt")
    assert torch.equal(ids, expected["input_ids"])
    assert torch.equal(seen, expected["attention_mask"].bool())
    assert tokenizer.convert_ids_to_tokens(ids[1].tolist())[1:4] == ["golden</w>", "eagle</w>", ".</w>"]
    table = dual_encoder_fixtures.transformers_model("clip").text_model.embeddings.token_embedding.weight
    assert torch.equal(towers.precomputed["token_embeddings"], table[ids].double())


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("pair", dual_encoder_fixtures.PAIRS)
def test_context_initialized_from_the_template_reads_the_same(pair: str) -> None:
    towers = dual_encoder_fixtures.load_pair(pair)
    model = towers.prompted("prompts", KEY, text_tokens=4, init_text="a photo of a")
    assert close(towers.text_features(model.initial["prompt.text.global"]), towers.precomputed["texts"])
    longer = towers.prompted("prompts", KEY, text_tokens=6, init_text="a photo of a").initial["prompt.text.global"]
    assert torch.equal(longer[2:], model.initial["prompt.text.global"])
    assert 0.005 < longer[:2].std() < 0.05, "and what the phrase leaves over is drawn"


def test_context_is_inserted_between_start_token_and_class_name() -> None:
    """Against the text tower of transformers, run on embeddings assembled by hand."""
    towers, module = dual_encoder_fixtures.load_pair(), dual_encoder_fixtures.transformers_model("clip")
    context = torch.randn(3, 12, generator=KEY.generator(), dtype=torch.float64)
    table = module.text_model.embeddings.token_embedding
    for place, name in enumerate(CLASS_NAMES):
        ids = dual_encoder_fixtures.byte_pair_tokenizer()(f"{name}.", return_tensors="pt")["input_ids"]
        row = torch.cat([table(ids[:, :1]), context[None], table(ids[:, 1:])], 1)
        stand_in = torch.full((1, row.shape[1]), 1)
        stand_in[0, -1] = module.text_model.eos_token_id
        hook = table.register_forward_hook(lambda *_, row=row: row)
        expected = module.get_text_features(input_ids=stand_in).pooler_output
        hook.remove()
        assert close(towers.text_features(context)[place], expected[0])


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("pair", dual_encoder_fixtures.PAIRS)
@pytest.mark.parametrize("depth", [1, 2])
def test_vision_prompts_match_a_written_out_forward_pass(pair: str, depth: int) -> None:
    towers = dual_encoder_fixtures.load_pair(pair)
    prompts = torch.randn(depth, 3, 16, generator=KEY.generator(), dtype=torch.float64)
    module = dual_encoder_fixtures.transformers_model(pair)
    tower, seen = module.vision_model, {}
    layers = tower.encoder.layers if hasattr(tower.encoder, "layers") else tower.encoder.layer
    behind, first = 2 if pair.startswith("registers") else 0, 0 if pair == "siglip" else 1
    project = getattr(module, "visual_projection", torch.nn.Identity())

    def enter(number: int) -> Any:
        def hook(layer: Any, given: Any) -> Any:
            states = given[0]
            seen[number] = states.shape[1]
            own = prompts[number].expand(len(states), 3, 16)
            rest = states[:, first:] if number == 0 else states[:, first + 3 :]
            return (torch.cat([states[:, :first], own, rest], 1), *given[1:])

        return hook

    for number in range(depth):
        layers[number].register_forward_pre_hook(enter(number))
    out = tower(**PIXELS)
    assert close(towers.encode_image(PIXELS["pixel_values"], prompts)[:, 0], project(out.pooler_output))
    assert seen == {
        0: first + behind + dual_encoder_fixtures.PATCHES,
        **({1: first + 3 + behind + dual_encoder_fixtures.PATCHES} if depth == 2 else {}),
    }
    every = out.last_hidden_state[:, first + 3 + behind :]
    every = tower.post_layernorm(every) if pair.startswith("clip") else every
    patches = towers.encode_image(PIXELS["pixel_values"], prompts, patches=True)
    assert patches.shape == (5, 1 + dual_encoder_fixtures.PATCHES, project(every).shape[-1])
    assert close(patches[:, 1:], project(every))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("pair", dual_encoder_fixtures.PAIRS)
def test_gray_vision_prompts_start_from_the_states_of_a_gray_image(pair: str) -> None:
    tower, entered = dual_encoder_fixtures.transformers_model(pair).vision_model, []
    layers = tower.encoder.layers if hasattr(tower.encoder, "layers") else tower.encoder.layer
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, given: entered.append(given[0][0]))
    tower(torch.zeros(1, 1, dual_encoder_fixtures.SIZE, dual_encoder_fixtures.SIZE, dtype=torch.float64))
    behind = 3 if pair.startswith("registers") else 0 if pair == "siglip" else 1
    patches = torch.stack(entered)[:, behind:]
    assert patches.shape == (2, dual_encoder_fixtures.PATCHES, 16)
    options = {"vision_tokens": 3, "depth": 2, "owners": ("global", "local")}
    gray, drawn = (
        dual_encoder_fixtures.load_pair(pair).prompted("prompts", KEY, **options, vision_init=v).initial
        for v in ("gray", "nothing")
    )
    for name in ("prompt.vision.global", "prompt.vision.local"):
        middle = 2 if pair == "siglip" else 1
        assert close(gray[name] - drawn[name], patches[:, [0, middle, 3]]), "at the ends, and one between"
        assert gray[name].dtype == torch.float32
    deeper = (
        dual_encoder_fixtures.load_pair(pair)
        .prompted("prompts", KEY, vision_tokens=3, vision_init="gray")
        .initial["prompt.vision.global"]
    )
    shallow = (
        dual_encoder_fixtures.load_pair(pair).prompted("prompts", KEY, vision_tokens=3).initial["prompt.vision.global"]
    )
    assert close(deeper - shallow, patches[:1, [0, middle, 3]]), "one layer takes the first of them"
    fewer = dual_encoder_fixtures.load_pair(pair).prompted("prompts", KEY, text_tokens=2, vision_init="gray").initial
    assert tensors.equal(
        fewer, dual_encoder_fixtures.load_pair(pair).prompted("prompts", KEY, text_tokens=2).initial
    ), "texts show nothing"


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("pair", dual_encoder_fixtures.PAIRS)
def test_prompts_drawn_like_tokens_have_their_mean_and_spread(pair: str) -> None:
    """With 4,000 prompts, the mean of each entry is within 6 standard errors, and so is its standard deviation."""
    towers, count = dual_encoder_fixtures.load_pair(pair), 4000
    tower = towers.module.text_model
    limit = tower.config.max_position_embeddings
    tower.config.max_position_embeddings = 2 * count  # the draw needs no positions
    try:
        drawn = towers.prompted(
            "prompts", KEY, text_tokens=count, vision_tokens=count, depth=2, vision_init="tokens", context_init="tokens"
        ).initial
    finally:
        tower.config.max_position_embeddings = limit
    patches = towers.gray_image_patches(2)  # (layer, patch, width)
    assert patches.shape == (2, dual_encoder_fixtures.PATCHES, 16)
    for name, tokens in ("prompt.text.global", towers.token_embeddings()), ("prompt.vision.global", patches):
        found, tokens = drawn[name].double(), tokens.double()
        spread = tokens.std(-2, correction=0)
        assert ((found.mean(-2) - tokens.mean(-2)).abs() <= 6 * spread / count**0.5 + 1e-7).all(), name
        assert ((found.std(-2) - spread).abs() <= 6 * spread / (2 * count) ** 0.5 + 1e-7).all(), name
        squares = [rows.square().sum(-1).mean(-1).sqrt() for rows in (found, tokens)]
        assert torch.allclose(*squares, rtol=0.1), f"{name}: so norms match"
    plain = towers.prompted("prompts", KEY, text_tokens=3, vision_tokens=3).initial
    assert all(0.005 < plain[f"prompt.{tower}.global"].std() < 0.05 for tower in ("text", "vision")), "as before"
    phrase = towers.prompted("prompts", KEY, text_tokens=6, init_text="a photo of a", context_init="tokens").initial
    assert torch.equal(
        phrase["prompt.text.global"][2:],
        towers.prompted("prompts", KEY, text_tokens=4, init_text="a photo of a").initial["prompt.text.global"],
    ), "a text replaces the draw"


@pytest.mark.parametrize(
    ("kind", "options"),
    [("transport", {"mass": 0.8, "smoothing": 0.1, "iterations": 3}), ("low-rank", {"rank": 1}), ("cache", CACHE)],
)
def test_other_contexts_are_drawn_like_tokens_too(kind: str, options: dict[str, Any]) -> None:
    towers = image_fixtures.tiny_clip("float32")
    own = towers.prompted(kind, KEY, text_tokens=2, context_init="tokens", **options).initial["prompt.text.global"]
    plain = towers.prompted("prompts", KEY, text_tokens=2, context_init="tokens").initial["prompt.text.global"]
    assert torch.equal(own, plain)


@pytest.mark.slow
def test_towers_are_frozen_in_one_precision_and_prompts_train_in_float32() -> None:
    towers = dual_encoder_fixtures.load_pair(dtype="bfloat16")
    assert not any(value.requires_grad for value in towers.module.parameters())
    assert {value.dtype for value in towers.module.parameters()} == {torch.bfloat16}
    assert towers.all_names() == {"logit_scale"}
    assert towers.initial["logit_scale"].dtype == torch.float32
    model = towers.prompted("prompts", KEY, text_tokens=2, vision_tokens=2, owners=("global", "local"), fusion="both")
    assert model.towers.module is towers.module, "held once"  # type: ignore[attr-defined]
    assert model.frozen_weights().keys() == towers.frozen_weights().keys() == towers.module.state_dict().keys()
    assert {value.dtype for value in model.initial.values()} == {torch.float32}
    params = {name: value.requires_grad_() for name, value in perturbed(model).items()}
    out = model(params, PIXELS)
    assert out.logits.dtype == torch.float32
    model.losses(out, torch.zeros(5, dtype=torch.long)).sum().backward()
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in params.values())
    wide = dual_encoder_fixtures.load_pair(dtype="float32")
    same = wide.prompted("prompts", KEY, text_tokens=2, vision_tokens=2, owners=("global", "local"), fusion="both")
    assert close(out.logits, same(perturbed(model), PIXELS).logits, 0.3), "the same up to the rounding of bfloat16"


# ---- fusion


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("fusion", QUERY_OWNERS)
def test_prompt_fusion_matches_torch_attention(fusion: str) -> None:
    towers = dual_encoder_fixtures.load_pair()
    model = towers.prompted(
        "prompts", KEY, text_tokens=3, vision_tokens=2, depth=2, owners=("global", "local"), fusion=fusion
    )
    params = perturbed(model)
    for tower in ("text", "vision"):
        shared, own = (params[f"prompt.{tower}.{owner}"] for owner in ("global", "local"))

        def attended(asking: str, tower: str = tower, shared: Tensor = shared, own: Tensor = own) -> Tensor:
            width = own.shape[-1]
            torchs = torch.nn.MultiheadAttention(width, 1, bias=False, batch_first=True)
            parts = [params[f"fusion.{tower}.{asking}.{part}"] for part in ("query", "key", "value", "output")]
            torchs.in_proj_weight.data = torch.cat(parts[:3])
            torchs.out_proj.weight.data = parts[3]
            here, there = (own, shared) if asking == "local" else (shared, own)
            batch = [value.view(-1, *value.shape[-2:]) for value in (here, there)]
            return here + torchs(batch[0], batch[1], batch[1])[0].view_as(here)

        expected = {
            "local_queries": lambda attended=attended: attended("local"),
            "global_queries": lambda attended=attended: attended("global"),
            "both": lambda attended=attended: (attended("local") + attended("global")) / 2,
            "mean": lambda shared=shared, own=own: (shared + own) / 2,
            "none": lambda shared=shared, own=own: torch.cat([shared, own], -2),
        }[fusion]()
        fused = fuse(params, tower, fusion)
        assert fused is not None
        assert close(fused, expected)


@pytest.mark.parametrize(("fusion", "owner"), [("local_queries", "local"), ("global_queries", "global")])
def test_initial_fusion_returns_the_querying_prompts_unchanged(fusion: str, owner: str) -> None:
    model = dual_encoder_fixtures.load_pair().prompted(
        "prompts", KEY, text_tokens=3, vision_tokens=2, owners=("global", "local"), fusion=fusion
    )
    for tower in ("text", "vision"):
        fused = fuse(model.initial, tower, fusion)
        assert fused is not None
        assert torch.equal(fused, model.initial[f"prompt.{tower}.{owner}"])


def test_global_prompts_get_a_first_gradient_only_with_a_nonzero_output() -> None:
    for output in (0.0, 1.0):
        options: dict[str, Any] = {
            "text_tokens": 3,
            "vision_tokens": 2,
            "owners": ("global", "local"),
            "fusion": "local_queries",
        }
        model = dual_encoder_fixtures.load_pair().prompted("prompts", KEY, output=output, **options)
        params = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
        model.losses(model(params, PIXELS), torch.zeros(5, dtype=torch.long)).sum().backward()
        for name in model.names("global"):
            gradient = params[name].grad
            assert gradient is not None
            assert (gradient.abs().max() > 0) == (output > 0)


def test_prompt_tags_separate_owners_towers_and_fusion() -> None:
    model = dual_encoder_fixtures.load_pair().prompted(
        "prompts", KEY, text_tokens=3, vision_tokens=2, owners=("global", "local"), fusion="both"
    )
    assert model.names("global") == {"prompt.text.global", "prompt.vision.global"}
    assert model.names("local") == {"prompt.text.local", "prompt.vision.local"}
    assert model.names("prompt") == model.names("global", "local")
    assert len(model.names("fusion")) == 2 * 2 * 4
    assert model.names("text") | model.names("vision") == model.all_names() - {"logit_scale"}
    assert not model.names("text") & model.names("vision")


def test_prompts_are_drawn_from_the_key_by_name() -> None:
    before = torch.get_rng_state()
    options = {"text_tokens": 8, "vision_tokens": 8, "owners": ("global", "local"), "fusion": "both"}
    one, same, other = (
        dual_encoder_fixtures.load_pair().prompted("prompts", Key(seed), **options).initial for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert tensors.equal(one, same)
    for name in one:
        if name.startswith("prompt"):
            assert 0.015 < one[name].std() < 0.025
            assert not torch.equal(one[name], other[name])
        assert name.endswith("output") == (torch.count_nonzero(one[name]) == 0)
    fewer = dual_encoder_fixtures.load_pair().prompted("prompts", Key(1), text_tokens=8).initial
    assert torch.equal(fewer["prompt.text.global"], one["prompt.text.global"]), "whatever else is asked for"


# ---- transport


def numpy_sinkhorn(cost: np.ndarray[Any, Any], mass: float, smoothing: float, iterations: int) -> np.ndarray[Any, Any]:
    """Unbalanced entropic transport as in the paper, one pair at a time in numpy."""
    patches, texts = cost.shape
    kernel = np.exp(-cost / smoothing)
    left, right = np.ones(patches), np.ones(texts)
    for _ in range(iterations):
        for patch in range(patches):
            left[patch] = min(1.0, 1 / patches / sum(kernel[patch] * right))
        for text in range(texts):
            right[text] = mass / texts / sum(kernel[:, text] * left)
    return np.diag(left) @ kernel @ np.diag(right)


@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
def test_sinkhorn_matches_numpy(mass: float) -> None:
    cost = torch.rand(2, 3, 6, 2, generator=KEY.generator(), dtype=torch.float64)
    plan = sinkhorn(cost, mass, 0.1, 400)
    for place in np.ndindex(2, 3):
        assert np.allclose(plan[place], numpy_sinkhorn(cost[place].numpy(), mass, 0.1, 400), atol=1e-9)
    assert close(plan.sum(-2), torch.full((2, 3, 2), mass / 2, dtype=torch.float64), 1e-12)
    assert (plan.sum(-1) <= 1 / 6 + 1e-6).all()
    assert mass == 1.0 or (plan.sum(-1) < 1 / 6 - 1e-3).any(), "where less is taken, some patches give less"


def test_sinkhorn_behaves_at_its_limits() -> None:
    cost = torch.rand(6, 2, generator=KEY.generator(), dtype=torch.float64)
    assert close(sinkhorn(cost, 0.6, 1e6, 50), torch.full((6, 2), 0.05, dtype=torch.float64)), "smoothed to a mean"
    dear = cost + torch.tensor([5.0, 0, 0, 0, 0, 0], dtype=torch.float64).unsqueeze(1)
    assert sinkhorn(dear, 0.5, 0.05, 200)[0].sum() < 1e-9, "what is far from all texts is left out"
    assert torch.isfinite(sinkhorn((40 * cost).float(), 0.8, 0.01, 50)).all(), "no kernel vanishes as a whole"


# ---- training


def test_prompt_run_leaves_towers_and_temperature_unchanged() -> None:
    towers = image_fixtures.tiny_clip("float32")
    before = {name: value.clone() for name, value in towers.module.state_dict().items()}
    held = {name: value.clone() for name, value in towers.precomputed.items()}
    method = pfeddc(text_tokens=2, vision_tokens=2, depth=2, fusion="both")
    assert method.extend
    model = method.extend(towers, KEY)
    played = play(toy_run(method, 2, SGD(momentum=0.9)), model, image_fixtures.FOUR, block=2)
    assert tensors.equal(before, towers.module.state_dict())
    assert tensors.equal(held, towers.precomputed)
    assert played[-1].server.params["logit_scale"] is model.initial["logit_scale"]
    assert not torch.equal(played[-1].server.params["prompt.text.global"], model.initial["prompt.text.global"])


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("name", NEEDS_DUAL_ENCODER)
def test_prompt_traffic_is_the_size_of_shared_tensors_and_headers(name: str) -> None:
    method = build(name)
    assert method.extend
    model = method.extend(image_fixtures.tiny_clip(), KEY)
    shared = {each: model.initial[each] for each, tags in model.tags.items() if "global" in tags}
    [played] = play(toy_run(method, 1, steps=1), model, image_fixtures.FOUR)
    size = sum(value.numel() * 4 for value in shared.values())
    up, down = (sum(way.values()) for way in (played.traffic.up, played.traffic.down))
    envelope = {
        way: len(serialization.pack({slot: shared})) - size for way, slot in (("up", "delta"), ("down", "params"))
    }
    clients = len(image_fixtures.FOUR.clients)
    if not shared:
        assert (up, down) == (0, 0)
    else:
        assert (up, down) == (clients * (size + envelope["up"]), clients * (size + envelope["down"]))


@pytest.fixture(scope="module")
def wide_clip() -> Model:
    """As wide as ViT-B/16, with one layer and few words, which prompts of one layer do not depend on."""
    sight, reading, common = SHAPES["b16"]
    shallow = ({**sight, "num_hidden_layers": 1}, {**reading, "num_hidden_layers": 1, "vocab_size": 9}, common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "b16", shallow)
        pictures = image_fixtures.Images(torch.zeros(1, 3, 32, 32), torch.zeros(1), channels=3, size=32)
        return clip(pictures, KEY, shape="b16")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NEEDS_DUAL_ENCODER)
def test_method_cards_state_the_bytes_for_vit_b16(name: str, wide_clip: Model) -> None:
    method = build(name)
    assert method.extend
    model = method.extend(wide_clip, KEY)
    shared = {each: model.initial[each] for each, tags in model.tags.items() if "global" in tags}
    card = (Path(build.__code__.co_filename).parent / f"{name}.md").read_text()
    if shared:
        assert f"sends {len(serialization.pack({'delta': shared})):,} bytes per round" in " ".join(card.split())
    if name == "pfeddc":
        kept = sum(model.initial[each].numel() for each in model.names("local", "fusion"))
        text = " ".join(card.split())
        assert f"{sum(4 * each.numel() for each in shared.values()):,} of them the shared prompts" in text
        assert f"keeps {kept:,} parameters" in text


def test_state_of_an_absent_client_does_not_change() -> None:
    method = pfeddc(text_tokens=2, vision_tokens=2)
    assert method.extend
    model = method.extend(image_fixtures.tiny_clip("float32"), KEY)
    run = toy_run(method, 8, SGD(momentum=0.9), cohort=1)
    engine = SimulationEngine(run, model, image_fixtures.FOUR)
    states: dict[str, Tensors] = {}
    away: dict[str, int] = {}
    for each in rounds(run, model, engine):
        for client in image_fixtures.FOUR.clients:
            state = engine.store.load(client, each.number + 1)
            parts = {"personal": state.personal, **state.memory}
            now = {f"{slot}/{name}": value for slot, part in parts.items() for name, value in part.items()}
            if client not in each.cohort:
                assert tensors.equal(now, states.get(client, {})), "nobody touches what is a client's own"
                away[client] = away.get(client, 0) + 1
            elif client in states:
                assert not tensors.equal(now, states[client])
            if now:
                assert any(slot.startswith("optimizer") for slot in now)
                states[client] = now
    assert max(away.values()) >= 5
    assert {client for client in states if away.get(client)}, "someone came back, or waits with what it has"


SMALL_CONFIG = {
    "model": {"name": "clip", "shape": "tiny"},
    "data": {"name": "synthetic", "examples": 40, "test_examples": 8, "size": 8},
    "split": {"name": "iid", "clients": 2},
    "training": {"batch_size": 7},
    "rounds": 2,
}


def test_config_builds_prompted_models() -> None:
    raw = {
        **SMALL_CONFIG,
        "method": {"name": "pfeddc", "text_tokens": 2, "vision_tokens": 2},
        "model": {"name": "clip", "path": dual_encoder_fixtures.folder("clip"), "template": "a photo of a {}."},
    }
    model = build_experiment(parse(raw)).model
    assert model.names("global") == {"prompt.text.global", "prompt.vision.global"}
    assert model.initial["prompt.text.global"].shape == (2, 12), "as wide as the tower in the folder"
    random = build_experiment(parse({**raw, "model": {"name": "clip", "shape": "tiny"}})).model
    assert random.initial["prompt.text.global"].shape == (2, 16)


TEXT_ONLY = [name for name in NEEDS_DUAL_ENCODER if name not in ("vpfl", "pfeddc")]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["zero-shot", *TEXT_ONLY])
def test_text_prompt_methods_encode_each_image_once_with_the_cache(name: str) -> None:
    played, looked = {}, {}
    for once in (False, True):
        experiment = build_experiment(
            parse({**SMALL_CONFIG, "method": {"name": name}, "engine": {"cache_frozen": once}})
        )
        model: Any = experiment.model
        seen: list[int] = []
        module = getattr(model, "towers", model).module
        module.vision_model.embeddings.register_forward_hook(lambda _, given, __, seen=seen: seen.append(len(given[0])))
        final = final_params(play(experiment.run, model, experiment.federation))
        test = experiment.federation.task.test.take(torch.arange(8))
        played[once] = {**final, "logits": model({**model.initial, **final}, test.inputs).logits}
        looked[once] = sum(seen)
    assert tensors.equal(*played.values())
    assert looked[True] == (0 if name == "zero-shot" else 40) + 8, "each image of either part once"
    train = sum(len(experiment.federation[client].train) for client in experiment.federation.clients)
    passes = {"zero-shot": 0, "pfedprompt": 3}.get(name, 2)  # two rounds; pFedPrompt also fills its cache
    assert looked[False] == passes * train + 8


def test_cache_frozen_with_vision_prompts_is_refused() -> None:
    for method in ({"name": "vpfl"}, {"name": "pfeddc", "text_tokens": 2}):
        with pytest.raises(ModelError, match=r"vision prompts change every layer .* set it to false"):
            build_experiment(parse({**SMALL_CONFIG, "method": method, "engine": {"cache_frozen": True}}))
    text_only = {"name": "pfeddc", "vision_tokens": 0, "text_tokens": 2}
    build_experiment(parse({**SMALL_CONFIG, "method": text_only, "engine": {"cache_frozen": True}}))


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "clip takes either a path or a shape"),
        ({"path": "x", "shape": "tiny"}, "clip takes either a path or a shape"),
        ({"shape": "tiny", "template": "a photo"}, r"template is 'a photo'; it must have exactly one \{\}"),
        ({"path": "/no/such folder"}, "there is no folder '/no/such folder'"),
    ],
)
def test_invalid_clip_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        clip(dual_encoder_fixtures.task(), KEY, **options)


def test_unsuitable_clip_folder_is_refused(tmp_path: Path) -> None:
    image_fixtures.small_vit().save_pretrained(image_fixtures.small_vit().initial, tmp_path)
    with pytest.raises(ModelError, match="is a 'vit', which is not a pair of an image tower and a text tower"):
        clip(dual_encoder_fixtures.task(), KEY, path=str(tmp_path))
    with pytest.raises(ModelError, match="takes images with 1 channels, but the task's have 3"):
        clip(
            image_fixtures.Images(PIXELS["pixel_values"], torch.zeros(5), channels=3, size=8),
            KEY,
            path=dual_encoder_fixtures.folder("clip"),
        )
    bare = dual_encoder_fixtures.copy_without(
        dual_encoder_fixtures.folder("clip"), "tokenizer.json", "tokenizer_config.json"
    )
    with pytest.raises(ModelError, match=r"has no tokenizer, but class names need one; copy the files of"):
        clip(dual_encoder_fixtures.task(), KEY, path=bare)
    with pytest.raises(ModelError, match=r"gives the same tokens for 'cat' and 'cat'; .*classes with different names"):
        clip(dual_encoder_fixtures.task(("cat", "dog", "cat")), KEY, path=dual_encoder_fixtures.folder("clip"))
    with pytest.raises(ModelError, match=r"longest class text has 18 tokens, but clip takes at most 16"):
        clip(dual_encoder_fixtures.task(("cat", "wonderfully")), KEY, path=dual_encoder_fixtures.folder("clip"))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("prompt", {}, "unknown kind of prompts 'prompt'; did you mean 'prompts'"),
        ("prompts", {"fusion": "locl_queries"}, "fusion is 'locl_queries'; did you mean 'local_queries'"),
        ("prompts", {"vision_tokens": 2, "depth": 3}, "depth is 3, but clip has 2 layers; set it to 1 to 2"),
        ("prompts", {"text_tokens": -1}, "text_tokens is -1 and vision_tokens is 0"),
        ("prompts", {"text_tokens": 3, "init_text": "a photo of a"}, "init_text 'a photo of a' has 4 tokens"),
        ("prompts", {"text_tokens": 12}, "has 17 tokens, but clip takes at most 16; use a shorter context"),
        ("prompts", {"vision_tokens": 1, "vision_init": "grey"}, "vision_init is 'grey'; did you mean 'gray'"),
        ("prompts", {"text_tokens": 1, "context_init": "token"}, "context_init is 'token'; did you mean 'tokens'"),
        ("low-rank", {"text_tokens": 4, "rank": 5}, "rank is 5, but a context is 4 x 12; use a rank from 1 to 4"),
        (
            "transport",
            {"text_tokens": 0, "mass": 1.0, "smoothing": 0.1, "iterations": 1},
            "text_tokens is 0; set it to 1 or more",
        ),
    ],
)
def test_invalid_prompt_options_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        dual_encoder_fixtures.load_pair().prompted(kind, KEY, **options)


def test_models_without_prompts_are_refused() -> None:
    with pytest.raises(TagError, match=r"does not support prompts; use a two-tower model, model\.name = 'clip'"):
        ToyTransformer().prompted("prompts", KEY)


def test_random_towers_refuse_unknown_words() -> None:
    towers = image_fixtures.tiny_clip()
    with pytest.raises(ModelError, match=r"random towers have no token for 'picture', only for: \., a, cat"):
        towers.prompted("prompts", KEY, text_tokens=8, init_text="a picture of")
    assert math.isclose(float(functional.normalize(towers.precomputed["texts"]).norm()), math.sqrt(3), rel_tol=1e-6)


# ---- studies


@pytest.mark.slow
def test_alignment_study_aligns_two_towers(tmp_path: Path) -> None:
    align = load_script("backbone/align")
    result = align.main(["--tiny", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "pair" / "alignment.json").read_text()) == result
    assert result["names"] == ["blue", "green", "grey", "red", "white"]
    pair, sight = (load_file(tmp_path / name / "model.safetensors") for name in ("pair", "images"))
    assert all(torch.equal(pair[f"vision_model.{name}"], value.half()) for name, value in sight.items()), "images stay"
    texts, images = (torch.randn(*shape, generator=KEY.generator()) for shape in ((1, 5, 16), (20, 16)))
    images, labels = functional.normalize(images), torch.arange(20) % 5
    means = align.prototypes(images, labels, 5)
    weight = align.fit(texts, means, 1e-6)
    found = functional.normalize(texts[0] @ weight.T) @ means.T
    assert torch.equal(found.argmax(1), torch.arange(5)), "each text finds the images of its class"
    assert abs(float((texts[0] @ weight.T).mean(0).norm())) < 1e-4, "and what texts share says nothing"
    spread = align.telling(images, labels)
    assert close(functional.normalize(images).mean(0) @ spread.T, torch.zeros(16), 1e-4)
    scale = align.temperature(texts[0] @ weight.T, images, labels)
    cosines = images @ functional.normalize(texts[0] @ weight.T).T
    losses = [functional.cross_entropy(step.exp() * cosines, labels) for step in (scale - 0.1, scale, scale + 0.1)]
    assert losses[1] <= min(losses)
    assert not align.learnable("brown_bears", ["bear"])
    assert not align.learnable("car_side", ["automobile"])
    assert align.learnable("car_side", ["bear"])


@pytest.mark.slow
def test_alignment_study_resizes_a_clip_tower(tmp_path: Path) -> None:
    align = load_script("backbone/align")
    settings = replace(align.make_tiny(tmp_path), images=str(tmp_path / "clip"))
    shape: Any = {**dual_encoder_fixtures.VISION_CONFIG, "num_channels": 3, "projection_dim": 12}
    tower = CLIPVisionModelWithProjection(CLIPVisionConfig(**shape))
    tower.eval().save_pretrained(settings.images)
    for size in (8, 16):
        pixels = torch.randn(2, 3, size, size, generator=KEY.generator())
        expected = tower(pixels, interpolate_pos_encoding=True).image_embeds
        pair, _, _ = align.towers(replace(settings, size=size))
        pair.save_pretrained(tmp_path / str(size))
        back = AutoModel.from_pretrained(tmp_path / str(size)).eval()
        assert close(back.visual_projection(back.vision_model(pixels).pooler_output), expected, 1e-4)


@pytest.mark.slow
def test_alignment_study_cuts_public_images_out_of_the_data(tmp_path: Path) -> None:
    align = load_script("backbone/align")
    settings = replace(align.make_tiny(tmp_path), public=1)
    task = load("images", Key(0), path=tmp_path / "test", size=8)
    rows = align.public_rows(task, 1, Key(settings.seed))
    assert task.train.targets[rows].tolist() == [0, 1], "one of each class"
    # All images of a class are copies of each other here: make them differ, and leave one copy of a public image.
    table = parquet.read_table(tmp_path / "test" / "train.parquet")
    images = table["image"].to_pylist()
    for place, image in enumerate(images):
        image["bytes"] += bytes([place])  # what follows the end of a PNG is not read
    twin = next(row for row in range(len(images)) if row not in rows.tolist())
    images[twin]["bytes"] = images[int(rows[0])]["bytes"]
    column = pyarrow.array(images, table.schema.field("image").type)
    changed = table.set_column(table.schema.get_field_index("image"), table.schema.field("image"), column)
    parquet.write_table(changed, tmp_path / "test" / "train.parquet")
    result = align.align(settings, tmp_path / "pair")
    facts = result["public"]["cut"]["test"]
    rest = parquet.read_table(tmp_path / "pair" / ".." / "rest" / "test-pair" / "train.parquet")
    left = {image["bytes"] for image in rest["image"].to_pylist()}
    assert not left & {images[row]["bytes"] for row in facts["rows"]}, "no client can hold a public image or a copy"
    assert left | {images[row]["bytes"] for row in facts["rows"]} == {image["bytes"] for image in images}
    assert (facts["rows"], facts["copies_in_train"]) == (rows.tolist(), 1)
    assert facts["rows_left"] == len(rest) == len(images) - len(facts["rows"]) - facts["copies_in_train"]
    assert rest.schema.metadata == table.schema.metadata, "with the names of the classes"
    reloaded = load("images", Key(0), path=tmp_path / "rest" / "test-pair", size=8)
    assert reloaded.classes == task.classes
    assert result["names"][-2:] == ["black", "yellow"]
    assert result["zero_shot"]["test"]["accuracy"] == 1.0, "it has seen one image of each class"
    fewer = align.write_rest(tmp_path / "test", rows, tmp_path / "fewer", (3, 2))
    written = parquet.read_table(tmp_path / "fewer" / "train.parquet")
    assert written.equals(rest.slice(0, 3)), "the first of what is left"
    assert parquet.read_table(tmp_path / "fewer" / "test.parquet").num_rows == 2
    assert (fewer["rows_left"], fewer["rows_written"]) == (facts["rows_left"], 3)


@pytest.mark.slow
def test_weights_are_packed_without_loss(tmp_path: Path) -> None:
    pack = load_script("backbone/pack")
    drawn = torch.Generator().manual_seed(0)
    whole = torch.randint(-127, 128, (64, 96), generator=drawn).float()
    whole[:, 0] = 127
    steps = torch.rand(64, 1, generator=drawn) / 100 + 1e-4
    tensors_before = {
        "eight": whole * steps,
        "half": torch.randn(40, 8, generator=drawn).half().float(),
        "single": torch.randn(40, 8, generator=drawn),
        "empty_row": torch.zeros(4, 4),
        "numbers": torch.arange(5),
    }
    (tmp_path / "model").mkdir()
    save_file(tensors_before, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    small = {name: pack.packed(name, value) for name, value in tensors_before.items()}
    assert sorted(small["eight"]) == ["eight.codes", "eight.steps"]
    assert small["eight"]["eight.codes"].dtype == torch.int8
    assert small["half"]["half"].dtype == torch.float16
    assert small["single"]["single"].dtype == torch.float32
    pack.pack(tmp_path / "model", tmp_path / "parts", 60)
    pack.main(["unpack", str(tmp_path / "parts"), "--out", str(tmp_path / "again")])
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert after.keys() == tensors_before.keys()
    for name, value in tensors_before.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value), name
    assert (tmp_path / "again" / "config.json").read_text() == "{}"


@pytest.mark.slow
def test_membership_study_reports_both_methods(tmp_path: Path) -> None:
    result = load_script("prompts/membership").main(
        ["--tiny", "--seeds", "2", "--rounds", "1", "--out", str(tmp_path / "m.json")]
    )
    assert json.loads((tmp_path / "m.json").read_text()) == result
    arms = [(row["method"], row["knows"], row["attack"]) for row in result["summary"]]
    attacks = ("loss", "update")
    assert arms == [
        *(("fedavg", "what travels", attack) for attack in attacks),
        *(("pfeddc", knows, attack) for knows in ("own parts too", "what travels") for attack in attacks),
    ]
    assert all(0 <= row[figure] <= 1 for row in result["summary"] for figure in ("auc", "true_at_1%"))
    sent = {row["method"]: row["parameters_sent"] for row in result["runs"]}
    assert sent["pfeddc"] == 2 * 16 + 2 * 32 < sent["fedavg"], "of pFedDC, the shared prompts"
