"""Low-rank factors against PEFT and transformers, and LoRA against FedAvg."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import OPTIMIZERS, files_in, final_params, no_vmap_fallback, play, toy_run
from image_fixtures import FOUR, adapted_vit, low_rank_vit, random_images, small_vit
from peft import PeftModel
from torch import Tensor
from transformers import ViTForImageClassification

from partita.core import tensors
from partita.core.method import Method
from partita.core.model import TagError
from partita.core.plan import share
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.engines.availability import Availability
from partita.methods.fedavg import fedavg
from partita.methods.lora import lora
from partita.models import ModelError
from partita.testing.toy import ToyTransformer

INPUTS = {"pixel_values": random_images(6, seed=9).pixels}
BODY = ("embedding", "query", "key", "value", "output", "mlp", "norm")
WEIGHT = "vit.layers.0.attention.q_proj.weight"


def perturbed(params: Tensors, names: frozenset[str]) -> Tensors:
    draws = {name: torch.randn(params[name].shape, generator=(Key(4) / name).generator()) for name in names}
    return {name: value + 0.5 * draws[name] if name in names else value for name, value in params.items()}


def close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=1e-6)


def load_vit(folder: Path) -> Any:
    return ViTForImageClassification.from_pretrained(folder).eval()


# The model


def test_low_rank_model_keeps_base_names_and_adds_factors() -> None:
    base, model = small_vit(), low_rank_vit()
    assert tensors.equal({name: model.initial[name] for name in base.initial}, base.initial)
    new = model.initial.keys() - base.initial.keys()
    assert new == model.names("lora")
    layers = ("vit.layers.0.attention.q_proj", "vit.layers.0.attention.v_proj")
    assert new == {f"{layer}.{factor}.weight" for layer in layers for factor in ("lora_A", "lora_B")}
    assert model.tags[f"{layers[1]}.lora_B.weight"] == {"lora", "lora_B", "value", "layer.0"}


def test_untrained_low_rank_model_equals_its_base_bit_for_bit() -> None:
    assert torch.equal(
        low_rank_vit()(low_rank_vit().initial, INPUTS).logits, small_vit()(small_vit().initial, INPUTS).logits
    )


def test_factors_are_drawn_from_the_key_by_name() -> None:
    before = torch.get_rng_state()
    one, same, other = (small_vit().low_rank(2, 1.0, ("query", "mlp"), Key(seed)).initial for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert tensors.equal(one, same)
    A = [name for name in one if name.endswith("lora_A.weight")]
    assert len(A) == 3
    for name in A:
        assert 0.3 < one[name].abs().max() <= 0.5, "uniform between ±1 / √in"
        assert not torch.equal(one[name], other[name])
        assert torch.count_nonzero(one[name.replace("lora_A", "lora_B")]) == 0
    assert not torch.equal(one[A[0]], one[A[1]]), "layers differ"


def test_merged_model_gives_the_same_outputs_in_transformers(tmp_path: Path) -> None:
    model = low_rank_vit(layers=2)
    params = perturbed(model.initial, model.all_names())
    logits = model(params, INPUTS).logits
    assert close(small_vit(layers=2)(model.merged(params), INPUTS).logits, logits)
    model.save_merged(params, tmp_path)
    assert close(load_vit(tmp_path)(**INPUTS).logits, logits)
    without = perturbed(model.initial, model.all_names() - model.names("lora"))
    assert not torch.allclose(model(without, INPUTS).logits, logits, atol=1e-2), "the factors matter"


@pytest.mark.parametrize("frozen", [(), BODY], ids=["open", "frozen"])
def test_peft_loads_the_saved_adapter(frozen: tuple[str, ...], tmp_path: Path) -> None:
    model = low_rank_vit(layers=2, frozen=frozen)
    params = perturbed(model.initial, model.names("lora", "head"))
    small_vit(layers=2).save_pretrained(small_vit(layers=2).initial, tmp_path / "base")
    model.save_pretrained(params, tmp_path / "adapter")
    assert files_in(tmp_path / "adapter") == {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(load_vit(tmp_path / "base"), tmp_path / "adapter").eval()
    assert loaded.peft_config["default"].modules_to_save == ["classifier"]
    logits = model(params, INPUTS).logits
    assert close(loaded(**INPUTS).logits, logits)
    assert not torch.allclose(load_vit(tmp_path / "base")(**INPUTS).logits, logits, atol=1e-2)
    if not frozen:
        state = loaded.merge_and_unload().state_dict()
        assert close(state[WEIGHT], model.merged(params)[WEIGHT])


def test_saving_an_adapter_that_would_lose_changes_is_refused(tmp_path: Path) -> None:
    model = low_rank_vit()
    with pytest.raises(ModelError, match=r"q_proj.weight' has changed since vit was loaded.* use save_merged"):
        model.save_pretrained(perturbed(model.initial, frozenset({WEIGHT})), tmp_path)


def test_low_rank_block_shares_the_base_without_vmap_fallback() -> None:
    model = low_rank_vit()
    both = [perturbed(model.initial, model.names("lora")), model.initial]
    stacked = {name: torch.stack([one[name] for one in both]) for name in model.names("lora")}
    with no_vmap_fallback():
        lifted = torch.vmap(lambda own: model({**model.initial, **own}, INPUTS).logits)(stacked)
    assert all(close(logits, model(one, INPUTS).logits) for logits, one in zip(lifted, both, strict=True))


def test_low_rank_model_can_be_pickled_and_moved_to_a_device() -> None:
    model = low_rank_vit(frozen=("embedding",))
    params = perturbed(model.initial, model.all_names())
    assert torch.equal(pickle.loads(pickle.dumps(model))(params, INPUTS).logits, model(params, INPUTS).logits)
    model.to(torch.device("meta"))
    assert all(value.is_meta for value in [*model.initial.values(), *model.module.parameters()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"rank is 0, but 'vit.layers.0.attention.q_proj' is 4 x 4; use a rank from 1 to 4"),
        ({"rank": 5}, "rank is 5, but"),
        ({"alpha": 0.0}, "alpha is 0.0; it must be above 0"),
        ({"roles": ()}, "roles is empty; choose from: key, mlp, output, query, value"),
        ({"roles": ("query", "norm")}, "no linear layer of vit is tagged 'norm'; it can be: key, mlp"),
        ({"roles": ("head",)}, "no linear layer of vit is tagged 'head'"),
        ({"roles": ("qeury",)}, "no linear layer of vit is tagged 'qeury'; did you mean 'query'?"),
    ],
)
def test_invalid_low_rank_options_are_refused_with_a_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        small_vit().low_rank(**{"rank": 2, "alpha": 1.0, "roles": ("query",), "key": Key(0), **options})


def test_models_without_low_rank_support_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = lora().extend
    assert extend is not None
    with pytest.raises(
        ModelError, match=r"vit already has an adapter; leave \[model.adapter\] out, or use .* 'fedavg'"
    ):
        extend(low_rank_vit(), Key(0))
    with pytest.raises(TagError, match=r"cannot get an adapter; use a Hugging Face model, model\.name = 'pretrained'"):
        extend(ToyTransformer(), Key(0))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'partita\[lora\]'"):
        lora(rank=2).extend(small_vit(), Key(0))  # type: ignore[misc]


# The method


def test_lora_equals_fedavg_on_a_model_with_an_adapter() -> None:
    extend = lora(rank=2, alpha=3.0).extend
    assert extend is not None
    model, other = extend(small_vit(), Key(2)), adapted_vit()
    assert model.all_names() == other.names("lora", "head")
    assert tensors.equal(model.initial, other.initial)
    availability = Availability(client_dropout=0.2, straggler_rate=0.3)
    rounds = [
        play(toy_run(method, 3, OPTIMIZERS["adamw"], cohort=0.5, min_updates=0), each, FOUR, availability=availability)
        for method, each in ((lora(rank=2, alpha=3.0), model), (fedavg(), other))
    ]
    for one, two in zip(*rounds, strict=True):
        assert tensors.equal(one.server.params, two.server.params)
        assert (one.traffic, one.loss, one.lost) == (two.traffic, two.loss, two.lost)
    assert not any(torch.equal(value, other.initial[name]) for name, value in final_params(rounds[1]).items())


def test_lora_equals_training_of_factors_beside_weights_that_a_plan_leaves_alone() -> None:
    """The factors are drawn from the same keys as those of flora, and train to the same values."""
    open_, model = low_rank_vit(), adapted_vit()
    train = open_.names("lora", "head")
    method = Method("factors", plan=lambda model, round_info: share(train, down=train))
    one, two = play(toy_run(method, 2), open_, FOUR), play(toy_run(fedavg(), 2), model, FOUR)
    assert tensors.equal(tensors.select(final_params(one), train), final_params(two))
    assert [each.traffic for each in one] == [each.traffic for each in two]


def test_lora_base_is_frozen_and_held_by_the_module() -> None:
    base = small_vit()
    model = lora(rank=2, head=False).extend(base, Key(0))  # type: ignore[misc]
    assert model.all_names() == model.names("lora"), "without the head"
    assert model.frozen_tags == base.tags
    stored = {id(value.untyped_storage()) for value in model.module.parameters()}  # type: ignore[attr-defined]
    held = {value.untyped_storage().data_ptr() for value in model.module.parameters()}  # type: ignore[attr-defined]
    assert len(stored) == len(base.initial)
    assert held == {value.untyped_storage().data_ptr() for value in base.initial.values()}, "shared, not copied"
