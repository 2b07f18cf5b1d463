"""Pruning and quantization: encoding and decoding, exact byte counts, and savings with SAFL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from architecture_fixtures import Few, adapted, made
from helpers import Clients, Script, last, play, run_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from partita.compression import CompressionError
from partita.compression.prune import (
    COLUMNS,
    MARKS,
    PLACES,
    ROWS,
    SHAPE,
    HeadPruner,
    HeadSelector,
    TopKMagnitude,
    prune,
)
from partita.compression.quantize import SCALE, Int8Quantizer, quantize
from partita.core import serialization, tensors
from partita.core.client import ClientError, Job
from partita.core.method import Context, Method, MethodError, Update, UpdateTransform, compose
from partita.core.model import ATTENTION
from partita.core.plan import RoundInfo, plan_for, share_everything
from partita.core.rng import Key
from partita.core.rounds import RoundResult, rounds
from partita.core.tensors import Tensors
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.safl import safl
from partita.testing.conformance import check_method
from partita.testing.toy import ToyTransformer

WIDE = ToyTransformer(width=36, layers=2)  # its matrices have 1,296 numbers
FOUR = Clients(a=5, b=6, c=7, d=8)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=(Key(seed) / "draw").generator())


def update_of(delta: Tensors, **slots: Tensors) -> Update:
    return Update("a", delta, slots, 1.0, dict.fromkeys(delta, 1), None)


def there_and_back(transform: UpdateTransform, update: Update, key: Key = Key(0)) -> tuple[Update, Update]:  # noqa: B008
    """The encoded update, and the update decoded from its packed bytes."""
    sent = transform.encode(update, key)
    slots = serialization.unpack(serialization.pack({"delta": sent.delta, **sent.slots}))
    assert sum(serialization.byte_counts({"delta": sent.delta, **sent.slots}).values()) == len(
        serialization.pack({"delta": sent.delta, **sent.slots})
    )
    return sent, transform.decode_update(replace(update, delta=slots.pop("delta"), slots=slots))


# ---- pruning by magnitude


@pytest.mark.parametrize("shape", [(1025,), (40, 30), (8, 8, 30), (300, 300)])
@pytest.mark.parametrize("keep", [0.001, 0.02, 0.1, 0.5, 0.99])
def test_the_largest_numbers_arrive_and_the_others_count_as_zero(shape: tuple[int, ...], keep: float) -> None:
    value = draw(1, *shape)
    sent, opened = there_and_back(TopKMagnitude(keep), update_of({"w": value}))
    count = -(-value.numel() * keep // 1)
    limit = value.abs().flatten().sort(descending=True).values[int(count) - 1]
    assert torch.equal(opened.delta["w"], value.where(value.abs() >= limit, 0.0))
    assert sent.delta["w"].shape == (count,)
    assert opened.slots == {}


@pytest.mark.parametrize(
    ("size", "keep", "slot", "kind"),
    [
        (60_000, 0.01, PLACES, torch.int16),
        (65_536, 0.01, PLACES, torch.int16),
        (65_537, 0.01, PLACES, torch.int32),
        (60_000, 0.1, MARKS, torch.uint8),
        (70_000, 0.04, MARKS, torch.uint8),
    ],
)
def test_places_are_told_in_the_smallest_way(size: int, keep: float, slot: str, kind: torch.dtype) -> None:
    value = torch.zeros(size)
    value[0], value[-1] = 2.0, -3.0  # the ends of the range
    sent, opened = there_and_back(TopKMagnitude(keep), update_of({"w": value}))
    assert sent.slots.keys() == {SHAPE, slot}
    assert sent.slots[slot]["w"].dtype == kind
    listed = len(sent.delta["w"]) * (4 if size > 2**16 else 2)
    assert sent.slots[slot]["w"].nbytes == min(listed, -(-size // 8))
    assert torch.equal(opened.delta["w"], value)


def test_small_tensors_and_the_slots_of_others_travel_whole() -> None:
    given = update_of({"bias": draw(0, 1024), "w": draw(1, 33, 32)}, drag={"w": draw(2, 33, 32)})
    sent, opened = there_and_back(TopKMagnitude(0.1), given)
    assert torch.equal(sent.delta["bias"], given.delta["bias"])
    assert tensors.equal(sent.slots["drag"], given.slots["drag"])
    assert opened.slots.keys() == {"drag"}
    assert len(sent.delta["w"]) == 106


@settings(max_examples=40)
@given(st.integers(1025, 5000), st.floats(0.001, 1.0), st.integers(0, 99))
def test_what_travels_is_never_more_than_the_whole_and_the_places_cost_at_most_a_bit_a_number(
    size: int, keep: float, seed: int
) -> None:
    sent = TopKMagnitude(keep).encode(update_of({"w": draw(seed, size)}), Key(0))
    slots = {slot: part["w"].nbytes for slot, part in sent.slots.items() if slot != SHAPE}
    assert sum(slots.values()) <= -(-size // 8)
    assert sent.delta["w"].numel() <= size


def test_keeping_all_is_fedavg_bit_for_bit() -> None:
    one, two = (play(run_of(method, 2, cohort=2), WIDE, FOUR) for method in (prune(keep=1.0), fedavg()))
    assert tensors.equal(last(one), last(two))
    assert [each.traffic for each in one] == [each.traffic for each in two]


# ---- pruning of heads


def heads_of(case: str, method: Method, **more: Any) -> list[RoundResult]:
    model = adapted(case)
    return play(run_of(method, 1, **more), model, Few(made(case)))


@pytest.mark.parametrize("case", ["bert-text", "gpt2-text", "vit-image", "llama-tokens", "dinov2-image"])
def test_heads_that_do_not_travel_are_zero_and_all_else_is_as_it_was(case: str) -> None:
    model = adapted(case)
    model.module.config.label2id = {"O": 0, "B-x": 1, "I-x": 2}
    parts = model.head_dimensions()
    plan = plan_for(share_everything, model, RoundInfo(0, 1, "a"))
    paid = {"layer.0": torch.tensor([0.1, 0.3]), "layer.1": torch.tensor([0.6, 0.2])}
    ctx = Context(model, plan, model.initial, {}, {}, 0.1, {ATTENTION: paid})
    told, remembered = HeadSelector(0.5).finish({}, {}, ctx)
    assert remembered == {}
    delta = {name: draw(3, *value.shape) + 5 for name, value in model.initial.items()}
    sent, opened = there_and_back(HeadPruner(), update_of(delta, **told))
    saved = 0
    for name, value in delta.items():
        layer = 0 if name in model.names("layer.0") else 1
        if name not in parts or parts[name][1] == 1:
            assert torch.equal(opened.delta[name], value)
            continue
        dim, count = parts[name]
        lost = 1 if layer == 1 else 0
        whole = [part.clone() for part in value.chunk(count, dim)]
        whole[lost].zero_()
        assert torch.equal(opened.delta[name], torch.cat(whole, dim)), name
        assert sent.delta[name].numel() == value.numel() // 2
        saved += sent.delta[name].numel()
    assert saved
    assert opened.slots == {}


def test_a_shared_head_travels_with_any_of_those_that_share_it() -> None:
    rule = HeadSelector(0.5)
    paid = torch.tensor([0.9, 0.1, 0.8, 0.2, 0.3, 0.1, 0.2, 0.7])
    assert rule._kept(paid, 8).tolist() == [True, False, True, False, True, False, False, True]
    assert rule._kept(paid, 4).tolist() == [True, True, True, True]
    assert HeadSelector(0.25)._kept(paid, 4).tolist() == [True, True, False, False]
    assert HeadSelector(0.01)._kept(paid, 8).sum() == 1


def test_with_safl_the_heads_that_attend_least_stay_at_home_every_round() -> None:
    for options in ({"k": 1}, {"k": 1, "every": 2}):
        model = adapted("bert-text")
        method = compose(safl(**options), prune("heads"))
        played = play(run_of(method, 2), model, Few(made("bert-text")))
        plain = play(run_of(safl(**options), 2), model, Few(made("bert-text")))
        for one, two in zip(played, plain, strict=True):
            assert one.sent == two.sent or one.number
            assert sum(one.traffic.up.values()) < sum(two.traffic.up.values())


def test_head_pruning_needs_safl_and_more_than_one_head_and_is_open_about_looking() -> None:
    with pytest.raises(MethodError, match=r"needs the attention that safl measures; compose it as 'safl\+prune'"):
        heads_of("bert-text", prune("heads"))
    with pytest.raises(MethodError, match="no noise, or set by = 'magnitude'"):
        heads_of("bert-text", compose(safl(noise=1.0, probe=0.9), prune("heads")))
    with pytest.raises(MethodError, match="has one head per layer, so none can be pruned"):
        play(run_of(compose(safl(), prune("heads")), 1), ToyTransformer(width=4), FOUR)
    [rule] = prune("heads").client_rules
    assert rule.uses_data
    assert rule.release is None
    with pytest.raises(MethodError, match=r"compose 'prune\+quantize'"):
        play(run_of(compose(quantize(), prune()), 1), WIDE, FOUR)
    with pytest.raises(MethodError, match=r"method\.keep is 0"):
        prune(keep=0.0)


# ---- quantization


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("shape", [(100,), (9, 30), (3, 5, 30)])
def test_a_number_is_off_by_less_than_a_step_of_its_row(shape: tuple[int, ...], rows: bool) -> None:
    value = draw(1, *shape) * torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
    sent, opened = there_and_back(Int8Quantizer(rows), update_of({"w": value}))
    assert sent.delta["w"].dtype == torch.int8
    assert sent.delta["w"].shape == value.shape
    whole = rows and value.ndim > 1
    largest = value.flatten(1).abs().amax(1) if whole else value.abs().max().view(1)
    step = (largest / 127).view(-1, *[1] * (value.ndim - 1))
    assert sent.slots[SCALE]["w"].shape == largest.shape
    assert bool(((opened.delta["w"] - value).abs() <= step * (1 + 1e-4)).all())
    assert not torch.equal(opened.delta["w"], value)


def test_rounding_keeps_the_mean_and_follows_its_key() -> None:
    value = draw(2, 4, 25)
    update = update_of({"w": value})
    opened = [there_and_back(Int8Quantizer(), update, Key(0) / number)[1].delta["w"] for number in range(400)]
    step = value.abs().amax(1, keepdim=True) / 127
    # The mean of 400 draws, each of a variance of at most a quarter of a step squared.
    assert bool(((torch.stack(opened).mean(0) - value).abs() < 5 * 0.5 * step / 20).all())
    assert torch.equal(there_and_back(Int8Quantizer(), update, Key(0) / 7)[1].delta["w"], opened[7])
    assert not torch.equal(opened[7], opened[8])


def test_whole_steps_and_zeros_arrive_exactly() -> None:
    grid = torch.arange(-127, 128, dtype=torch.float32).repeat(2, 1) * torch.tensor([[0.5], [4.0]])
    given = {"grid": grid, "still": torch.zeros(70), "few": draw(0, 64)}
    sent, opened = there_and_back(Int8Quantizer(), update_of(given))
    assert tensors.equal(opened.delta, given)
    assert sent.slots[SCALE].keys() == {"grid", "still"}, "64 numbers are too few for a scale to save bytes"


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_is_noticed(odd: float) -> None:
    value = draw(0, 70)
    value[3] = odd
    assert not bool(there_and_back(Int8Quantizer(), update_of({"w": value}))[1].delta["w"].isfinite().all())


# ---- compositions


@pytest.mark.parametrize(
    ("name", "options", "model"),
    [
        pytest.param("prune", {"keep": 0.1}, WIDE, marks=pytest.mark.slow),
        pytest.param("quantize", {}, WIDE, marks=pytest.mark.slow),
        pytest.param("quantize", {"rows": False}, WIDE, marks=pytest.mark.slow),
        pytest.param("safl+prune+quantize", {"k": 1, "keep": 0.1}, WIDE, marks=pytest.mark.slow),
    ],
)
def test_the_channel_keeps_its_promises(name: str, options: dict[str, Any], model: ToyTransformer) -> None:
    """Conformance includes that serialized messages change neither the result nor the bytes."""
    found = check_method(build(name, options), model, Clients(c0=3, c1=9, c2=12, c3=6), tolerance=1e-4)
    plain = check_method(fedavg(), model, Clients(c0=3, c1=9, c2=12, c3=6), tolerance=1e-4)
    assert 0 < found.bytes_up < 0.5 * plain.bytes_up


@pytest.mark.slow
def test_pruned_heads_keep_their_promises() -> None:
    model = adapted("bert-text")
    model = replace(model, initial={name: value + 0.3 * draw(1, *value.shape) for name, value in model.initial.items()})
    method = compose(safl(k=1, every=2), prune("heads"), quantize())
    assert check_method(method, model, Few(made("bert-text")), tolerance=1e-4).bytes_up > 0


def shrunk(method: Method, model: Any, population: Any) -> int:
    [each] = play(run_of(method, 1, steps=1), model, population)
    return sum(each.traffic.up.values())


def test_a_third_of_the_layers_with_pruned_heads_is_three_quarters_less_than_fedavg() -> None:
    """BERT-base at an eighth of its width, which keeps the proportions of its parts."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 384}
    model = adapted("bert-text", sizes={**sizes, "vocab_size": 3815, "max_position_embeddings": 64})
    clients = Few(made("bert-text"))
    whole = shrunk(fedavg(), model, clients)
    less = {
        name: 1 - shrunk(build(name, options), model, clients) / whole
        for name, options in {
            "safl": {},
            "safl+prune": {"by": "heads"},
            "safl+prune+quantize": {"by": "heads"},
        }.items()
    }
    assert less == pytest.approx({"safl": 0.735, "safl+prune": 0.777, "safl+prune+quantize": 0.940}, abs=6e-4)
    assert less["safl+prune"] > 0.75


