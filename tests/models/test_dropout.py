"""Dropout by seeds: the places of every architecture, and what the masks depend on."""

from __future__ import annotations

from typing import Any

import model_types
import pytest
import torch
import transformers
from architecture_fixtures import Case, inputs_of, kind_of, make_model, module_of, noise, perturbed, targets_of
from dropout_fixtures import injected_masks
from torch import Tensor, nn

from partita.core.data import EXAMPLE_SEEDS
from partita.core.keyed_bits import example_seeds
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models.dropout import KeyedDropout, KeyedDropPath, use_keyed_dropout
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.tasks import KINDS

HALF = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
# Options with which dropout is on. Texts have it by default; images do not.
DROPPING: dict[str, dict[str, Any]] = {
    "bert-text": {},
    "roberta-text": {"classifier_dropout": 0.3},
    "electra-text": {},
    "distilbert-text": {},
    "distilbert-tokens": {},
    "gpt2-tokens": {},
    "gpt2-lm": {},
    "llama-lm": {"attention_dropout": 0.3},
    "vit-image": HALF,
    "dinov2-image": {**HALF, "drop_path_rate": 0.5},
}
SEEDS = example_seeds([Key(1)], 0, torch.arange(4))[0]


def model_of(case: str, **options: Any) -> FunctionalModel:
    return make_model(case, sizes=DROPPING[case], **options)


def batch_of(case: str, model: FunctionalModel) -> tuple[Tensors, Tensor]:
    it = Case(model, model.initial, None, kind_of(case))
    return inputs_of(it), targets_of(it)


def with_seeds(inputs: Tensors, seeds: Tensor = SEEDS) -> Tensors:
    return {**inputs, EXAMPLE_SEEDS: seeds}


def gradients(model: FunctionalModel, params: Tensors, inputs: Tensors, targets: Tensor) -> Tensors:
    params = {name: value.clone().requires_grad_() for name, value in params.items()}
    model.losses(model(params, inputs), targets).mean().backward()
    return {name: value.grad for name, value in params.items() if value.grad is not None}


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("case", DROPPING)
def test_training_equals_transformers_in_train_mode_with_the_same_masks(case: str, tmp_path: Any) -> None:
    model = model_of(case)
    params, (inputs, _) = perturbed(model.initial), batch_of(case, model)
    model.save_pretrained(params, tmp_path)
    plain = type(model.module).from_pretrained(tmp_path, attn_implementation="eager").train()
    if case == "dinov2-image":  # it draws without nn.functional.dropout
        for part in plain.modules():
            if type(part).__name__ == "Dinov2DropPath":
                part.forward = lambda states, rate=part.drop_prob: (
                    nn.functional.dropout(  # type: ignore[assignment]
                        states.new_ones(len(states)), rate
                    )[:, None, None]
                    * states
                )
    with injected_masks(plain, lambda: SEEDS):
        expected = plain(**inputs).logits
    logits = model(params, with_seeds(inputs)).logits
    assert model.uses_dropout()
    assert not torch.allclose(logits, model(params, inputs).logits, atol=1e-2)
    assert torch.allclose(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", DROPPING)
def test_nothing_is_dropped_without_seeds(case: str) -> None:
    model, still = model_of(case), make_model(case, sizes=_rates_zero(case))
    params, (inputs, _) = perturbed(model.initial), batch_of(case, model)
    state = torch.get_rng_state()
    model(params, with_seeds(inputs))
    assert torch.equal(model(params, inputs).logits, still(params, inputs).logits)
    assert torch.equal(torch.get_rng_state(), state)
    assert not still.uses_dropout()


def _rates_zero(case: str) -> dict[str, Any]:
    config = module_of(case).config.to_dict()
    rates = {key: 0.0 for key, value in config.items() if "drop" in key and isinstance(value, float)}
    return {**DROPPING[case], **rates, "classifier_dropout": 0.0}


@pytest.mark.parametrize("case", ["bert-text", "gpt2-lm", "dinov2-image"])
def test_masks_do_not_depend_on_the_batch(case: str) -> None:
    model = model_of(case)
    params, (inputs, _) = perturbed(model.initial), batch_of(case, model)
    whole = model(params, with_seeds(inputs)).logits
    for rows in (torch.tensor([2]), torch.tensor([3, 0])):
        part = model(params, with_seeds({name: value[rows] for name, value in inputs.items()}, SEEDS[rows])).logits
        assert torch.allclose(part, whole[rows], atol=1e-5)
    if "pixel_values" not in inputs:  # longer padding
        padded = {name: torch.cat([value, value.new_zeros(4, 3)], 1) for name, value in inputs.items()}
        longer = model(params, with_seeds(padded)).logits
        kept = inputs["attention_mask"].bool()
        if longer.ndim == 3:
            longer, whole = longer[:, : kept.shape[1]][kept], whole[kept]
        assert torch.allclose(longer, whole, atol=1e-5)


@pytest.mark.parametrize("case", ["bert-text", "llama-lm", "dinov2-image"])
def test_vmap_over_clients_and_over_examples_draws_the_same_masks(case: str) -> None:
    model = model_of(case)
    (inputs, targets), clients = batch_of(case, model), [perturbed(model.initial, seed) for seed in (1, 2)]
    seeds = example_seeds([Key(1), Key(2)], 0, torch.arange(4))
    stacked = {name: torch.stack([params[name] for params in clients]) for name in model.initial}
    block = torch.vmap(lambda params, seeds: model(params, with_seeds(inputs, seeds)).logits)(stacked, seeds)
    for params, own, logits in zip(clients, seeds, block, strict=True):
        assert torch.allclose(model(params, with_seeds(inputs, own)).logits, logits, atol=1e-5)

    def loss(params: Tensors, inputs: Tensors, target: Tensor) -> Tensor:
        one = {name: value.unsqueeze(0) for name, value in inputs.items()}
        return model.losses(model(params, one), target.unsqueeze(0)).sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(clients[0], with_seeds(inputs), targets)
    whole = gradients(model, clients[0], with_seeds(inputs), targets)
    for name, grad in whole.items():
        assert torch.allclose(each[name].mean(0), grad, atol=1e-5), name


@pytest.mark.parametrize("case", ["bert-text", "gpt2-lm", "dinov2-image"])
def test_checkpointing_recomputes_with_the_same_masks(case: str) -> None:
    model, saving = model_of(case), model_of(case, checkpointing=True)
    params, (inputs, targets) = perturbed(model.initial), batch_of(case, model)
    expected = gradients(model, params, with_seeds(inputs), targets)
    found = gradients(saving, params, with_seeds(inputs), targets)
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], grad, atol=1e-6) for name, grad in expected.items())


