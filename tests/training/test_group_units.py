"""DP-SGD by group: a group is drawn whole, contributes one clipped mean gradient, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from group_fixtures import Hospitals, Patients, patients, take_one
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run
from mechanism import GradientRecorder
from scipy.stats import binom
from torch import Tensor

from partita.core.client import ClientState, begin_round, finish_round
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.group_units import GroupUnits, group_units, number_groups
from partita.core.method_error import MethodError
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.training.batching import collate
from partita.training.dp_sgd import clipped_sum
from partita.training.local_training import train_clients

SETTINGS = PrivacySettings(clip=0.5, noise=0.8, unit="group", group="patient")
QUIET = replace(SETTINGS, noise=0.0)


def by_example(settings: PrivacySettings) -> PrivacySettings:
    return replace(settings, unit="example", group=None)


def group_run(settings: PrivacySettings = SETTINGS, count: int = 2, **more: Any) -> Run:
    return toy_run(replace(fedavg(), privacy=settings), count, **more)


def gradients(run: Run, *clients: tuple[str, Patients]) -> dict[str, list[Tensors]]:
    """The gradients of the first round by client and step; all clients in one block."""
    model = toy_model()
    server = initial_server(run, model)
    client_rounds = []
    for name, examples in clients:
        job, _ = make_job(run, model, server, 0, name)
        client_rounds.append(begin_round(run, model, job, ClientState(), examples))
    recorder = GradientRecorder("sgd")
    recording = replace(run, training=replace(run.training, optimizer=recorder))  # type: ignore[arg-type]
    train_clients(recording, client_rounds, recorder.block)
    found: dict[str, list[Tensors]] = {name: [] for name, _ in clients}
    for (name, _, _), grads in sorted(recorder.gradients().items(), key=lambda item: item[0]):
        found[name].append(grads)
    return found


def mean_gradient(examples: Patients, group: int) -> Tensors:
    """The mean of the gradients of a group's examples at the initial model, one backward pass each."""
    model = toy_model()
    rows = (examples.groups == group).nonzero().flatten().tolist()
    total = {name: torch.zeros_like(value) for name, value in model.initial.items()}
    for row in rows:
        leaves = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
        batch = take_one(examples, row)
        model.losses(model(leaves, batch.inputs), batch.targets).sum().backward()
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            total[name] += leaf.grad / len(rows)
    return total


def norm(grads: Tensors) -> float:
    return float(torch.sqrt(sum((value.double() ** 2).sum() for value in grads.values())))  # type: ignore[arg-type]


# ---- reduction: groups of one example are examples


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_groups_of_one_example_are_examples_bit_for_bit(block: int, sampling: Any) -> None:
    hospitals = Hospitals(a=[1] * 12, b=[1] * 7, c=[1] * 3)
    groups, examples = (
        final_params(play(group_run(replace(settings, sampling=sampling), 3), toy_model(), hospitals, block=block))
        for settings in (SETTINGS, by_example(SETTINGS))
    )
    assert max_difference(groups, examples) == 0


def test_a_block_of_clients_computes_what_single_clients_compute() -> None:
    """Clients differ in their numbers of groups and of members, so batches are padded in both dimensions."""
    hospitals = Hospitals(a=[3, 1, 5, 2, 2, 1], b=[1, 1], c=[7, 2, 1, 1])
    alone, together = (final_params(play(group_run(), toy_model(), hospitals, block=block)) for block in (1, 3))
    assert max_difference(alone, together) < 1e-6


# ---- the contribution of a group