# ---- updates that cannot be decoded


def spoil(change: Callable[[Update], Update], method: Method, skip_failed_clients: bool) -> RoundResult:
    """A round in which client a's update arrives changed."""
    run = run_of(method, 1, skip_failed_clients=skip_failed_clients)

    def answer(job: Job) -> Update:
        delta = {name: draw(1, *value.shape) for name, value in WIDE.initial.items()}
        update = Update(job.client, delta, {}, 1.0, dict.fromkeys(delta, 1), 0.5)
        for index, transform in enumerate(method.transforms):
            update = transform.encode(update, Key(0) / index)
        return change(update) if job.client == "a" else update

    return next(iter(rounds(run, WIDE, Script(answer))))


def with_slot(update: Update, slot: str, name: str, value: Tensor | None) -> Update:
    part = {key: each for key, each in update.slots[slot].items() if key != name}
    return replace(update, slots={**update.slots, slot: part if value is None else {**part, name: value}})


NAME = "layers.0.query.weight"
SPOILT: dict[str, tuple[Method, Callable[[Update], Update], str]] = {
    "no scale": (quantize(), lambda u: with_slot(u, SCALE, NAME, None), "is torch.int8 .* scale of shape None"),
    "odd scale": (quantize(), lambda u: with_slot(u, SCALE, NAME, torch.ones(3)), r"with a scale of shape \(3,\)"),
    "no places": (prune(), lambda u: with_slot(u, MARKS, NAME, None), "its indices are missing or given twice"),
    "few places": (prune(), lambda u: with_slot(u, MARKS, NAME, torch.zeros(162).byte()), "indices that do not fit"),
    "short marks": (prune(), lambda u: with_slot(u, MARKS, NAME, torch.zeros(9).byte()), "indices that do not fit"),
    "a huge shape": (
        prune(),
        lambda u: with_slot(u, SHAPE, NAME, torch.tensor([10**6, 10**6])),
        "values of shape .* for shape",
    ),
    "no numbers": (
        prune(),
        lambda u: replace(u, delta={k: v for k, v in u.delta.items() if k != NAME}),
        "has no values",
    ),
    "places outside": (
        prune(keep=0.01),
        lambda u: with_slot(u, PLACES, NAME, torch.full((13,), 32767, dtype=torch.int16)),
        "indices that do not fit",
    ),
    "no heads": (
        Method("cut", transforms=(HeadPruner(),)),
        lambda u: replace(u, slots={ROWS: {NAME: torch.zeros(4).bool()}}),
        "does not consist of 0 heads",
    ),
    "odd heads": (
        Method("cut", transforms=(HeadPruner(),)),
        lambda u: replace(u, slots={COLUMNS: {NAME: torch.tensor([1, 1, 1, 1, 1]).bool()}}),
        "does not consist of 5 heads",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_message_that_cannot_be_opened_is_that_clients_fault(kind: str) -> None:
    method, change, message = SPOILT[kind]
    with pytest.raises(ClientError, match=rf"client 'a': sent an update that cannot be decoded: .*{message}"):
        spoil(change, method, skip_failed_clients=False)
    each = spoil(change, method, skip_failed_clients=True)
    assert [lost.client for lost in each.lost] == ["a"]
    assert list(each.sent) == ["b"]
    assert issubclass(CompressionError, ValueError)
