"""Promises of own tasks, splits and models. They are few: what the rest of partita relies on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from partita import data
from partita.core import serialization, tensors
from partita.core.data import IGNORE_INDEX, Batch, Examples
from partita.core.method import Method
from partita.core.model import Model, layer_number, layer_tags
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.settings import Run, Training
from partita.core.tensors import Tensors
from partita.data.task import Federation, Task
from partita.engines.simulation import SimulationEngine
from partita.testing.probes import RandomStates, first_of
from partita.testing.promises import NotApplicable, Promise, require

ROWS = 1000  # rows of each part that are looked at
CLIENTS = 3
TOLERANCE = 1e-4  # relative difference of vmap and single calls in float32


# ---- tasks


@dataclass(frozen=True)
class TaskTrial:
    """A task under test. `load` loads it with a key."""

    load: Callable[[Key], Task]

    @cached_property
    def task(self) -> Task:
        return self.load(Key(0))

    @cached_property
    def parts(self) -> dict[str, Batch]:
        """The first rows of train and test."""
        return {"train": _rows(self.task.train), "test": _rows(self.task.test)}


def _rows(examples: Examples) -> Batch:
    return examples.take(torch.arange(min(ROWS, len(examples))))


def _check_has_rows(trial: TaskTrial) -> None:
    for name, part in (("train", trial.task.train), ("test", trial.task.test)):
        require(len(part) > 0, f"its {name} part has no rows")


def _check_inputs(trial: TaskTrial) -> None:
    task = trial.task
    wanted = {"pixel_values"} if task.kind.inputs == "image" else {"input_ids", "attention_mask"}
    wanted |= {"decoder_input_ids"} if task.kind.head == "seq2seq" else set()
    for name, batch in trial.parts.items():
        require(
            wanted <= batch.inputs.keys(),
            f"the inputs of its {name} part are {_listed(batch.inputs)}; a task of kind '{task.kind.name}' needs "
            f"{_listed(wanted)}",
        )
        for key, value in batch.inputs.items():
            rows = len(batch.targets)
            require(len(value) == rows, f"'{key}' of its {name} part has {len(value)} rows for {rows} targets")
            if value.is_floating_point():
                require(bool(value.isfinite().all()), f"'{key}' of its {name} part has values that are not finite")
        if task.kind.inputs == "image":
            shape = tuple(batch.inputs["pixel_values"].shape[1:])
            says = (task.channels, task.size, task.size)
            require(shape == says, f"its images are {shape}, but channels and size say {says}")
        else:
            largest = int(batch.inputs["input_ids"].max())
            require(
                largest < task.vocabulary_size,
                f"its {name} part has the token {largest}, but vocabulary_size is {task.vocabulary_size}",
            )


def _check_targets(trial: TaskTrial) -> None:
    task, count = trial.task, len(trial.task.classes)
    if task.kind.outputs != "vocabulary":
        require(count > 0, "it has no classes; name them in Task.classes")
    for name, batch in trial.parts.items():
        targets = batch.targets
        if task.kind.problem_type is not None:
            shape = tuple(targets.shape[1:])
            require(
                targets.is_floating_point() and shape == (count,),
                f"its {name} targets are {targets.dtype} of shape (row, {', '.join(map(str, shape))}); they must be "
                f"floats of shape (row, {count})",
            )
            require(bool(targets.isfinite().all()), f"its {name} targets are not all finite")
            continue
        if task.kind.head == "segmentation":
            shape = tuple(targets.shape[1:])
            require(
                not targets.is_floating_point() and shape == (task.size, task.size),
                f"its {name} targets are {targets.dtype} of shape (row, {', '.join(map(str, shape))}); they must be "
                f"integers of shape (row, {task.size}, {task.size}), a class for each pixel",
            )
        else:
            require(targets.dtype == torch.int64, f"its {name} targets are {targets.dtype}; they must be torch.int64")
        require(
            targets.ndim == 1 or not task.kind.one_class,
            f"its {name} targets have the shape {tuple(targets.shape)}; they must be one class per example",
        )
        used = targets if task.kind.one_class else targets[targets != IGNORE_INDEX]
        limit = task.vocabulary_size if task.kind.outputs == "vocabulary" else count
        what = "vocabulary_size" if task.kind.outputs == "vocabulary" else "the number of classes"
        require(
            bool(((used >= 0) & (used < limit)).all()),
            f"its {name} targets go from {int(used.min())} to {int(used.max())}, but {what} is {limit}",
        )


def _check_same_key_same_task(trial: TaskTrial) -> None:
    again = TaskTrial(trial.load)
    same = all(_digest(trial.parts[name]) == _digest(again.parts[name]) for name in trial.parts)
    require(same, "it gives two results for the same key; draw random numbers from the key only")


def _check_splits(trial: TaskTrial) -> None:
    count = len(trial.task.train)
    if count < CLIENTS:
        raise NotApplicable(f"it has {count} train rows, too few for {CLIENTS} clients")
    federation = data.split(trial.task, "iid", CLIENTS, key=Key(1))
    if trial.task.kind.one_class:
        trial.task.labels()
    for client in federation.clients:
        part = federation[client].train
        batch = part.take(torch.arange(len(part)))
        require(len(batch.targets) == len(part), f"take gives {len(batch.targets)} rows where {len(part)} are asked")


TASK_PROMISES: tuple[Promise[TaskTrial], ...] = (
    Promise("a task", "It loads, and has train and test rows.", _check_has_rows),
    Promise("inputs", "The inputs have the names, shapes and values of the task's kind.", _check_inputs, ("a task",)),
    Promise("targets", "The targets fit the task's kind and its classes.", _check_targets, ("a task",)),
    Promise("same key, same task", "The same key gives the same rows.", _check_same_key_same_task, ("a task",)),
    Promise("splits", f"It can be split into {CLIENTS} clients.", _check_splits, ("a task",)),
)


# ---- splits


@dataclass(frozen=True)
class SplitTrial:
    """A split under test. `split` splits a task with a key, and leaves all rows in the train part."""

    split: Callable[[Key], Federation]

    @cached_property
    def federation(self) -> Federation:
        return self.split(Key(0))

    @cached_property
    def rows(self) -> dict[str, torch.Tensor]:
        """The rows of each client."""
        clients = self.federation.clients
        return {client: self.federation.parts[place][0] for place, client in enumerate(clients)}


def _check_clients(trial: SplitTrial) -> None:
    clients = list(trial.federation.clients)
    require(bool(clients), "it returns no clients")
    require(len({*clients}) == len(clients), "two clients have the same name")
    empty = [client for client, rows in trial.rows.items() if not len(rows)]
    require(not empty, f"client '{next(iter(empty), '')}' has no rows")


def _check_rows(trial: SplitTrial) -> None:
    rows, count = torch.cat(list(trial.rows.values())), len(trial.federation.task.train)
    require(bool(((rows >= 0) & (rows < count)).all()), f"it assigns rows that do not exist; there are {count}")
    require(len(rows.unique()) == len(rows), "it assigns a row to two clients")


def _check_same_key_same_split(trial: SplitTrial) -> None:
    again = SplitTrial(trial.split)
    require(tensors.equal(trial.rows, again.rows), "it gives two results for the same key")


SPLIT_PROMISES: tuple[Promise[SplitTrial], ...] = (
    Promise("clients", "Each client has a name of its own and at least one row.", _check_clients),
    Promise("rows", "Each row belongs to at most one client.", _check_rows, ("clients",)),
    Promise("same key, same split", "The same key gives the same split.", _check_same_key_same_split, ("clients",)),
)


# ---- models


@dataclass(frozen=True)
class ModelTrial:
    """A model under test. `build` builds it for the task with a key."""

    task: Task
    build: Callable[[Key], Model]

    @cached_property
    def model(self) -> Model:
        return self.build(Key(0))

    @cached_property
    def batch(self) -> Batch:
        return self.task.train.take(torch.arange(min(4, len(self.task.train))))

    def losses(self, params: Tensors, batch: Batch | None = None) -> torch.Tensor:
        batch = batch or self.batch
        return self.model.losses(self.model(params, batch.inputs), batch.targets)


def _check_names(trial: ModelTrial) -> None:
    model = trial.model
    require(bool(model.initial), "it has no parameters in initial")
    for one, two in (("initial", "tags"), ("tags", "initial")):
        missing = getattr(model, one).keys() - getattr(model, two).keys()
        require(not missing, f"'{first_of(missing)}' is in {one} but not in {two}; both must have the same names")
    for layer in layer_tags(model):
        layer_number(layer)


def _check_initial(trial: ModelTrial) -> None:
    for name, value in trial.model.initial.items():
        require(value.is_floating_point(), f"'{name}' is {value.dtype}; parameters must be floats")
        require(bool(value.isfinite().all()), f"'{name}' has values that are not finite")
        require(not value.requires_grad, f"'{name}' requires a gradient; detach it")


def _check_same_key_same_model(trial: ModelTrial) -> None:
    require(
        tensors.equal(trial.model.initial, trial.build(Key(0)).initial),
        "it gives two results for the same key; draw random numbers from the key only",
    )


def _check_losses(trial: ModelTrial) -> None:
    losses, count = trial.losses(trial.model.initial), len(trial.batch.targets)
    require(losses.shape == (count,), f"losses has the shape {tuple(losses.shape)} for {count} examples")
    require(bool(losses.isfinite().all()), "the initial losses are not finite")


def _check_forward(trial: ModelTrial) -> None:
    params, batch = trial.model.initial, trial.batch
    held, inputs, before = tensors.clone_all(params), tensors.clone_all(batch.inputs), RandomStates()
    one, two = trial.losses(params), trial.losses(params)
    require(tensors.equal(held, params), "it changes its parameters in place")
    require(tensors.equal(inputs, batch.inputs), "it changes its inputs in place")
    used = before.used()
    require(not used, f"it draws from {' and '.join(used)} global random state")
    require(tensors.same(one, two), "it gives two results for the same parameters and inputs")


def _check_gradients(trial: ModelTrial) -> None:
    live = {name: value.clone().requires_grad_() for name, value in trial.model.initial.items()}
    grads = torch.autograd.grad(trial.losses(live).mean(), list(live.values()), allow_unused=True)
    reached = {name: grad for name, grad in zip(live, grads, strict=True) if grad is not None}
    require(bool(reached), "the loss depends on none of its parameters")
    wrong = [name for name, grad in reached.items() if not grad.isfinite().all()]
    require(not wrong, f"the gradient of '{next(iter(wrong), '')}' is not finite")


def _check_vmap(trial: ModelTrial) -> None:
    batch = trial.batch
    several = [{name: value * (1 + 0.1 * client) for name, value in trial.model.initial.items()} for client in range(2)]
    stacked = {name: torch.stack([params[name] for params in several]) for name in several[0]}
    inputs = {name: torch.stack([value, value]) for name, value in batch.inputs.items()}

    def losses(params: Tensors, inputs: Tensors) -> torch.Tensor:
        return trial.losses(params, replace(batch, inputs=inputs))

    together = torch.vmap(losses)(stacked, inputs)  # (client, example)
    alone = torch.stack([trial.losses(params) for params in several])
    difference = float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-12))
    require(difference <= TOLERANCE, f"in torch.vmap, the losses differ by {difference:.1e}")


def _check_messages(trial: ModelTrial) -> None:
    values = trial.model.initial
    again = serialization.unpack(serialization.pack({"params": values}))["params"]
    require(tensors.equal(values, again), "its parameters do not survive a message")


def _check_round(trial: ModelTrial) -> None:
    federation = data.split(trial.task, "iid", CLIENTS, key=Key(1))
    run = Run(Method("fedavg"), Training(lr=1e-3, optimizer="sgd"), rounds=1, key=Key(2))
    engine = SimulationEngine(run, trial.model, federation, block=CLIENTS)
    [result] = rounds(run, trial.model, engine)
    require(len(result.sent) == CLIENTS, f"only {len(result.sent)} of {CLIENTS} clients sent an update")
    require(not tensors.equal(trial.model.initial, result.server.params), "a round of FedAvg changes no parameter")


_BUILT = ("names and tags",)
MODEL_PROMISES: tuple[Promise[ModelTrial], ...] = (
    Promise("names and tags", "It can be built, and initial and tags have the same names.", _check_names),
    Promise("initial values", "The initial values are finite floats.", _check_initial, _BUILT),
    Promise("same key, same model", "The same key gives the same values.", _check_same_key_same_model, _BUILT),
    Promise("losses", "losses returns one finite number for each example.", _check_losses, _BUILT),
    Promise(
        "pure forward pass",
        "It changes nothing it is given, and gives one result for the same arguments.",
        _check_forward,
        ("losses",),
    ),
    Promise("gradients", "The gradients of the loss are finite.", _check_gradients, ("losses",)),
    Promise("vmap", "torch.vmap over clients gives the losses of single clients.", _check_vmap, ("pure forward pass",)),
    Promise("messages", "Its parameters can be serialized and read again.", _check_messages, _BUILT),
    Promise("one round", f"A round of FedAvg with {CLIENTS} clients in a block works.", _check_round, ("vmap",)),
)


def _digest(batch: Batch) -> str:
    return tensors.digest({**batch.inputs, "targets": batch.targets})


def _listed(names: Mapping[str, object] | set[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))
