"""The cache of frozen layers: the states of transformers, and the same training as without a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_fixtures import CLASSES, WORDS, class_of, make_model, module_of, noise, perturbed, random_texts
from helpers import final_params, max_difference, play, toy_run
from torch import Tensor

from partita.core import memory
from partita.core.data import EXAMPLE_SEEDS, ClientData, Examples
from partita.core.keyed_bits import example_seeds
from partita.core.memory import SizeError
from partita.core.optim import AdamW
from partita.core.rng import Key
from partita.core.sharing import share_between_runs
from partita.data.ragged import ragged
from partita.data.task import Subset, Table, Task
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.experiment.run_folder import RESULT
from partita.experiment.runner import start
from partita.methods.fedavg import fedavg
from partita.models import ModelError, frozen_cache
from partita.models.frozen_cache import CACHED_STATES, CHUNK, CachedExamples, cache_frozen, frozen_depth
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.models.prompts.clip import clip
from partita.tasks import LM
from partita.testing.toy import ToyTransformer

LOWEST = ("embedding", "layer.0")
RUNS = ["vit-image", "bert-text", "gpt2-lm", "llama-tokens"]
ALL_CASES = [*RUNS, "deit-image", "dinov2_with_registers-image", "electra-text", "distilbert-text", "qwen2-lm"]
SIZES, ROWS = {"a": 5, "b": 3, "c": 4}, 12


def frozen_model(case: str, **options: Any) -> FunctionalModel:
    return make_model(case, LOWEST, **options)


def make_table(case: str, lengths: tuple[int, ...] = (9, 3, 1, 4)) -> Any:
    """Images, or texts of these lengths in turn."""
    if case.endswith("image"):
        return Table({"pixel_values": noise(0, ROWS, 1, 8, 8)}, torch.arange(ROWS) % CLASSES)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, WORDS, (lengths[row % len(lengths)],), generator=draw).tolist() for row in range(ROWS)]
    if case.endswith("text"):
        return ragged(texts, 12, torch.arange(ROWS) % CLASSES)
    return ragged(texts, 12, tags=[[token % CLASSES for token in text] for text in texts])


@dataclass(frozen=True)
class ThreeClients:
    """Three clients of different sizes over one table."""

    table: Any

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(SIZES)

    def __getitem__(self, client: str) -> ClientData:
        parts = dict(zip(SIZES, torch.arange(ROWS).split(list(SIZES.values())), strict=True))
        rows = Subset(self.table, parts[client])
        return ClientData(rows, rows, rows)


def record_batch_sizes(layer: Any) -> list[int]:
    """Record the number of examples in each later pass through the layer."""
    seen: list[int] = []
    layer.mlp.register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
    return seen


@pytest.mark.parametrize("case", ALL_CASES)
def test_cached_states_match_transformers_hidden_states(case: str) -> None:
    model, table = frozen_model(case), make_table(case)
    _, (cached,) = cache_frozen(model, table)
    rows = torch.tensor([7, 0, 2, 7])
    batch, plain = cached.take(rows), table.take(rows)
    wanted = module_of(case)(**plain.inputs, output_hidden_states=True).hidden_states[1]  # (example, token, width)
    seen = plain.inputs.get("attention_mask", torch.ones(wanted.shape[:2])).bool()
    states = batch.inputs[CACHED_STATES]
    torch.testing.assert_close(states[seen], wanted[seen], rtol=0, atol=1e-6)
    assert not states[~seen].any()
    assert torch.equal(batch.targets, plain.targets)
    assert batch.inputs.keys() - {CACHED_STATES} == plain.inputs.keys() - {"pixel_values", "input_ids"}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("block", [1, 3])
def test_training_with_the_cache_equals_training_without(case: str, block: int) -> None:
    run = toy_run(fedavg(), count=2, optimizer=AdamW(eps=1e-3), lr=0.01, batch_size=3, epochs=2, dropout=False)
    table = make_table(case)
    above, (cached,) = cache_frozen(frozen_model(case), table)
    without = final_params(play(run, frozen_model(case), ThreeClients(table), block=block))
    once = final_params(play(run, above, ThreeClients(cached), block=block))
    assert max_difference(without, above.initial) > 1e-3
    assert max_difference(without, once) < 1e-6


@pytest.mark.parametrize("case", ALL_CASES)
def test_cached_outputs_are_bit_for_bit_equal_on_equal_batches(case: str) -> None:
    """A batch of the same rows that were cached together is the same arithmetic."""
    model, table = frozen_model(case), make_table(case)
    above, (cached,) = cache_frozen(model, table)
    params, rows = perturbed(model.initial), torch.arange(ROWS)
    batch, plain = cached.take(rows), table.take(rows)
    out, wanted = above(params, batch.inputs), model(params, plain.inputs)
    seen = plain.inputs["attention_mask"].bool() if case.endswith(("tokens", "lm")) else slice(None)
    assert torch.equal(out.logits[seen], wanted.logits[seen])
    assert out.features is not None
    assert wanted.features is not None
    assert torch.equal(out.features, wanted.features)


def test_frozen_layers_run_once_per_example() -> None:
    model, table = frozen_model("vit-image"), make_table("vit-image")
    above, (cached,) = cache_frozen(model, table)
    lowest, highest = (record_batch_sizes(layer) for layer in frozen_cache._body(model).layers)
    play(toy_run(fedavg(), count=3, dropout=False), above, ThreeClients(cached))
    assert sum(lowest) == ROWS
    assert sum(highest) == 3 * ROWS


def test_cached_states_do_not_depend_on_the_access_order() -> None:
    """So a resumed run caches the same bits as an uninterrupted one."""
    many = ragged([[2 + row % 9] * (1 + row % 7) for row in range(CHUNK + 9)], 12, torch.zeros(CHUNK + 9))
    takes = [torch.tensor([CHUNK + 1, 3]), torch.arange(CHUNK + 9), torch.tensor([5])]

    def taken(order: list[Tensor]) -> Tensor:
        _, (cached,) = cache_frozen(frozen_model("bert-text"), many)
        for rows in order:
            cached.take(rows)
        return cached.states

    assert torch.equal(taken(takes), taken(takes[::-1]))


def test_cache_supports_left_padding() -> None:
    model = frozen_model("gpt2-lm")
    table = Table(random_texts(0, left=True), torch.zeros(4, dtype=torch.long))
    above, (cached,) = cache_frozen(model, table)
    rows, params = torch.tensor([3, 1]), perturbed(model.initial)
    out, wanted = above(params, cached.take(rows).inputs), model(params, table.take(rows).inputs)
    seen = table.take(rows).inputs["attention_mask"].bool()
    torch.testing.assert_close(out.logits[seen], wanted.logits[seen], rtol=0, atol=2e-6)
    assert len(cached.states) == int(table.inputs["attention_mask"].sum())


def test_states_cached_in_inference_mode_can_be_trained_on() -> None:
    model, table = frozen_model("vit-image"), make_table("vit-image")
    above, (cached,) = cache_frozen(model, table)
    with torch.inference_mode():
        cached.take(torch.arange(ROWS))
    params = {name: value.clone().requires_grad_() for name, value in above.initial.items()}
    above(params, cached.take(torch.arange(3)).inputs).logits.sum().backward()
    assert all(value.grad is not None for value in params.values())


def test_cache_supports_a_fully_frozen_body() -> None:
    model, table = make_model("llama-text", (*LOWEST, "layer.1")), make_table("llama-text")
    above, (cached,) = cache_frozen(model, table)
    assert frozen_depth(model) == 2
    rows, params = torch.arange(ROWS), perturbed(model.initial)
    assert model.initial.keys() == {"model.norm.weight", "score.weight"}
    assert torch.equal(above(params, cached.take(rows).inputs).logits, model(params, table.take(rows).inputs).logits)


def test_cached_states_keep_the_compute_dtype() -> None:
    model, table = frozen_model("llama-lm", dtype=torch.bfloat16), make_table("llama-lm")
    above, (cached,) = cache_frozen(model, table)
    rows = torch.arange(ROWS)
    seen = table.take(rows).inputs["attention_mask"].bool()
    out, wanted = above(above.initial, cached.take(rows).inputs), model(model.initial, table.take(rows).inputs)
    assert cached.states.dtype == torch.bfloat16
    assert torch.equal(out.logits[seen], wanted.logits[seen])


def test_trainable_parameters_of_a_bfloat16_module_are_float32() -> None:
    module = module_of("llama-lm").to(torch.bfloat16)
    weights = dict(module.named_parameters())
    model = from_module("llama", module, LOWEST, kind=LM, dtype=torch.bfloat16)
    assert {value.dtype for value in model.initial.values()} == {torch.float32}
    assert all(torch.equal(value, weights[name].float()) for name, value in model.initial.items())
    for name, value in model.module.named_parameters():
        assert value.dtype == torch.bfloat16
        assert value.data_ptr() == weights[name].data_ptr(), "what is frozen is not copied"


def test_checkpointing_works_with_the_cache() -> None:
    model, table = frozen_model("bert-text", checkpointing=True), make_table("bert-text")
    above, (cached,) = cache_frozen(model, table)
    run = toy_run(fedavg(), count=1, optimizer=AdamW(eps=1e-3), dropout=False)
    again, once = (
        final_params(play(run, each, ThreeClients(rows))) for each, rows in ((model, table), (above, cached))
    )
    assert max_difference(again, once) < 1e-6


def test_cached_model_saves_the_whole_model(tmp_path: Path) -> None:
    model = frozen_model("gpt2-lm")
    above, _ = cache_frozen(model, make_table("gpt2-lm"))
    params = perturbed(above.initial)
    above.save_pretrained(params, tmp_path)
    plain, inputs = class_of("gpt2-lm").from_pretrained(tmp_path).eval(), random_texts(0)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(plain(**inputs).logits[seen], model(params, inputs).logits[seen], rtol=0, atol=2e-6)


def test_caching_does_not_change_the_model() -> None:
    model, table = frozen_model("vit-image"), make_table("vit-image")
    inputs = table.take(torch.arange(2)).inputs
    before = model(model.initial, inputs).logits
    above, (cached,) = cache_frozen(model, table)
    others = cached.take(torch.arange(2, 4)).inputs
    above(model.initial, others)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        above(model.initial, {CACHED_STATES: others[CACHED_STATES][..., :-1]})
    assert torch.equal(model(model.initial, inputs).logits, before)


CONFIG: dict[str, Any] = {
    "method": {"name": "fedprox"},
    "data": {"name": "synthetic", "examples": 60, "test_examples": 20, "size": 4, "classes": 3},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "width": 8, "heads": 2, "frozen": ["embedding", "layer.0"]},
    "training": {"batch_size": 8},
    "rounds": 2,
}


def test_run_with_cache_frozen_gives_the_same_rows(tmp_path: Path) -> None:
    rows = {}
    for once in (False, True):
        config = parse({**CONFIG, "engine": {"clients_per_block": 1, "cache_frozen": once}})
        rows[once] = list(start(config, tmp_path / str(once)))
        assert (tmp_path / str(once) / RESULT).exists()
    for plain, remembered in zip(rows[False], rows[True], strict=True):
        assert remembered["bytes"] == plain["bytes"]
        assert remembered["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-6)
        assert remembered["test"] == pytest.approx(plain["test"], abs=1e-6)


def test_cache_is_empty_until_the_run_begins() -> None:
    experiment = build(parse({**CONFIG, "engine": {"cache_frozen": True}}))
    tables: list[Any] = [experiment.federation.task.train, experiment.federation.task.test]
    assert [type(table) for table in tables] == [CachedExamples, CachedExamples]
    assert not any(table.computed for table in tables)


def refusal_of(model: Any, table: Examples | None = None) -> str:
    with pytest.raises(ModelError) as error:
        cache_frozen(model, table or make_table("vit-image"))
    return str(error.value)


def test_trainable_parameters_below_the_cache_are_refused_with_a_remedy() -> None:
    free = refusal_of(make_model("vit-image"))
    assert "'vit.embeddings.cls_token'" in free
    assert "can train before the first layer; add 'embedding' and 'layer.0' to model.frozen" in free
    gap = refusal_of(make_model("llama-text", ("embedding", "layer.1")))
    assert "'model.layers.0.self_attn.q_proj.weight'" in gap
    assert "and 6 more of llama-text can train in layer 0; add 'layer.0' to model.frozen" in gap
    tied = refusal_of(make_model("gpt2-lm", ("layer.0",)))
    assert "'transformer.wte.weight', 'transformer.wpe.weight' of" in tied


@pytest.mark.parametrize(
    "case", ["bert-text", "roberta-text", "electra-text", "distilbert-text", "vit-image", "gpt2-lm"]
)
def test_embedding_freezes_all_before_the_first_layer_and_roles_stay(case: str) -> None:
    """What the error tells users to freeze is enough."""
    free, frozen = make_model(case), make_model(case, ("embedding", "layer.0"))
    assert frozen_depth(frozen) == 1
    norms = {name for name in free.initial if "embeddings.LayerNorm" in name}
    assert norms.isdisjoint(frozen.initial)
    assert norms <= free.names("norm")
    assert bool(norms) == (case not in ("vit-image", "gpt2-lm"))


def test_models_that_cannot_be_cached_are_refused() -> None:
    assert "low-rank factors are in every layer" in refusal_of(
        frozen_model("vit-image").low_rank(2, 2.0, ("query",), Key(0))
    )
    assert "does not support the architecture 'clip'; set it to false" in refusal_of(
        make_model("clip-image", ("embedding",))
    )
    assert "needs a Hugging Face model" in refusal_of(ToyTransformer(width=4, layers=1))


def test_cache_larger_than_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < memory.available() < 2**50
    table = make_table("vit-image")
    _, (cached,) = cache_frozen(frozen_model("vit-image"), table)
    assert cached.states.nbytes == ROWS * 5 * 16 * 4
    monkeypatch.setattr(memory, "available", lambda: 2 * cached.states.nbytes - 1)
    cache_frozen(frozen_model("vit-image"), table)
    with pytest.raises(SizeError, match=r"would take .* MB, but .* are free; set it to false, or use fewer"):
        cache_frozen(frozen_model("vit-image"), table, table)


@pytest.mark.parametrize("case", RUNS)
def test_cached_layers_are_not_computed_again(case: str) -> None:
    model, table = frozen_model(case), make_table(case)
    above, (cached,) = cache_frozen(model, table)
    batch = cached.take(torch.arange(ROWS))
    before = above(model.initial, batch.inputs).logits
    body = frozen_cache._body(model)
    for part in (*body.embeds, body.layers[0]):
        for value in part.parameters():
            value.data.fill_(torch.nan)
    head = "lm" in case  # GPT-2's is tied to the embedding
    after = above(model.initial, batch.inputs)
    assert after.features is not None
    assert torch.isfinite(after.features).all()
    assert head or torch.equal(after.logits, before)


def test_layers_above_the_cache_have_dropout_and_cached_layers_have_none() -> None:
    model, table = frozen_model("bert-text"), make_table("bert-text")
    above, (cached,) = cache_frozen(model, table)
    rows = torch.arange(ROWS)
    seeds = example_seeds([Key(0)], 0, rows)[0]
    params = perturbed(above.initial)
    plain = above(params, cached.take(rows).inputs).logits
    assert torch.allclose(plain, model(params, table.take(rows).inputs).logits, atol=1e-5)
    assert above.uses_dropout()
    dropped = above(params, {**cached.take(rows).inputs, EXAMPLE_SEEDS: seeds}).logits
    assert not torch.allclose(dropped, plain, atol=1e-2)


def test_runs_of_one_process_share_image_features() -> None:
    """The second run computes nothing, and reads the same bits. Other images, or other weights, are computed."""
    task = image_task(seed=0)
    share_between_runs(2**30)
    try:
        _, (first,) = cache_frozen(clip(task, Key(0), shape="tiny"), task.train)
        states = first.take(torch.arange(ROWS)).inputs[CACHED_STATES]
        _, (second,) = cache_frozen(clip(task, Key(0), shape="tiny"), task.train)
        assert second.computed == {0}
        assert torch.equal(second.take(torch.arange(ROWS)).inputs[CACHED_STATES], states)
        other = image_task(seed=1)
        for model, table in (
            (clip(task, Key(1), shape="tiny"), task.train),
            (clip(task, Key(0), shape="tiny"), other.train),
        ):
            _, (third,) = cache_frozen(model, table)
            assert not third.computed
            assert not torch.equal(third.take(torch.arange(ROWS)).inputs[CACHED_STATES], states)
    finally:
        share_between_runs(0)


@pytest.mark.parametrize("case", ["bert-text", "vit-image"])
def test_runs_of_one_process_share_the_states_of_frozen_layers(case: str) -> None:
    """Also if layers above them differ. Other weights below, other inputs or another depth are computed."""
    table = make_table(case)
    share_between_runs(2**30)
    try:
        model = frozen_model(case)
        _, (first,) = cache_frozen(model, table)
        states = first.take(torch.arange(ROWS)).inputs[CACHED_STATES]
        _, (second,) = cache_frozen(replace(model, initial=perturbed(model.initial)), make_table(case))
        assert second.computed == {0}
        assert torch.equal(second.take(torch.arange(ROWS)).inputs[CACHED_STATES], states)
        changed, deeper = frozen_model(case), make_model(case, (*LOWEST, "layer.1"))
        with torch.no_grad():
            next(iter(changed.module.base_model.parameters())).add_(0.1)
        others = [(changed, table), (deeper, table)]
        if case == "bert-text":
            others.append((model, make_table(case, (9, 3, 2, 4))))
        for other, rows in others:
            _, (third,) = cache_frozen(other, rows)
            assert not third.computed
    finally:
        share_between_runs(0)


def image_task(seed: int) -> Task:
    table = Table({"pixel_values": noise(seed, ROWS, 3, 8, 8)}, torch.arange(ROWS) % 2)
    return Task("images", table, table, ("a", "b"), {}, 3, size=8)
