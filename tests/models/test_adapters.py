"""Adapters against plain PEFT and transformers: forward passes, blocks, dropout, ranks, saved folders and errors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_fixtures import Case, class_of, inputs_of, kind_of, make_model, noise
from helpers import no_vmap_fallback
from image_fixtures import adapted_vit, small_vit
from peft import PeftModel
from torch import Tensor

from partita.core import tensors
from partita.core.data import EXAMPLE_SEEDS
from partita.core.model import TagError, role_tag
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.adapter_options import AdapterOptions
from partita.models.peft_adapters import AdaptedModel

CASES = ("llama-lm", "llama-text", "gpt2-lm", "bert-text", "vit-image", "qwen3-lm", "distilbert-tokens")
KINDS = ("lora", "lokr", "hra", "miss", "ia3")
LORA = {"rank": 4, "alpha": 6.0, "roles": ("query", "value", "mlp")}
OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True, "roles": ("mlp",)},
    "ranks": {"ranks": (2, 4, 1)},
    "output": {"roles": ("key", "output")},
}


def base_of(case: str, **options: Any) -> Any:
    """A model away from its initialization, whose zeros and ones hide mistakes."""
    model = make_model(case, **options)
    model.initial.update({name: value + 0.3 * noise(3, *value.shape) for name, value in model.initial.items()})
    return model


def adapted(case: str, kind: str = "lora", base: Any = None, **options: Any) -> AdaptedModel:
    model = (base or base_of(case)).adapted(kind, Key(1), **{**LORA, **options})
    assert isinstance(model, AdaptedModel)
    return model


def perturbed(params: Tensors, seed: int = 5) -> Tensors:
    return {
        name: value + 0.3 * torch.randn(value.shape, generator=(Key(seed) / name).generator())
        for name, value in params.items()
    }


def batch_of(case: str) -> Tensors:
    return inputs_of(Case(None, {}, None, kind_of(case)))  # type: ignore[arg-type]


def close(left: Tensor, right: Tensor, bound: float = 1e-5) -> bool:
    return torch.allclose(left, right, rtol=0, atol=bound * max(1.0, float(right.abs().max())))


def plain_logits(case: str, module: Any) -> Tensor:
    inputs = batch_of(case)
    with torch.no_grad():
        logits: Tensor = module(**inputs).logits
    return logits if "attention_mask" not in inputs or logits.ndim < 3 else logits * inputs["attention_mask"][..., None]


def own_logits(case: str, model: Any, params: Tensors) -> Tensor:
    inputs = batch_of(case)
    logits: Tensor = model(params, inputs).logits
    return logits if "attention_mask" not in inputs or logits.ndim < 3 else logits * inputs["attention_mask"][..., None]


# What trains


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("case", CASES)
def test_everything_but_the_adapter_and_a_task_head_is_frozen(case: str) -> None:
    base = base_of(case)
    model = adapted(case, base=base)
    factors = model.names("lora")
    assert {name.partition(".lora_")[2] for name in factors} == {"A.weight", "B.weight"}
    assert model.names("lora_A") | model.names("lora_B") == factors
    language = case.endswith("-lm")
    heads = frozenset() if language else base.names("head")
    assert model.all_names() == factors | heads
    assert model.frozen_tags.keys() == base.initial.keys() - heads
    assert adapted(case, base=base, head=False).all_names() == factors
    assert {role_tag(model.tags[name]) for name in factors} == {"lora"}, "whatever the role of the weight"
    shapes = {tuple(value.shape) for name, value in model.initial.items() if name.endswith("lora_A.weight")}
    assert all(shape[0] == 4 for shape in shapes)


@pytest.mark.parametrize("case", CASES)
def test_untrained_adapter_computes_what_its_base_computes(case: str) -> None:
    base = base_of(case)
    before = base(base.initial, batch_of(case)).logits
    for kind in KINDS if case == "llama-lm" else ("lora",):
        model = adapted(case, kind, base)
        assert close(model(model.initial, batch_of(case)).logits, before), kind
    assert torch.equal(base(base.initial, batch_of(case)).logits, before), "the base can still be used"


def test_frozen_values_are_shared_with_the_base_or_cast_once() -> None:
    base = make_model("llama-lm")
    model = adapted("llama-lm", base=base)
    held = {value.data_ptr() for value in model.module.parameters()}
    assert held == {value.data_ptr() for value in base.initial.values()}
    half = adapted("llama-lm", base=make_model("llama-lm", dtype=torch.bfloat16))
    assert {value.dtype for value in half.module.parameters()} == {torch.bfloat16}
    assert {value.dtype for value in half.initial.values()} == {torch.float32}
    assert torch.isfinite(half(half.initial, batch_of("llama-lm")).logits).all()


def test_initial_values_depend_on_the_key_only() -> None:
    base = base_of("llama-lm")
    state = torch.get_rng_state()
    for kind in KINDS:
        one, same, other = (base.adapted(kind, Key(seed), **LORA).initial for seed in (1, 1, 2))
        assert tensors.equal(one, same)
        assert (kind in ("ia3", "miss")) == tensors.equal(one, other), "these two start with constants"
        torch.randn(3)  # the global state differs
    torch.set_rng_state(state)
    base.adapted("lokr", Key(1), **LORA)
    assert torch.equal(state, torch.get_rng_state())


# Under vmap


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("case", "kind", "options"),
    [(case, "lora", {}) for case in CASES]
    + [("llama-lm", kind, {}) for kind in KINDS]
    + [("llama-text", "lora", OPTIONS[name]) for name in OPTIONS]
    + [("gpt2-lm", "lora", OPTIONS["output"]), ("gpt2-lm", "ia3", {"roles": ("mlp",)})],
)
def test_clients_in_a_block_agree_with_clients_alone(case: str, kind: str, options: dict[str, Any]) -> None:
    model, inputs = adapted(case, kind, **options), batch_of(case)
    both = [perturbed(model.initial, seed) for seed in (5, 6)]
    stacked = {name: torch.stack([one[name] for one in both]) for name in model.initial}
    with no_vmap_fallback():
        lifted = torch.vmap(lambda own: model(own, inputs).logits)(stacked)
        grads = torch.vmap(torch.func.grad(lambda own: model(own, inputs).logits.square().sum()))(stacked)
    for place, one in enumerate(both):
        assert close(lifted[place], model(one, inputs).logits)
        alone = torch.func.grad(lambda own: model(own, inputs).logits.square().sum())(one)
        assert all(close(grads[name][place], alone[name], 1e-4) for name in alone)
    assert not close(lifted[0], lifted[1], 1e-3), "the adapter matters"
    assert all(bool(value.abs().max() > 0) for name, value in grads.items()), "and all of it trains"


# Saved folders


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("case", "kind", "options"),
    [(case, "lora", {}) for case in CASES]
    + [("llama-lm", kind, {}) for kind in KINDS if kind != "lora"]
    + [(case, "lora", OPTIONS[name]) for case in ("llama-text", "gpt2-lm") for name in OPTIONS if name != "lora"]
    + [("gpt2-lm", "lora", {"rslora": True, "ranks": {"a": 1}})],
)
def test_peft_loads_the_saved_adapter_with_equal_logits(
    case: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = base_of(case)
    model = adapted(case, kind, base, **options)
    params = perturbed(model.initial)
    base.save_pretrained(base.initial, tmp_path / "base")
    model.save_pretrained(params, tmp_path / "adapter")
    logits = own_logits(case, model, params)

    def load(folder: Path) -> Any:
        return class_of(case).from_pretrained(folder, attn_implementation="eager").eval()

    plain = load(tmp_path / "base")
    assert not close(plain_logits(case, plain), logits, 1e-2), "the adapter matters"
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert close(plain_logits(case, loaded), logits)
    model.save_merged(params, tmp_path / "merged")
    assert close(plain_logits(case, load(tmp_path / "merged")), logits, 5e-5)
    assert torch.equal(own_logits(case, model, params), logits), "saving changes nothing"


# Dropout


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"ranks": (2, 4)}], ids=["lora", "dora", "ranks"])
def test_dropout_of_an_adapter_is_drawn_from_the_seeds_of_the_examples(options: dict[str, Any]) -> None:
    inputs = batch_of("llama-lm")
    model, without = (adapted("llama-lm", dropout=rate, **options) for rate in (0.5, 0.0))
    assert model.uses_dropout()
    assert not without.uses_dropout()
    params, seeds = perturbed(model.initial), torch.arange(4)
    plain = model(params, inputs).logits
    assert close(plain, without(params, inputs).logits), "nothing is dropped outside training"
    state = torch.get_rng_state()
    one, same = (model(params, {**inputs, EXAMPLE_SEEDS: seeds}).logits for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one, same)
    assert not close(one, plain, 1e-3)
    assert not close(model(params, {**inputs, EXAMPLE_SEEDS: seeds + 9}).logits, one, 1e-3)
    first = {name: value[:1] for name, value in {**inputs, EXAMPLE_SEEDS: seeds}.items()}
    assert close(model(params, first).logits, one[:1]), "whatever else is in the batch"


def test_recomputed_layers_draw_the_same_masks() -> None:
    inputs = {**batch_of("llama-lm"), EXAMPLE_SEEDS: torch.arange(4)}
    grads = []
    for checkpointing in (False, True):
        model = adapted("llama-lm", base=base_of("llama-lm", checkpointing=checkpointing), dropout=0.5)
        params = {name: value.requires_grad_() for name, value in perturbed(model.initial).items()}
        model(params, inputs).logits.square().sum().backward()
        grads.append({name: value.grad for name, value in params.items()})
    assert all(close(grads[1][name], grads[0][name]) for name in grads[0])  # type: ignore[arg-type]


# Ranks


def test_pieces_are_the_rows_of_the_whole_factors() -> None:
    base = base_of("llama-lm")
    whole, cut = adapted("llama-lm", base=base), adapted("llama-lm", base=base, ranks={"a": 1, "b": 3})
    site = "model.layers.0.self_attn.q_proj"
    pieces = [f"{site}.lora_A.rank{rank}.weight" for rank in (1, 3, 4)]
    assert torch.equal(torch.cat([cut.initial[name] for name in pieces]), whole.initial[f"{site}.lora_A.weight"])
    assert [len(cut.initial[name]) for name in pieces] == [1, 2, 1]
    assert cut.tags[pieces[1]] == whole.tags[f"{site}.lora_A.weight"] | {"rank.3"}
    assert adapted("llama-lm", base=base, ranks=(4, 4)).initial.keys() == whole.initial.keys(), "one rank is not cut"
    params = perturbed(cut.initial)
    joined = dict(whole.initial)
    for name in whole.initial:
        stem, factor = name.removesuffix(".weight"), 0 if "lora_A" in name else 1
        joined[name] = torch.cat([params[f"{stem}.rank{rank}.weight"] for rank in (1, 3, 4)], factor)
    inputs = batch_of("llama-lm")
    assert close(cut(params, inputs).logits, whole(joined, inputs).logits, 1e-6)


def test_ranks_are_given_by_name_or_dealt_out_in_turn() -> None:
    clients = ["a", "b", "c", "d"]
    assert AdapterOptions(rank=8).rank_of(clients) == dict.fromkeys(clients, 8)
    assert AdapterOptions(rank=8, ranks=(2, 8, 4)).rank_of(clients) == {"a": 2, "b": 8, "c": 4, "d": 2}
    assert AdapterOptions(rank=8, ranks={"c": 4}).rank_of(clients) == {"a": 8, "b": 8, "c": 4, "d": 8}
    with pytest.raises(OptionError, match="ranks names client 'e', which does not exist; clients are a, b, c"):
        AdapterOptions(rank=8, ranks={"e": 4}).rank_of(clients)


# Errors, copies


@pytest.mark.fast_cases(10)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 17}, ModelError, r"rank is 17, but 'model.layers.0.self_attn.q_proj' is 16 x 16; use a rank from 1"),
        ({"roles": ("qery",)}, ModelError, "no linear layer of llama-lm is tagged 'qery'; did you mean 'query'"),
        ({"roles": ("head",)}, ModelError, "no linear layer of llama-lm is tagged 'head'"),
        ({"roles": ()}, ModelError, "roles is empty; choose from: key, mlp, output, query, value"),
        ({"kind": "loha"}, OptionError, r"model.adapter.kind is 'loha'; it must be 'lora' or 'lokr' or 'hra'"),
        ({"rnak": 3}, OptionError, r"unknown key 'model.adapter.rnak'; did you mean 'rank'"),
        ({"rank": 0}, OptionError, r"model.adapter.rank is 0; it must be a whole number from 1"),
        ({"dropout": 1.0}, OptionError, r"model.adapter.dropout is 1.0; it must be a number from 0 and below 1"),
        ({"kind": "hra", "dora": True}, OptionError, r"model.adapter.dora is for kind 'lora', not for 'hra'; leave"),
        ({"ranks": (8, 2)}, OptionError, r"ranks has 8, but model.adapter.rank is 4; set model.adapter.rank to the"),
        ({"ranks": (1, 2)}, OptionError, r"the largest of model.adapter.ranks is 2.* set model.adapter.rank = 2"),
        ({"ranks": ()}, OptionError, "model.adapter.ranks is empty; leave it out"),
        ({"ranks": (1, 4), "dora": True}, OptionError, "ranks and model.adapter.dora are both set"),
    ],
)
def test_invalid_options_are_refused_with_a_remedy(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        adapted("llama-lm", **{"kind": "lora", **options})


def test_what_cannot_be_adapted_is_refused() -> None:
    model = adapted("llama-lm")
    for again in (lambda: model.adapted("lora", Key(0)), lambda: model.low_rank(2, 1.0, ("query",), Key(0))):
        with pytest.raises(ModelError, match=r"already has an adapter; leave \[model.adapter\] out"):
            again()
    with pytest.raises(ModelError, match="no linear layer of gpt2-lm is tagged 'query'"):
        adapted("gpt2-lm", "ia3")
    with pytest.raises(TagError, match=r"tagged 'head' are frozen for the whole run .*\[model.adapter\].* lora_B"):
        model.names("head")


def test_quantized_weights_are_adapted_by_what_only_calls_the_layer() -> None:
    base = make_model("llama-lm", frozen=("query",))
    for part in base.module.modules():
        if isinstance(part, torch.nn.Linear) and part.weight is not None:
            part.weight = torch.nn.Parameter(torch.zeros(7, dtype=torch.uint8), requires_grad=False)
    for options, what in (({"dora": True}, "dora"), ({"kind": "lokr"}, "kind = 'lokr'")):
        with pytest.raises(ModelError, match=rf"{what} needs the weights, but .*q_proj.weight' is quantized; leave"):
            base.adapted(**{"kind": "lora", "key": Key(0), "rank": 2, "roles": ("query",), **options})
    model = base.adapted("lora", Key(0), rank=2, roles=("query",))
    assert model.initial["model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (16, 2)
    with pytest.raises(ModelError, match=r"q_proj.weight' is quantized, so nothing can be added to it"):
        model.merged(model.initial)


@pytest.mark.slow
def test_an_adapted_model_can_be_copied_pickled_and_moved() -> None:
    for options in ({"dropout": 0.1}, {"ranks": (1, 4)}):
        model = adapted("gpt2-lm", **options)
        params, inputs = perturbed(model.initial), {**batch_of("gpt2-lm"), EXAMPLE_SEEDS: torch.arange(4)}
        logits = model(params, inputs).logits
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert torch.equal(other(params, inputs).logits, logits)
        model.to(torch.device("meta"))
        assert all(value.is_meta for value in [*model.initial.values(), *model.module.parameters()])


def test_conv1d_and_linear_layers_of_all_roles_get_factors() -> None:
    for case in ("gpt2-lm", "vit-image"):
        model = adapted(case, roles=("query", "key", "value", "output", "mlp"))
        roles = {tag for tags in model.tags.values() for tag in tags}
        assert {"query", "key", "value", "output", "mlp"} <= roles
    assert adapted("gpt2-lm", roles=("layer.1",)).names("lora") == adapted("gpt2-lm", roles=("layer.1",)).names(
        "layer.1"
    )
    assert small_vit().initial.keys() == {*adapted_vit().frozen_tags, *adapted_vit().names("head")}
