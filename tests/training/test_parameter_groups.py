"""Layer-wise learning rates, weight decay and warm-up against torch.optim, and the tags that decide them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architecture_fixtures import make_case
from helpers import Clients, client_batches, final_params, play, toy_run
from line_model import Line

from partita.core import tensors
from partita.core.client import ClientState, Job, begin_round
from partita.core.method import Method
from partita.core.optim import SGD, AdamW, Optimizer, warmup_factor
from partita.core.personal_copy import add_personal_copy, copy_name
from partita.core.plan import Phase, Plan
from partita.core.settings import Run, RunError, Training
from partita.core.tensors import Tensors
from partita.methods.fedavg import fedavg
from partita.testing.toy import ToyTransformer
from partita.training.local_training import train_clients
from partita.training.parameter_groups import is_norm_or_bias, parameter_groups, split_by_group

MODEL = ToyTransformer(width=4, layers=2)
LR = 0.05


def group_of(training: Training, name: str) -> tuple[float, float]:
    """The factor on the learning rate, and the weight decay."""
    [group] = [group for group in parameter_groups(training, MODEL, MODEL.initial) if name in group.names]
    assert isinstance(group.optimizer, AdamW)
    return group.lr_factor, group.optimizer.weight_decay


def test_defaults_give_one_group_with_the_optimizer_itself() -> None:
    training = Training(LR, AdamW())
    [group] = parameter_groups(training, MODEL, MODEL.initial)
    assert (group.optimizer, group.lr_factor, group.names) == (training.steps_by, 1.0, tuple(sorted(MODEL.initial)))


def test_layer_decay_falls_from_the_head_to_the_embeddings() -> None:
    training = Training(LR, AdamW(), layer_decay=0.5)
    assert group_of(training, "head.weight") == (1.0, 0.01)
    assert group_of(training, "layers.1.mlp.weight") == group_of(training, "layers.1.norm.weight") == (0.5, 0.01)
    assert group_of(training, "layers.0.query.bias") == (0.25, 0.01)
    assert group_of(training, "embed.weight") == (0.125, 0.01)


def test_layer_decay_counts_all_layers() -> None:
    model = ToyTransformer(width=4, layers=3)
    groups = parameter_groups(Training(LR, layer_decay=0.5), model, model.initial)
    factors = {name: group.lr_factor for group in groups for name in group.names}
    assert (factors["layers.2.mlp.weight"], factors["layers.0.mlp.weight"], factors["embed.weight"]) == (
        0.5,
        0.125,
        0.0625,
    )


def test_layer_decay_does_not_depend_on_which_layers_train() -> None:
    [group] = parameter_groups(Training(LR, layer_decay=0.5), MODEL, ["layers.0.mlp.weight"])
    assert (group.lr_factor, group.names) == (0.25, ("layers.0.mlp.weight",))


def test_layer_decay_needs_layers() -> None:
    with pytest.raises(RunError, match=r"training\.layer_decay is 0\.5, but line has no layers"):
        parameter_groups(Training(LR, layer_decay=0.5), Line(), ["w"])


def test_norms_and_biases_lose_their_weight_decay_only_if_asked() -> None:
    training = Training(LR, AdamW(weight_decay=0.3), decay_norms_and_biases=False)
    assert group_of(training, "layers.1.norm.weight") == group_of(training, "layers.0.key.bias") == (1.0, 0.0)
    assert group_of(training, "layers.0.key.weight") == group_of(training, "embed.weight") == (1.0, 0.3)
    [sgd, plain] = parameter_groups(
        Training(LR, SGD(0.9, 0.3, nesterov=True), decay_norms_and_biases=False), MODEL, MODEL.initial
    )
    assert {sgd.optimizer, plain.optimizer} == {SGD(0.9, 0.3, nesterov=True), SGD(0.9, 0.0, nesterov=True)}


@pytest.mark.parametrize("case", ["bert-text", "vit-image", "llama-lm"])
def test_decayed_parameters_are_those_of_the_trainer_of_transformers(case: str) -> None:
    from transformers import Trainer  # the import takes seconds

    model = make_case(case).model
    theirs = {*Trainer.get_decay_parameter_names(None, model.module)}  # type: ignore[arg-type]
    ours = {each for each in model.initial if not is_norm_or_bias(model, each)}
    assert ours == theirs & model.initial.keys()
    assert ours != model.initial.keys()


def test_gradients_are_split_by_group_without_those_that_are_missing() -> None:
    groups = parameter_groups(Training(LR, AdamW(), layer_decay=0.5), MODEL, MODEL.initial)
    grads = {name: MODEL.initial[name] for name in ("head.weight", "layers.0.mlp.bias", "layers.0.mlp.weight")}
    parts = split_by_group(groups, grads)
    assert sorted(sorted(part) for part in parts) == [
        [],
        [],
        ["head.weight"],
        ["layers.0.mlp.bias", "layers.0.mlp.weight"],
    ]
    assert all(value is grads[name] for part in parts for name, value in part.items())


def test_warmup_rises_to_the_full_rate() -> None:
    assert [warmup_factor(step, 3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [warmup_factor(step, 0) for step in range(3)] == [1.0, 1.0, 1.0]


# ---- one client against torch.optim

OPTIONS: dict[str, dict[str, Any]] = {
    "warm-up": {"warmup_steps": 4},
    "warm-up longer than the round": {"warmup_steps": 1000},
    "layer decay": {"layer_decay": 0.7},
    "no decay of norms and biases": {"decay_norms_and_biases": False},
    "all": {"warmup_steps": 4, "layer_decay": 0.7, "decay_norms_and_biases": False},
}
LAYER_FACTORS = {"embed": 0.7**3, "layers.0": 0.7**2, "layers.1": 0.7, "head": 1.0}


def torch_round(run: Run, clients: Clients, start: Tensors, number: int) -> Tensors:
    """One round of one client with torch's parameter groups and LambdaLR."""
    training, decay = run.training, run.training.steps_by.weight_decay  # type: ignore[attr-defined]
    params = {name: value.clone().requires_grad_() for name, value in start.items()}
    groups = []
    for name, value in params.items():
        [factor] = [factor for prefix, factor in LAYER_FACTORS.items() if name.startswith(prefix)]
        exempt = not training.decay_norms_and_biases and ("norm" in name or "bias" in name)
        groups.append(
            {
                "params": [value],
                "lr": training.lr * (factor if training.layer_decay < 1 else 1.0),
                "weight_decay": 0.0 if exempt else decay,
            }
        )
    optimizer: torch.optim.Optimizer
    if isinstance(training.steps_by, SGD):
        optimizer = torch.optim.SGD(groups, momentum=training.steps_by.momentum)
    else:
        optimizer = torch.optim.AdamW(groups)
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / (training.warmup_steps + 1)))
    examples = clients["a"].train
    for indices in client_batches(run, number, "a", examples):
        batch = examples.take(indices)
        optimizer.zero_grad()
        MODEL.losses(MODEL(params, batch.inputs), batch.targets).mean().backward()
        optimizer.step()
        rise.step()
    return {name: value.detach() for name, value in params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.1), SGD(0.9, weight_decay=0.1)], ids=["adamw", "sgd"])
