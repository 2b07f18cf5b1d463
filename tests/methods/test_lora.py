"""Low-rank factors against PEFT and transformers, and LoRA against FedAvg."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import OPTIMIZERS, files_in, last, no_slow_path, play, run_of
from image_fixtures import FOUR, extended, pictures, small
from peft import PeftModel
from torch import Tensor
from transformers import ViTForImageClassification

from partita.core import tensors
from partita.core.model import Model, TagError
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.engines.availability import Availability
from partita.methods.fedavg import fedavg
from partita.methods.lora import lora
from partita.models import ModelError
from partita.testing.toy import ToyTransformer

INPUTS = {"pixel_values": pictures(6, seed=9).pixels}
BODY = ("embedding", "query", "key", "value", "output", "mlp", "norm")
WEIGHT = "vit.layers.0.attention.q_proj.weight"


def moved(params: Tensors, names: frozenset[str]) -> Tensors:
    draws = {name: torch.randn(params[name].shape, generator=(Key(4) / name).generator()) for name in names}
    return {name: value + 0.5 * draws[name] if name in names else value for name, value in params.items()}


def close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=1e-6)


def load(folder: Path) -> Any:
    return ViTForImageClassification.from_pretrained(folder).eval()


# The model


def test_it_has_all_that_it_had_under_the_same_names_and_the_factors_beside() -> None:
    base, model = small(), extended()
    assert tensors.equal({name: model.initial[name] for name in base.initial}, base.initial)
    new = model.initial.keys() - base.initial.keys()
    assert new == model.names("lora")
    layers = ("vit.layers.0.attention.q_proj", "vit.layers.0.attention.v_proj")
    assert new == {f"{layer}.{factor}.weight" for layer in layers for factor in ("lora_A", "lora_B")}
    assert model.tags[f"{layers[1]}.lora_B.weight"] == {"lora", "value", "layer.0"}


def test_untrained_it_gives_the_outputs_of_the_base_to_the_last_bit() -> None:
    assert torch.equal(extended()(extended().initial, INPUTS).logits, small()(small().initial, INPUTS).logits)


def test_factors_are_drawn_from_the_key_by_name_and_from_nothing_else() -> None:
    before = torch.get_rng_state()
    one, same, other = (small().low_rank(2, 1.0, ("query", "mlp"), Key(seed)).initial for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert tensors.equal(one, same)
    A = [name for name in one if name.endswith("lora_A.weight")]
    assert len(A) == 3
    for name in A:
        assert 0.3 < one[name].abs().max() <= 0.5, "uniform between ±1 / √in"
        assert not torch.equal(one[name], other[name])
        assert torch.count_nonzero(one[name.replace("lora_A", "lora_B")]) == 0
    assert not torch.equal(one[A[0]], one[A[1]]), "layers differ"


def test_the_merged_model_gives_the_same_outputs_in_plain_transformers(tmp_path: Path) -> None:
    model = extended(layers=2)
    params = moved(model.initial, model.all_names())
    logits = model(params, INPUTS).logits
    assert close(model.base(model.merged(params), INPUTS).logits, logits)
    model.save_merged(params, tmp_path)
    assert close(load(tmp_path)(**INPUTS).logits, logits)
    without = moved(model.initial, model.all_names() - model.names("lora"))
    assert not torch.allclose(model(without, INPUTS).logits, logits, atol=1e-2), "the factors matter"


@pytest.mark.parametrize("frozen", [(), BODY], ids=["open", "frozen"])
def test_plain_peft_loads_what_is_saved(frozen: tuple[str, ...], tmp_path: Path) -> None:
    model = extended(layers=2, frozen=frozen)
    params = moved(model.initial, model.names("lora", "head"))
    small(layers=2).save_pretrained(small(layers=2).initial, tmp_path / "base")
    model.save_pretrained(params, tmp_path / "adapter")
    assert files_in(tmp_path / "adapter") == {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval()
    assert loaded.peft_config["default"].modules_to_save == ["classifier"]
    logits = model(params, INPUTS).logits
    assert close(loaded(**INPUTS).logits, logits)
    assert not torch.allclose(load(tmp_path / "base")(**INPUTS).logits, logits, atol=1e-2)
    if not frozen:
        state = loaded.merge_and_unload().state_dict()
        assert close(state[WEIGHT], model.merged(params)[WEIGHT])


def test_an_adapter_folder_is_refused_where_it_would_lose_something(tmp_path: Path) -> None:
    model = extended()
    with pytest.raises(ModelError, match=r"q_proj.weight' has changed since vit was loaded.* use save_merged"):
        model.save_pretrained(moved(model.initial, frozenset({WEIGHT})), tmp_path)
    frozen = extended(frozen=("query",))
    with pytest.raises(ModelError, match=r"q_proj.weight' is permanently frozen .* use save_pretrained"):
        frozen.merged(frozen.initial)


def test_a_block_shares_the_base_and_takes_no_slow_path() -> None:
    model = extended()
    both = [moved(model.initial, model.names("lora")), model.initial]
    stacked = {name: torch.stack([one[name] for one in both]) for name in model.names("lora")}
    with no_slow_path():
        lifted = torch.vmap(lambda own: model({**model.initial, **own}, INPUTS).logits)(stacked)
    assert all(close(logits, model(one, INPUTS).logits) for logits, one in zip(lifted, both, strict=True))


def test_it_can_be_sent_to_another_process_and_moved_to_a_device() -> None:
    model = extended(frozen=("embedding",))
    params = moved(model.initial, model.all_names())
    assert torch.equal(pickle.loads(pickle.dumps(model))(params, INPUTS).logits, model(params, INPUTS).logits)
    model.to(torch.device("meta"))
    assert all(value.is_meta for value in [*model.initial.values(), *model.base.module.parameters()])
    assert all(model.base.initial[name] is model.initial[name] for name in model.base.initial), "weights are held once"


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
def test_a_wrong_request_is_named_with_a_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        small().low_rank(**{"rank": 2, "alpha": 1.0, "roles": ("query",), "key": Key(0), **options})


def test_what_cannot_be_extended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = lora().extend
    assert extend is not None
    with pytest.raises(ModelError, match="vit already has low-rank factors"):
        extend(extended(), Key(0))
    with pytest.raises(TagError, match="use a Hugging Face model"):
        extend(ToyTransformer(), Key(0))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'partita\[lora\]'"):
        lora(rank=2).extend(small(), Key(0))  # type: ignore[misc]


# The method


def test_it_is_fedavg_on_a_model_whose_base_is_frozen() -> None:
    open_, frozen = extended(), extended(frozen=BODY)
    assert frozen.all_names() == open_.names("lora", "head")
    availability = Availability(client_dropout=0.2, straggler_rate=0.3)
    rounds = [
        play(run_of(method, 3, OPTIMIZERS["adamw"], cohort=0.5, min_updates=0), model, FOUR, availability=availability)
        for method, model in ((lora(rank=2, alpha=3.0), open_), (fedavg(), frozen))
    ]
    for one, two in zip(*rounds, strict=True):
        assert tensors.equal(tensors.select(one.server.params, frozen.all_names()), two.server.params)
        assert (one.traffic, one.loss, one.lost) == (two.traffic, two.loss, two.lost)
    assert not any(torch.equal(value, frozen.initial[name]) for name, value in last(rounds[1]).items())


def test_the_base_neither_moves_nor_travels() -> None:
    model = extended()
    base = model.all_names() - model.names("lora", "head")
    for each in play(run_of(lora(rank=2, alpha=3.0), 2), model, FOUR):
        assert all(each.server.params[name] is model.initial[name] for name in base)
        assert base.isdisjoint(each.traffic.up.keys() | each.traffic.down.keys())


class Tied(Model):
    """A model whose head is tied to the embedding, with low-rank factors."""

    name = "tied"
    tags = {  # noqa: RUF012
        "embed": frozenset({"embedding", "head"}),
        "bias": frozenset({"head"}),
        "q.lora_A.weight": frozenset({"query", "lora"}),
    }

    def __init__(self) -> None:
        self.initial = {name: torch.zeros(2) for name in self.tags}


def test_a_head_trains_if_asked_to_and_if_it_is_not_the_embedding() -> None:
    for head, wanted in ((True, {"q.lora_A.weight", "bias"}), (False, {"q.lora_A.weight"})):
        plan = plan_for(lora(head=head).plan, Tied(), RoundInfo(0, 1, "a"))
        assert plan.train == plan.up == plan.down == wanted
