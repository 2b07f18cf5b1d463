"""How a client ranks its layers, how many it selects, and what it stores and reports."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import Clients, play, toy_run
from torch import Tensor

from partita.core.client_rule import Context, LayerSelection
from partita.core.data import Batch, Examples
from partita.core.method_error import MethodError
from partita.core.model import ATTENTION, TokenChoice, layer_tag
from partita.core.noise import add_noise, gaussian_noise
from partita.core.plan import Plan, RoundInfo, plan_for, share_everything
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.methods.fedfrozen import fedfrozen
from partita.methods.layer_skipping import layer_skipping
from partita.methods.safl import safl
from partita.methods.selectors import (
    Attention,
    Gradient,
    Random,
    RoundRobin,
    Selector,
    Static,
    TopLayers,
    clip_rows,
    resolve_count,
    sample,
)
from partita.storage.client_store import MemoryStore
from partita.testing.toy import ToyTransformer

MODEL = ToyTransformer(width=4, layers=4)
LAYERS = [f"layer.{number}" for number in range(4)]
CLIENTS = Clients(a=40, b=9, c=6)
PLAN = plan_for(share_everything, MODEL, RoundInfo(0, 3, "a"))


def selection_key(round: int = 0, client: str = "a") -> Key:
    return Key(7) / "round" / round / "client" / client / "narrow" / 0


def make_context(model: ToyTransformer = MODEL, plan: Plan = PLAN, **more: object) -> Context:
    return Context(model, plan, model.initial, {}, {}, 0.1, **{"notes": {}, "round_info": RoundInfo(0, 1, ""), **more})  # type: ignore[arg-type]


def make_rule(select: Selector, k: float = 2, **more: object) -> TopLayers:
    return TopLayers(select, k, **more)  # type: ignore[arg-type]


def selected_layers(choice: LayerSelection) -> list[str]:
    return sorted({layer for name in choice.names if (layer := layer_tag(MODEL.tags[name]))})


def run_selection(rule: TopLayers, round: int = 0, client: str = "a", ctx: Context | None = None) -> LayerSelection:
    ctx = replace(ctx or make_context(), round_info=RoundInfo(round, 10, client))
    return rule.narrow(ctx.plan, CLIENTS[client].train, ctx, selection_key(round, client))


def scores_by_example(examples: Examples, places: Tensor) -> Tensor:
    """(example, layer)"""
    attention = MODEL.attention(MODEL.initial, examples.take(places), "auto")
    return torch.stack([attention[layer].mean(1) for layer in LAYERS], 1)


# ---- attention


@pytest.mark.parametrize("client", ["a", "b", "c"])
def test_attention_selects_the_layers_with_the_highest_mean_score_and_the_head(client: str) -> None:
    examples = CLIENTS[client].train
    scores = scores_by_example(examples, torch.arange(len(examples))).mean(0)
    choice = run_selection(make_rule(Attention(probe=1.0)), client=client)
    best = sorted(LAYERS, key=lambda layer: -float(scores[LAYERS.index(layer)]))[:2]
    assert selected_layers(choice) == sorted(best)
    assert choice.names == MODEL.names("head", *best)
    told = {f"attention/{layer}": pytest.approx(float(score)) for layer, score in zip(LAYERS, scores, strict=True)}
    assert choice.metrics == told
    assert choice.notes[ATTENTION].keys() == set(LAYERS)
    assert all(value.shape == (1,) for value in choice.notes[ATTENTION].values())


def test_attention_reads_only_the_probe_of_each_client() -> None:
    @dataclass(frozen=True)
    class Watched:
        examples: Examples
        seen: list[int] = field(default_factory=list)

        def __len__(self) -> int:
            return len(self.examples)

        def take(self, indices: Tensor) -> Batch:
            self.seen.extend(indices.tolist())
            return self.examples.take(indices)

    watched = Watched(CLIENTS["a"].train)
    told = [
        make_rule(Attention(probe=probe)).narrow(PLAN, watched, make_context(), selection_key()).metrics
        for probe in (5, 0.25, 1000)
    ]
    counts = [5, 10, 40]
    assert [len(set(part)) for part in (watched.seen[:5], watched.seen[5:15], watched.seen[15:])] == counts
    assert len(watched.seen) == sum(counts)
    assert told[0] != told[1] != told[2]
    everyone = {
        client: run_selection(make_rule(Attention()), client=client).metrics["attention/layer.0"] for client in "abc"
    }
    assert len(set(everyone.values())) == 3


def test_attention_of_a_long_probe_equals_one_pass() -> None:
    many = Clients(a=150)["a"].train
    choice = make_rule(Attention(probe=150)).narrow(PLAN, many, make_context(), selection_key())
    scores = scores_by_example(many, torch.arange(150)).mean(0)
    assert list(choice.metrics.values()) == pytest.approx(scores.tolist(), rel=1e-5)


class ModelWithConstantAttention(ToyTransformer):
    """Has the same attention score everywhere."""

    attention_score = 0.0

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, Tensor]:
        return {layer: torch.full((len(batch.targets), 1), self.attention_score) for layer in LAYERS}


@pytest.mark.parametrize(
    ("attention_score", "message"), [(0.0, "has a token of method.tokens"), (1.0, "has a token outside method.tokens")]
)
def test_probe_without_usable_tokens_is_refused_unless_noisy(attention_score: float, message: str) -> None:
    model = ModelWithConstantAttention(width=4, layers=4)
    model.attention_score = attention_score
    with pytest.raises(MethodError, match=rf"none of the 6 examples in a client's probe {message}.*method.probe"):
        run_selection(make_rule(Attention("entities")), client="c", ctx=make_context(model))
    told = run_selection(make_rule(Attention(probe=0.5, noise=1.0)), ctx=make_context(model)).metrics
    assert len(told) == 4, "with noise, an error would reveal something about the data"


def test_layer_without_an_attention_score_is_refused() -> None:
    class Short(ToyTransformer):
        def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, Tensor]:
            return {
                layer: score for layer, score in super().attention(params, batch, tokens).items() if layer != LAYERS[2]
            }

    with pytest.raises(MethodError, match=r"returns no attention for layer\.2"):
        run_selection(make_rule(Attention()), ctx=make_context(Short(width=4, layers=4)))


# ---- attention with noise


def test_clip_rows_bounds_norms_and_keeps_directions() -> None:
    rows = 3 * torch.rand(50, 6, generator=Key(1).generator(), dtype=torch.float64)
    rows[:5] *= 1e-3
    for norm in (0.3, 1.0, 5.0):
        cut = clip_rows(rows, norm)
        assert float(cut.norm(dim=1).max()) <= norm * (1 + 1e-12)
        assert torch.allclose(cut / cut.norm(dim=1, keepdim=True), rows / rows.norm(dim=1, keepdim=True))
        assert torch.equal(cut[:5], rows[:5]), "rows within the norm do not change"


def test_poisson_sample_takes_examples_independently() -> None:
    places = [(Key(0) / number).poisson(60, 0.3) for number in range(300)]
    counts = Counter(place for some in places for place in some.tolist())
    sizes = torch.tensor([len(some) for some in places], dtype=torch.float64)
    assert set(counts) == set(range(60))
    assert all(abs(count - 90) < 5 * math.sqrt(300 * 0.21) for count in counts.values())
    assert float(sizes.mean()) == pytest.approx(18, abs=1)
    assert float(sizes.var()) == pytest.approx(60 * 0.21, rel=0.3), "the sample size is random"
    assert len(Key(0).poisson(60, 1.0)) == 60
    assert len(sample(60, 0.3, Key(0))) == 18


def test_noisy_scores_are_the_direction_of_the_clipped_sum_plus_noise() -> None:
    examples = CLIENTS["a"].train
    exact = clip_rows(scores_by_example(examples, torch.arange(40)).double(), 0.2).sum(0)
    almost = run_selection(make_rule(Attention(probe=1.0, noise=1e-9, clip=0.2)))
    assert list(almost.metrics.values()) == pytest.approx((exact / exact.norm()).tolist(), rel=1e-6)
    assert almost.notes[ATTENTION] == {}, "head scores are not part of the release"
    draws = []
    for round in range(200):
        draw = gaussian_noise({"scores": exact}, selection_key(round) / "noise", 1.0)["scores"]
        noisy = add_noise(exact, 3.0 * 0.2 * draw, 3.0 * 0.2)
        told = list(run_selection(make_rule(Attention(probe=1.0, noise=3.0, clip=0.2)), round).metrics.values())
        assert told == pytest.approx((noisy / noisy.norm()).tolist(), rel=1e-6)
        draws.append(draw)
    assert float(torch.stack(draws).std()) == pytest.approx(1, abs=0.1)


def test_noisy_scores_of_an_empty_sample_are_noise_only() -> None:
    choice = run_selection(make_rule(Attention(probe=1e-9, noise=1.0)))
    assert torch.tensor(list(choice.metrics.values())).norm() == pytest.approx(1)
    assert len(selected_layers(choice)) == 2


# ---- other selectors


def test_gradient_selects_the_layers_with_the_largest_gradients() -> None:
    examples = CLIENTS["a"].train
    batch = examples.take(torch.arange(40))
    live = {name: value.clone().requires_grad_() for name, value in MODEL.initial.items()}
    MODEL.losses(MODEL(live, batch.inputs), batch.targets).mean().backward()
    norms = {}
    for layer in LAYERS:
        gradients = [live[name].grad for name in MODEL.names(layer)]
        norms[layer] = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None))
    choice = run_selection(make_rule(Gradient(probe=1.0)))
    assert choice.metrics == {f"gradient/{layer}": pytest.approx(norm, rel=1e-4) for layer, norm in norms.items()}
    assert selected_layers(choice) == sorted(sorted(LAYERS, key=lambda layer: -norms[layer])[:2])


def test_gradient_of_a_long_probe_equals_one_pass() -> None:
    many = Clients(a=150)["a"].train
    whole = make_rule(Gradient(probe=150)).narrow(PLAN, many, make_context(), selection_key()).metrics
    batch = many.take(torch.arange(150))
    live = {name: value.clone().requires_grad_() for name, value in MODEL.initial.items()}
    MODEL.losses(MODEL(live, batch.inputs), batch.targets).mean().backward()
    gradients = torch.cat([live[name].grad.flatten() for name in sorted(MODEL.names("layer.2"))])  # type: ignore[union-attr]
    assert whole["gradient/layer.2"] == pytest.approx(float(gradients.norm()), rel=1e-4)


def test_gradient_scores_ignore_frozen_parameters() -> None:
    frozen = plan_for(fedfrozen(0).plan, MODEL, RoundInfo(0, 3, "a"))
    told = [
        run_selection(make_rule(Gradient()), ctx=make_context(plan=plan)).metrics["gradient/layer.0"]
        for plan in (PLAN, frozen)
    ]
    assert told[1] < told[0]


def test_random_selects_layers_uniformly_and_differs_between_clients() -> None:
    counts: Counter[str] = Counter()
    drawn = []
    for round in range(400):
        drawn.append(selected_layers(run_selection(make_rule(Random()), round)))
        counts.update(drawn[-1])
    assert all(abs(counts[layer] - 200) < 5 * math.sqrt(400 * 0.25) for layer in LAYERS)
    assert drawn[:20] != [selected_layers(run_selection(make_rule(Random()), round, "b")) for round in range(20)]
    assert drawn[:20] == [selected_layers(run_selection(make_rule(Random()), round)) for round in range(20)]


def test_round_robin_selects_layers_equally_often_for_all_clients() -> None:
    rounds = [selected_layers(run_selection(make_rule(RoundRobin(), 3), round)) for round in range(4)]
    assert rounds[0] == LAYERS[:3]
    assert rounds[1] == sorted([LAYERS[3], *LAYERS[:2]])
    assert Counter(layer for each in rounds for layer in each) == dict.fromkeys(LAYERS, 3)
    assert rounds == [selected_layers(run_selection(make_rule(RoundRobin(), 3), round, "b")) for round in range(4)]


def test_static_selects_the_layers_of_layer_skipping() -> None:
    for k in (1, 2, 0.5, 1.0):
        plan = plan_for(layer_skipping(k if isinstance(k, float) else k / 4).plan, MODEL, RoundInfo(0, 3, "a"))
        assert PLAN.narrow(run_selection(make_rule(Static(), k)).names) == plan


@pytest.mark.parametrize("select", [Random(), Static(), RoundRobin()])
def test_selectors_without_data_read_nothing_and_report_nothing(select: Selector) -> None:
    choice = make_rule(select).narrow(PLAN, None, make_context(), selection_key())  # type: ignore[arg-type]
    assert choice.metrics == {}
    assert len(selected_layers(choice)) == 2


# ---- number of layers


@pytest.mark.parametrize(
    ("k", "layers", "count"),
    [
        (0.33, 24, 8),
        (0.33, 12, 4),
        (0.33, 6, 2),
        (0.33, 2, 1),
        (1.0, 5, 5),
        (1, 5, 1),
        (8, 24, 8),
        (8, 3, 3),
        (0.01, 4, 1),
    ],
)
def test_layer_count_is_a_number_or_a_fraction_of_at_least_one(k: float, layers: int, count: int) -> None:
    assert resolve_count(k, layers) == count


@pytest.mark.parametrize("k", [0, -1, 0.0, 1.5, float("nan")])
def test_invalid_layer_count_is_refused(k: float) -> None:
    with pytest.raises(MethodError, match=r"method\.k is"):
        resolve_count(k, 4)


def test_client_capacity_overrides_the_layer_count() -> None:
    rule = make_rule(Random(), 1, capacity=(("b", 0.5), ("c", 4)))
    assert [len(selected_layers(run_selection(rule, client=client))) for client in "abc"] == [1, 2, 4]


# ---- the plan


def test_selection_is_limited_to_layers_the_plan_trains() -> None:
    plan = PLAN.narrow(MODEL.names("layer.1", "layer.3", "head", "embedding"))
    assert selected_layers(run_selection(make_rule(Static(), 1), ctx=make_context(plan=plan))) == ["layer.3"]
    assert selected_layers(run_selection(make_rule(RoundRobin(), 1), 1, ctx=make_context(plan=plan))) == ["layer.3"]
    none = PLAN.narrow(MODEL.names("head", "embedding"))
    assert run_selection(make_rule(Attention()), ctx=make_context(plan=none)).names == MODEL.names("head")


def test_selection_includes_embeddings_when_asked() -> None:
    assert "embed.weight" not in run_selection(make_rule(Static())).names
    assert "embed.weight" in run_selection(make_rule(Static(), embeddings=True)).names
    assert run_selection(make_rule(Attention(), 4, embeddings=True)).names == PLAN.train


# ---- memory


@dataclass
class AttentionCountingModel(ToyTransformer):
    """Counts the calls of its attention."""

    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(width=4, layers=4)

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, Tensor]:
        self.asked.append(len(batch.targets))
        return super().attention(params, batch, tokens)


def test_selection_lasts_for_every_rounds_and_reports_scores_once() -> None:
    model = AttentionCountingModel()
    played = play(toy_run(safl(k=1, every=3), 7), model, CLIENTS)
    assert len(model.asked) == 3 * 3, "in rounds 0, 3 and 6, by three clients"
    sent = [each.sent for each in played]
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] == sent[4] == sent[5]
    assert [bool(each.metrics) for each in played] == [True, False, False, True, False, False, True]


def test_each_client_sends_only_its_latest_selection() -> None:
    for each in play(toy_run(safl(k=1, every=2, select="random"), 8, steps=1), MODEL, CLIENTS):
        for names in each.sent.values():
            assert len({layer for name in names if (layer := layer_tag(MODEL.tags[name]))}) == 1


def test_returning_client_selects_again_when_its_selection_is_too_old() -> None:
    rule = safl(k=1, every=3).client_rules[0]
    assert isinstance(rule, TopLayers)

    def later(choice: LayerSelection, round: int, plan: Plan = PLAN) -> LayerSelection:
        ctx = replace(make_context(plan=plan), notes=choice.notes)
        _, remember = rule.finish({}, {}, ctx)
        return run_selection(rule, round, ctx=replace(make_context(plan=plan), memory=remember))

    first = run_selection(rule, 4)
    assert first.metrics
    assert not later(first, 6).metrics
    assert later(first, 6).names == first.names
    for layer, scores in later(first, 6).notes[ATTENTION].items():
        assert torch.equal(scores, first.notes[ATTENTION][layer])
    assert later(first, 7).metrics
    assert not later(later(first, 5), 6).metrics
    assert later(later(first, 5), 7).metrics, "using a selection does not extend its life"
    elsewhere = PLAN.narrow(PLAN.train - first.names)
    assert later(first, 5, elsewhere).metrics, "the selected names are no longer in the plan"


def test_selection_of_every_round_is_not_stored() -> None:
    store = MemoryStore()
    play(toy_run(safl(k=1), 2), MODEL, CLIENTS, store=store)
    assert not store.load("a", 2).memory
    play(toy_run(safl(k=1, every=2), 2), MODEL, CLIENTS, store=store)
    assert store.load("a", 2).memory