@pytest.mark.parametrize("microbatch", [None, 2])
def test_sum_is_that_of_clipped_means_over_each_groups_examples(microbatch: int | None) -> None:
    examples = patients("a", [3, 1, 5, 2])
    settings = replace(QUIET, microbatch=microbatch, clip=1.5)
    run = group_run(settings, batch_size=4, steps=1)  # all four groups are drawn
    [grads] = gradients(run, ("a", examples))["a"]
    expected = {name: torch.zeros_like(value) for name, value in grads.items()}
    norms = []
    for group in examples.groups.unique().tolist():
        own = mean_gradient(examples, group)
        norms.append(norm(own))
        for name, value in own.items():
            expected[name] += value * min(1.0, 1.5 / norms[-1]) / 4  # divided by the expected number of groups
    assert min(norms) < 1.5 < max(norms)
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("kind", "microbatch"), [("groups", None), ("groups", 2), ("examples", None), ("examples", 2)])
def test_replacing_a_unit_moves_the_sum_by_at_most_two_clips_and_removing_it_by_one(
    kind: str, microbatch: int | None, padded: bool
) -> None:
    """By brute force: every unit, a group or an example, alone and padded beside a larger client in one block."""
    examples, clip, groups = patients("a", [4, 1, 20, 2] if kind == "groups" else [1] * 4), 0.3, kind == "groups"
    settings = replace(QUIET if groups else by_example(QUIET), clip=clip, microbatch=microbatch)
    run = group_run(settings, batch_size=4, steps=1)
    beside = [("b", patients("b", [30, 2, 3, 1] if groups else [1] * 9))] if padded else []

    def gradient(run: Run, examples: Patients) -> Tensors:
        [found] = gradients(run, ("a", examples), *beside)["a"]
        return found

    whole = gradient(run, examples)
    for group in examples.groups.unique().tolist():
        own = examples.groups == group
        wild = Patients(
            torch.where(own[:, None, None], 1e4 * examples.x, examples.x),
            torch.where(own, 2 - examples.y, examples.y),
            examples.groups,
        )
        moved = gradient(run, wild)
        assert norm({name: 4 * (whole[name] - moved[name]) for name in whole}) <= 2 * clip * (1 + 1e-5)
        removed = Patients(examples.x[~own], examples.y[~own], examples.groups[~own])
        shorter = replace(run, training=replace(run.training, batch_size=3))
        rest = gradient(shorter, removed)
        difference = norm({name: 4 * whole[name] - 3 * rest[name] for name in whole})
        assert 0.5 * clip < difference <= clip * (1 + 1e-5)


def test_a_group_counts_once_however_many_examples_it_has() -> None:
    one, many = patients("a", [1, 1]), patients("a", [1, 1])
    repeated = Patients(one.x[[0, 1, 1, 1, 1]], one.y[[0, 1, 1, 1, 1]], one.groups[[0, 1, 1, 1, 1]])
    run = group_run(QUIET, batch_size=2, steps=1)
    [single], [copies] = gradients(run, ("a", many))["a"], gradients(run, ("a", repeated))["a"]
    torch.testing.assert_close(single, copies)


def test_a_group_with_a_broken_example_contributes_nothing() -> None:
    """A NaN in the sum would reveal that the group was drawn."""
    examples = patients("a", [2, 3, 1])
    group = int(examples.groups[0])
    x = examples.x.clone()
    x[0] = float("nan")
    run = group_run(QUIET, batch_size=3, steps=1)
    [broken] = gradients(run, ("a", Patients(x, examples.y, examples.groups)))["a"]
    rest = examples.groups != group
    [without] = gradients(
        replace(run, training=replace(run.training, batch_size=2)),
        ("a", Patients(examples.x[rest], examples.y[rest], examples.groups[rest])),
    )["a"]
    torch.testing.assert_close(
        {name: 3 * value for name, value in broken.items()}, {name: 2 * value for name, value in without.items()}
    )


@pytest.mark.slow
def test_an_empty_draw_has_no_gradient_but_noise() -> None:
    """With one group and a small rate, most draws are empty."""
    hospitals = Hospitals(a=[2] * 40)
    run = group_run(QUIET, batch_size=1, steps=30)
    steps = gradients(run, ("a", hospitals.parts["a"]))["a"]
    assert any(norm(step) == 0 for step in steps)
    assert any(norm(step) > 0 for step in steps)