def test_one_client_equals_torch_bit_for_bit(optimizer: Optimizer, options: dict[str, Any]) -> None:
    clients = Clients(a=22)
    run = toy_run(fedavg(), 2, optimizer, epochs=2, **options)
    expected = dict(MODEL.initial)
    for result in play(run, MODEL, clients):
        trained = torch_round(run, clients, expected, result.number)
        # The server adds the difference, so the sum can round.
        expected = tensors.add(expected, tensors.subtract(trained, expected))
        assert tensors.equal(result.server.params, expected)
    plain = final_params(play(toy_run(fedavg(), 2, optimizer, epochs=2), MODEL, clients))
    assert not tensors.equal(plain, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_blocks_of_unequal_clients_equal_single_clients(options: dict[str, Any]) -> None:
    clients = Clients(a=22, b=5, c=11)
    ends = [
        final_params(play(toy_run(fedavg(), 2, AdamW(eps=0.1), **options), MODEL, clients, block=block))
        for block in (1, 3)
    ]
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-6)


def test_each_phase_starts_its_own_warmup() -> None:
    """Two phases of one epoch each, with a warm-up as long as a phase, never reach the full rate."""
    model, clients = MODEL, Clients(a=8)
    whole = model.all_names()
    plan = Plan((Phase(whole), Phase(whole)), up=whole, down=whole)
    run = toy_run(Method("two phases", lambda model, round_info: plan), lr=LR, warmup_steps=2)
    job = Job(0, "a", dict(model.initial), whole)
    begun = begin_round(run, model, job, ClientState(), clients["a"].train)
    [result] = train_clients(run, [begun])
    params = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    for schedule in begun.schedules:
        for step, indices in enumerate(schedule):
            batch = begun.examples.take(indices)
            loss = model.losses(model(params, batch.inputs), batch.targets).mean()
            grads = torch.autograd.grad(loss, list(params.values()))
            with torch.no_grad():
                for value, grad in zip(params.values(), grads, strict=True):
                    value -= LR * (step + 1) / 3 * grad
    for name, value in params.items():
        torch.testing.assert_close(result.params[name], value.detach())


def test_personal_copies_are_stepped_like_their_originals() -> None:
    model = add_personal_copy(MODEL)
    training = Training(lr=0.1, optimizer=AdamW(), layer_decay=0.5, decay_norms_and_biases=False)
    groups = parameter_groups(training, model, model.all_names())
    place = {name: place for place, group in enumerate(groups) for name in group.names}
    assert len(groups) > 2
    assert all(place[name] == place[copy_name(name)] for name in MODEL.initial)
