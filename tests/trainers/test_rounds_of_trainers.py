"""What rounds of Trainers compute, against plain calls of `train()` and against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import max_difference
from torch import Tensor
from trainer_fixtures import (
    SIZES,
    Texts,
    WordRows,
    bert,
    clients,
    gpt2,
    make_trainer,
    mean_of,
    trained_alone,
    values_of,
)
from transformers import Trainer, TrainerCallback

import partita
from partita.core.model import TagError
from partita.trainers.model import TakenApart, TrainerModel

pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
ADAMW = {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "linear", "max_grad_norm": 0.5}


def play(client: partita.trainers.PatchedTrainer, trainer: Trainer) -> dict[str, Tensor]:
    with client:
        while client.round():
            trainer.train()
    return values_of(trainer)


@pytest.mark.parametrize(
    "more",
    [{}, ADAMW, {"num_train_epochs": 2, "gradient_accumulation_steps": 2}, {"max_steps": 7}],
    ids=["sgd", "adamw", "epochs", "steps"],
)
@pytest.mark.fast_cases("sgd")
def test_one_client_in_one_round_is_train(more: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **more)
    start = values_of(trainer)
    patched = play(partita.patch(trainer), trainer)
    alone = trained_alone(tmp_path, **more)
    assert max_difference(patched, alone) < 1e-7 < 1e-3 < max_difference(start, alone)


@pytest.mark.slow
def test_dropout_and_shuffling_are_those_of_train(tmp_path: Path) -> None:
    """The first round of a single Trainer draws from the state in which its constructor left the generators."""
    more = {"train_sampling_strategy": "random", "seed": 5}
    trainer = make_trainer(tmp_path, Texts(0, 30), bert(hidden_dropout_prob=0.2), **more)
    patched = play(partita.patch(trainer), trainer)
    assert max_difference(patched, trained_alone(tmp_path, Texts(0, 30), bert(hidden_dropout_prob=0.2), **more)) < 1e-6


class Seen(TrainerCallback):
    """The learning rates and the gradients of a parameter, step by step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.first: list[Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.rates.append(rest["optimizer"].param_groups[0]["lr"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.first.append(next(iter(rest["model"].parameters())).grad.clone())


@pytest.mark.slow
def test_each_round_has_a_new_schedule_and_another_order(tmp_path: Path) -> None:
    trainer, seen = make_trainer(tmp_path, lr_scheduler_type="linear", train_sampling_strategy="random"), Seen()
    trainer.add_callback(seen)
    orders = []
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: orders.append(rows[0]["input_ids"]) or collate(rows)  # type: ignore[func-returns-value]
    play(partita.patch(trainer, rounds=2), trainer)
    assert seen.rates[:3] == seen.rates[3:]
    assert seen.rates[0] > seen.rates[2]
    assert not torch.equal(torch.stack(orders[:3]), torch.stack(orders[3:]))


@pytest.mark.slow
def test_fedavg_is_the_mean_of_what_each_would_train(tmp_path: Path) -> None:
    trainers = clients(tmp_path)
    partita.federate(trainers, "fedavg", rounds=1, folder=tmp_path / "run")
    mean = mean_of([trained_alone(tmp_path, Texts(place, size)) for place, size in enumerate(SIZES)])
    for trainer in trainers.values():
        assert max_difference({name: value.double() for name, value in values_of(trainer).items()}, mean) < 1e-6


def by_hand(
    trainer: Trainer, start: dict[str, Tensor], change: Callable[[str, Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """SGD in the order of the examples, in which `change(name, gradient, value)` changes each gradient."""
    module, data = trainer.model, trainer.train_dataset
    assert isinstance(module, torch.nn.Module)
    assert isinstance(data, Texts)
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.copy_(start[name])
    module.train()
    for at in range(0, len(data), 4):
        module.zero_grad()
        module(input_ids=data.ids[at : at + 4], labels=data.labels[at : at + 4]).loss.backward()
        with torch.no_grad():
            for name, value in module.named_parameters():
                assert value.grad is not None
                value -= 0.05 * change(name, value.grad, value)
    return values_of(trainer)


@pytest.mark.slow
def test_fedprox_pulls_before_the_step(tmp_path: Path) -> None:
    trainer, reference = make_trainer(tmp_path), make_trainer(tmp_path)
    start = values_of(trainer)
    patched = play(partita.patch(trainer, {"name": "fedprox", "mu": 3.0}), trainer)
    pulled = by_hand(reference, start, lambda name, grad, value: grad + 3.0 * (value - start[name]))
    assert max_difference(patched, pulled) < 1e-6
    assert max_difference(patched, trained_alone(tmp_path)) > 1e-4


@pytest.mark.slow
def test_fedprox_without_a_pull_is_fedavg(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    patched = play(partita.patch(trainer, {"name": "fedprox", "mu": 0.0}), trainer)
    assert max_difference(patched, trained_alone(tmp_path)) < 1e-7


@pytest.mark.slow
def test_the_pull_is_not_clipped(tmp_path: Path) -> None:
    """The Trainer clips the gradient of its loss, and the pull of the rule comes after."""
    trainer = make_trainer(tmp_path, max_grad_norm=1e-3)
    start = values_of(trainer)
    patched = play(partita.patch(trainer, {"name": "feddyn", "alpha": 3.0}), trainer)
    free = trained_alone(tmp_path, max_grad_norm=1e-3)
    assert max_difference(start, free) < 1e-3
    assert 0 < max_difference(patched, start) < 1e-3
    assert all(value.isfinite().all() for value in patched.values())


@pytest.mark.slow
def test_scaffold_is_its_definition(tmp_path: Path) -> None:
    """Two rounds of two clients by hand, with option II of the paper."""
    trainers, references = clients(tmp_path, 2), clients(tmp_path, 2)
    server = values_of(trainers["site 0"])
    method = {"name": "scaffold", "weigh": "clients"}
    partita.federate(
        trainers, method, rounds=2, folder=tmp_path / "run", sampling={"name": "uniform", "equal_weights": True}
    )
    common = {name: torch.zeros_like(value) for name, value in server.items()}
    own = {client: dict(common) for client in references}
    for _ in range(2):
        trained, moved = {}, {}
        for client, trainer in references.items():
            mine = own[client]
            trained[client] = by_hand(
                trainer, server, lambda name, grad, _, mine=mine, all_=common: grad - mine[name] + all_[name]
            )  # type: ignore[misc]
            steps = -(-len(trainer.train_dataset) // 4)  # type: ignore[arg-type]
            new = {
                name: mine[name] - common[name] + (server[name] - trained[client][name]) / (steps * 0.05)
                for name in mine
            }
            moved[client] = {name: new[name] - mine[name] for name in mine}
            own[client] = new
        server = {name: sum(each[name] for each in trained.values()) / 2 for name in server}  # type: ignore[misc]
        common = {name: common[name] + sum(each[name] for each in moved.values()) / 2 for name in common}
    assert max_difference(values_of(trainers["site 0"]), server) < 1e-6


@pytest.mark.slow
def test_fedfrozen_leaves_queries_and_keys_alone(tmp_path: Path) -> None:
    """Also weight decay must not reach what is frozen."""
    trainer = make_trainer(tmp_path, optim="adamw_torch", weight_decay=0.5)
    start = values_of(trainer)
    client = partita.patch(trainer, {"name": "fedfrozen", "warmup": 0})
    patched = play(client, trainer)
    frozen = {name for name in start if ".query." in name or ".key." in name}
    assert len(frozen) == 8
    assert {name for name in start if torch.equal(start[name], patched[name])} == frozen
    assert all(value.requires_grad for value in trainer.model.parameters())  # type: ignore[union-attr]
    module = bert()
    for name, value in module.named_parameters():
        value.requires_grad_(name not in frozen)
    alone = trained_alone(tmp_path, model=module, optim="adamw_torch", weight_decay=0.5)
    assert max_difference(patched, alone) < 1e-6


@pytest.mark.slow
def test_the_module_holds_the_last_model_of_the_server(tmp_path: Path) -> None:
    """With a server that does not move, this is the model of the start."""
    trainer = make_trainer(tmp_path)
    start = values_of(trainer)
    assert max_difference(start, play(partita.patch(trainer, {"name": "scaffold", "lr": 0.0}), trainer)) == 0


@pytest.mark.slow
def test_the_optimizer_can_be_kept(tmp_path: Path) -> None:
    """Two rounds with a kept optimizer are two epochs of one training."""
    more = {"optim": "adamw_torch", "weight_decay": 0.1, "adam_epsilon": 1e-3}  # biases of keys have no gradient
    trainer = make_trainer(tmp_path, **more)
    kept = play(partita.patch(trainer, rounds=2, training={"keep_optimizer": True}), trainer)
    assert max_difference(kept, trained_alone(tmp_path, num_train_epochs=2, **more)) < 1e-6
    trainer = make_trainer(tmp_path, **more)
    assert max_difference(kept, play(partita.patch(trainer, rounds=2), trainer)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("method", "tolerance"), [("prune", 1.0), ("quantize", 1e-3), ("fedavg", 1e-4)], ids=str)
def test_compression_and_secure_aggregation(method: Any, tolerance: float, tmp_path: Path) -> None:
    trainers, plain = clients(tmp_path, 3), clients(tmp_path, 3)
    secure = {"secure_aggregation": {}} if method == "fedavg" else {}
    run = partita.federate(trainers, method, rounds=1, folder=tmp_path / "run", **secure)
    base = partita.federate(plain, "fedavg", rounds=1, folder=tmp_path / "plain")
    assert max_difference(values_of(trainers["site 0"]), values_of(plain["site 0"])) < tolerance
    changed = run.rows[0]["bytes"]["up"] / base.rows[0]["bytes"]["up"]
    assert changed < 0.95 or (secure and "secure" in run.rows[0])


@pytest.mark.slow
def test_client_level_privacy_states_its_epsilon(tmp_path: Path) -> None:
    run = partita.federate(
        clients(tmp_path, 3),
        "fedavg",
        rounds=2,
        folder=tmp_path / "run",
        privacy={"unit": "client", "noise": 1.0, "clip": 0.1},
    )
    assert [row["privacy"]["epsilon"] > 0 for row in run.rows] == [True, True]


@pytest.mark.slow
def test_personal_parameters_stay(tmp_path: Path) -> None:
    trainers = clients(tmp_path, 2)
    run = partita.federate(trainers, {"name": "fedper", "finetune": 0}, rounds=2, folder=tmp_path / "run")
    one, two = (values_of(trainer) for trainer in trainers.values())
    differ = {name for name in one if not torch.equal(one[name], two[name])}
    assert differ == {name for name in one if name.startswith(("classifier", "bert.pooler"))}
    assert not any(name.startswith(("classifier", "bert.pooler")) for name in run.rows[0]["up"])


@pytest.mark.slow
def test_equals_the_simulation_on_the_same_batches(tmp_path: Path) -> None:
    """The same module, by partita's own training and by a Trainer, in the order that partita draws."""
    from architecture_fixtures import make_model
    from helpers import client_batches, final_params, toy_run
    from helpers import play as play_rounds

    from partita.core.data import Batch, ClientData

    class Rows(Texts):
        def take(self, indices: Tensor) -> Batch:
            ids = self.ids[indices]
            return Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, self.labels[indices])

    class Population:
        clients = ("a", "b")

        def __init__(self) -> None:
            self.rows = {"a": Rows(0, 9), "b": Rows(1, 6)}

        def __getitem__(self, client: str) -> ClientData:
            return ClientData(self.rows[client], self.rows[client], self.rows[client])

    model, population = make_model("bert-text"), Population()
    run = toy_run(partita.methods.build("fedavg"), count=1, lr=0.05, batch_size=3, dropout=False)
    simulated = final_params(play_rounds(run, model, population))
    model.save_pretrained(model.initial, tmp_path / "bert")
    from transformers import AutoModelForSequenceClassification

    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    trainers = {}
    for client, rows in population.rows.items():
        order = torch.cat(client_batches(run, 0, client, rows))
        data = Texts()
        data.ids, data.labels = rows.ids[order], rows.labels[order]
        module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", **plain)
        trainers[client] = make_trainer(tmp_path, data, module, per_device_train_batch_size=3)
    partita.federate(trainers, "fedavg", rounds=1, folder=tmp_path / "run")
    trained = values_of(trainers["a"])
    assert simulated.keys() == trained.keys()
    assert max_difference(simulated, trained) < 1e-6


def test_a_model_has_names_and_tags_and_no_forward_pass() -> None:
    model = TrainerModel(bert())
    assert model.names("query") | model.names("key") == {
        name for name in model.initial if ".query." in name or ".key." in name
    }
    with pytest.raises(TagError, match="belongs to a Trainer, which runs it"):
        model({}, {})
    fused = TrainerModel(gpt2())
    assert fused.tags["transformer.h.1.attn.c_attn.weight"] == {"query", "key", "value", "layer.1"}
    apart = TakenApart(fused)
    assert apart.parts.keys() == {name for name in fused.initial if "c_attn" in name}
    assert apart.tags["transformer.h.1.attn.c_attn.weight (key)"] == {"key", "layer.1"}
    plain = TrainerModel(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
    assert plain.tags["1.weight"] == {"other", "layer.1"}


def test_parameters_of_peft_have_the_names_of_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = TrainerModel(peft.get_peft_model(bert(), config, adapter_name="mine"))
    layers = [f"bert.encoder.layer.{layer}.attention.self.query" for layer in (0, 1)]
    factors = {f"{layer}.lora_{factor}.weight" for layer in layers for factor in "AB"}
    assert model.initial.keys() == {*factors, "classifier.weight", "classifier.bias"}
    assert model.tags[f"{layers[1]}.lora_A.weight"] == {"lora", "lora_A", "query", "layer.1"}
    assert model.tags["classifier.weight"] == {"head"}
    assert model.frozen_tags[f"{layers[0]}.weight"] == {"query", "layer.0"}


@pytest.mark.slow
def test_a_language_model_with_a_fused_projection(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, WordRows(), gpt2())
    patched = play(partita.patch(trainer), trainer)
    assert max_difference(patched, trained_alone(tmp_path, WordRows(), gpt2())) < 1e-6