def test_a_group_without_members_that_count_adds_nothing_even_if_its_loss_has_a_gradient() -> None:
    """A penalty may have a gradient whatever the members are. The second group is padding."""

    def loss(params: Tensors, inputs: Tensors, targets: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
        return 3 * params["w"].sum(), targets.sum() * 0.0

    mask = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    batch = {"x": torch.zeros(3, 2)}, torch.zeros(3, 2)
    for one_by_one in (False, True):
        total, losses = clipped_sum(loss, {"w": torch.ones(1)}, *batch, mask, replace(QUIET, clip=1.0), one_by_one)
        assert total["w"].tolist() == [2.0]
        assert losses.shape == (3,)


# ---- drawing


@pytest.mark.slow
def test_a_drawn_group_is_drawn_whole_and_at_the_charged_rate() -> None:
    counts = [1, 9, 2, 4, 1, 1, 3, 2, 2, 5]
    examples, model = patients("a", counts), toy_model()
    run = group_run(batch_size=3, steps=400)
    job, _ = make_job(run, model, initial_server(run, model), 0, "a")
    client_round = begin_round(run, model, job, ClientState(), examples)
    units = client_round.examples
    assert isinstance(units, GroupUnits)
    assert len(units) == 10
    drawn = np.zeros(10)
    for indices in client_round.schedules[0]:
        drawn[indices.numpy()] += 1
        if len(indices):
            rows, mask = units.members(indices)
            for group, own in zip(rows, mask.bool(), strict=True):
                numbers = examples.groups[group[own]].unique()
                assert len(numbers) == 1
                assert int(own.sum()) == int((examples.groups == numbers[0]).sum())
    # Each group is drawn in 400 steps with probability 0.3, whatever its size.
    low, high = binom.ppf([1e-5, 1 - 1e-5], 400, 0.3)
    assert ((low <= drawn) & (drawn <= high)).all()


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_limit_draws_that_many_members_of_larger_groups(limit: int) -> None:
    examples = patients("a", [1, 9, 2, 4])
    units = group_units(examples, limit, Key(0))
    rows, mask = units.members(torch.arange(4))
    assert mask.sum(1).tolist() == [
        min(limit, int((examples.groups == group).sum())) for group in examples.groups[units.rows[units.offsets[:-1]]]
    ]
    for group, own in zip(rows, mask.bool(), strict=True):
        kept = group[own]
        assert len(kept.unique()) == len(kept)
        assert len(examples.groups[kept].unique()) == 1


@pytest.mark.slow
def test_a_limit_draws_every_member_alike() -> None:
    examples = patients("a", [6, 2])
    counts = np.zeros(8)
    for draw in range(600):
        counts[group_units(examples, 2, Key(0) / draw).rows.numpy()] += 1
    large = (examples.groups == 5).numpy()
    low, high = binom.ppf([1e-5, 1 - 1e-5], 600, 1 / 3)
    assert ((low <= counts[large]) & (counts[large] <= high)).all()
    assert (counts[~large] == 600).all()


def test_numbers_of_groups_follow_their_first_appearance() -> None:
    assert number_groups(np.array(["b", "a", "b", "c", "a"])).tolist() == [0, 1, 0, 2, 1]


# ---- what leaves


def test_weight_of_an_update_is_the_number_of_groups() -> None:
    """The number of examples would depend on one patient by more than one."""
    run, model = group_run(), toy_model()
    for many in (1, 50):
        job, _ = make_job(run, model, initial_server(run, model), 0, "a")
        client_round = begin_round(run, model, job, ClientState(), patients("a", [2, 3, many]))
        update, _ = finish_round(run, client_round, train_clients(run, [client_round])[0])
        assert update.weight == 3
        assert update.loss is None


# ---- refusals


def test_examples_without_groups_are_refused() -> None:
    with pytest.raises(PrivacyError, match=r"set privacy\.group to a column"):
        play(group_run(), toy_model(), Clients(a=4))


def test_settings_of_groups_are_checked() -> None:
    with pytest.raises(OptionError, match="max_per_group is 0"):
        PrivacySettings(clip=1.0, noise=1.0, unit="group", group="patient", max_per_group=0)
    with pytest.raises(PrivacyError, match="'ghost', which computes the norms of single examples"):
        PrivacySettings(clip=1.0, noise=1.0, clipping="ghost", unit="group", group="patient")


def test_rules_whose_noise_hides_single_examples_are_refused() -> None:
    method = build("safl", {"select": "attention", "noise": 2.0, "probe": 0.5})
    with pytest.raises(MethodError, match="hides single examples, not groups"):
        replace(method, privacy=SETTINGS)


# ---- batches


def test_collated_groups_have_one_shape_and_lose_no_member() -> None:
    units: Sequence[GroupUnits] = [
        group_units(patients(name, counts), None, Key(0)) for name, counts in (("a", [3, 1]), ("b", [2, 2, 2]))
    ]
    batches = [part.take(torch.arange(len(part))) for part in units]
    whole = collate(batches)
    assert whole.targets.shape == (2, 3, 3)
    assert whole.mask is not None
    assert whole.mask.sum((1, 2)).tolist() == [4, 6]
    for place, batch in enumerate(batches):
        assert batch.mask is not None
        kept = whole.inputs["x"][place][whole.mask[place].bool()]
        torch.testing.assert_close(kept, batch.inputs["x"][batch.mask.bool()])