def test_low_rank_copy_of_a_model_keeps_its_dropout() -> None:
    model = model_of("bert-text")
    adapted = model.low_rank(2, 4.0, ("query",), Key(0))
    inputs, _ = batch_of("bert-text", model)
    assert adapted.uses_dropout()
    assert torch.allclose(
        adapted(adapted.initial, with_seeds(inputs)).logits, model(model.initial, with_seeds(inputs)).logits, atol=1e-6
    )


def test_each_place_and_each_call_has_its_own_mask() -> None:
    module = nn.ModuleDict({"first": nn.Dropout(0.5), "second": nn.Dropout(0.5)})
    draws = use_keyed_dropout(module)
    assert draws is not None
    ones = torch.ones(4, 64)
    with draws.using(SEEDS):
        masks = [module["first"](ones), module["second"](ones), module["first"](ones)]
    with draws.using(SEEDS):
        assert torch.equal(module["first"](ones), masks[0])
    assert not any(torch.equal(masks[left], masks[right]) for left, right in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(module["first"](ones), ones)


class FunctionalDropout(nn.Module):
    """Like BART: calls the function, and draws for LayerDrop in train mode."""

    def __init__(self, rate: float, layerdrop: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.layerdrop = rate, layerdrop

    def forward(self, states: Tensor) -> Tensor:
        states = nn.functional.dropout(states, p=self.dropout, training=self.training)
        if self.training and torch.rand([]) < self.layerdrop:
            return states
        return nn.functional.dropout(states, p=self.dropout, training=self.training)


def test_functional_dropout_draws_from_seeds() -> None:
    module = nn.Sequential(FunctionalDropout(0.5), FunctionalDropout(0.5)).eval()
    before, state = (nn.functional.dropout, torch.rand), torch.get_rng_state()
    draws = use_keyed_dropout(module)
    assert draws is not None
    assert draws.found
    assert not draws.left_out
    ones = torch.ones(4, 64)
    with draws.using(SEEDS):
        found = module(ones)
    assert set(found.unique().tolist()) == {0.0, 16.0}
    assert (found == 0).float().mean() > 0.85  # four independent masks
    with draws.using(SEEDS[:2]):
        assert torch.equal(module(ones[:2]), found[:2])
    assert torch.equal(module(ones), ones)
    with pytest.raises(AttributeError), draws.using(SEEDS):
        module(None)
    assert (nn.functional.dropout, torch.rand) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_bart_draws_from_seeds() -> None:
    config = transformers.BartConfig(
        vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, attention_dropout=0.1,
    )  # fmt: skip
    module = transformers.BartModel(config).eval()
    module.set_attn_implementation("partita")
    draws = use_keyed_dropout(module)
    assert draws is not None
    assert draws.found
    assert not draws.left_out
    ids, state = torch.randint(3, 20, (4, 5), generator=torch.Generator().manual_seed(0)), torch.get_rng_state()
    plain = module(input_ids=ids).last_hidden_state
    with draws.using(SEEDS):
        first = module(input_ids=ids).last_hidden_state
    with draws.using(SEEDS[1:]):
        later = module(input_ids=ids[1:]).last_hidden_state
    assert torch.allclose(first[1:], later, atol=1e-5)
    assert not torch.allclose(first, plain, atol=1e-2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("part", [FunctionalDropout(0.1, layerdrop=0.2), nn.Dropout2d(0.1), nn.AlphaDropout(0.1)])
def test_other_random_draws_are_left_out_and_the_user_is_told_once(part: nn.Module) -> None:
    model = model_of("bert-text")
    model.module.add_module("odd", part)
    draws = use_keyed_dropout(model.module)
    assert draws is not None
    object.__setattr__(model, "draws", draws)
    with pytest.warns(UserWarning, match=rf"trains without the random draws.*odd \({type(part).__name__}"):
        assert model.uses_dropout()
    assert model.uses_dropout()
    inputs, _ = batch_of("bert-text", model)
    model(model.initial, inputs)


def test_a_model_whose_only_draws_are_left_out_has_no_dropout() -> None:
    module = nn.Sequential(nn.Dropout2d(0.5)).eval()
    draws = use_keyed_dropout(module)
    assert draws is not None
    assert not draws.found
    with draws.using(SEEDS):
        assert torch.equal(module(torch.ones(4, 3, 2, 2)), torch.ones(4, 3, 2, 2))


def test_several_rows_of_an_example_draw_from_its_seed() -> None:
    module = nn.Sequential(nn.Dropout(0.5))
    draws = use_keyed_dropout(module)
    assert draws is not None
    with draws.using(SEEDS):
        eight = module(torch.ones(8, 64))
    with draws.using(SEEDS[2:3]):
        third = module(torch.ones(2, 64))
    assert torch.equal(eight[4:6], third)
    assert len({tuple(row.tolist()) for row in eight}) == 8


@pytest.mark.parametrize(
    "case", ["opt-lm", "xglm-lm", "xlnet-text", pytest.param("longformer-text", marks=pytest.mark.slow)]
)
def test_types_with_several_rows_of_an_example_draw_by_example(case: str) -> None:
    """An example is the same alone and in a batch, whichever dimension the model puts first."""
    module = model_types.module_of(case)
    for part in module.modules():  # high rates, also where a type has none by default
        for name, value in vars(part).items():
            if name in ("p", "dropout", "attention_dropout") and isinstance(value, float):
                setattr(part, name, 0.5)
    model = from_module(case, module, kind=KINDS[case.rpartition("-")[2]])
    inputs = model_types.inputs_of(case.rpartition("-")[2])
    with torch.no_grad():
        plain = model(model.initial, inputs).logits
        together = model(model.initial, with_seeds(inputs)).logits
        third = {name: value[2:3] for name, value in inputs.items()}
        alone = model(model.initial, with_seeds(third, SEEDS[2:3])).logits
    assert torch.allclose(together[2:3], alone, atol=1e-5)
    assert not torch.allclose(together, plain, atol=1e-3)


def test_dropout_of_something_else_than_examples_drops_nothing() -> None:
    module = nn.Sequential(nn.Dropout(0.5))
    draws = use_keyed_dropout(module)
    assert draws is not None
    with draws.using(SEEDS), pytest.warns(UserWarning, match="gets 7 rows for 4 examples.*drops nothing"):
        assert torch.equal(module(torch.ones(7, 3)), torch.ones(7, 3))


def test_expectation_over_masks_is_the_input() -> None:
    module = nn.Sequential(nn.Dropout(0.3))
    draws = use_keyed_dropout(module)
    assert draws is not None
    value = noise(3, 1, 32)
    many = value.expand(4000, 32)
    with draws.using(example_seeds([Key(4)], 0, torch.arange(4000))[0]):
        mean = module(many).mean(0)
    assert torch.allclose(mean, value[0], atol=0.12)


def test_classes_are_those_of_torch_and_transformers_where_nothing_is_dropped() -> None:
    module = module_of("dinov2-image")
    assert use_keyed_dropout(module) is None
    assert not any(isinstance(part, KeyedDropout | KeyedDropPath) for part in module.modules())
    assert not any(part.training for part in module.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, when it loads its compiler
def test_compiled_model_draws_the_same_masks() -> None:
    """Traced as a full graph; the code that the compiler writes for a mask is below."""
    model = make_model("bert-text", sizes={"num_hidden_layers": 1})
    params, (inputs, _) = perturbed(model.initial), batch_of("bert-text", model)
    compiled = torch.compile(lambda given: model(params, given).logits, fullgraph=True, backend="eager")
    expected = model(params, with_seeds(inputs)).logits
    assert torch.allclose(compiled(with_seeds(inputs)), expected, atol=1e-5)
    other = with_seeds(inputs, SEEDS.flip(0))
    assert torch.allclose(compiled(other), model(params, other).logits, atol=1e-5)
    assert not torch.allclose(compiled(other), expected, atol=1e-2)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_compiled_code_draws_the_same_masks() -> None:
    module = nn.Sequential(nn.Dropout(0.5))
    draws = use_keyed_dropout(module)
    assert draws is not None

    def masks(seeds: Tensor) -> Tensor:
        with draws.using(seeds):
            return torch.as_tensor(module(torch.ones(4, 64)))

    assert (masks(SEEDS) == 0).any()
    compiled = torch.compile(masks, fullgraph=True)
    for seeds in (SEEDS, SEEDS.flip(0)):
        assert torch.equal(compiled(seeds), masks(seeds))
    torch.compiler.reset()
