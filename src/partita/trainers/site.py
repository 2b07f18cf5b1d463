"""The client's side of a round: a Trainer's parameters are set, it trains, and its answer is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, set_seed

from partita.core import tensors
from partita.core.client import (
    ClientError,
    ClientRound,
    ClientState,
    Job,
    LocalResult,
    begin_round,
    client_params,
    finish_round,
)
from partita.core.client_rule import ClientRule, Context, overrides
from partita.core.data import Examples
from partita.core.method_error import MethodError
from partita.core.settings import Run, RunError, Training
from partita.core.tensors import Slots, Tensors
from partita.core.update import DeltaFacts, Update
from partita.trainers.checks import check_phases, size_of
from partita.trainers.model import TrainerModel, named_parameters, placed, whole

SPEED = ("runtime", "samples_per_second", "steps_per_second", "epoch", "num_tokens", "model_preparation_time")


class Hidden:
    """Stands in for the examples of a Trainer and the output of its model; it has a number, and no contents."""

    def __init__(self, count: int = 0) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getattr__(self, name: str) -> Any:
        raise MethodError("a rule reads examples or the output of the model, which a Trainer keeps; use partita.run")


@dataclass
class OpenRound:
    """A round in which a Trainer trains.

    Attributes:
        run: The run, with the settings of this Trainer.
        began: What the client began with.
        ctx: What rules read in a step; from the start of `train()` on, placed like the parameters.
        steps: The optimizer steps so far.
        calls: How often `train()` was called.
        loss: The mean loss; None until `train()` has returned.
    """

    run: Run
    began: ClientRound
    ctx: Context
    steps: int = 0
    calls: int = 0
    loss: float | None = None


@dataclass(eq=False)
class TrainerSite(TrainerCallback):
    """One client. Its Trainer tells it of each step; without an open round, the Trainer trains as before.

    Attributes:
        client: Its name.
        trainer: Its Trainer.
        model: The names of its parameters.
        training: Its settings, for rules that read the learning rate.
        alone: Whether it is the only client. Its first round then draws as `train()` does without a federation.
        open: The round that it trains now; None between rounds.
    """

    client: str
    trainer: Any
    model: TrainerModel
    training: Training
    alone: bool = False
    open: OpenRound | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.trained = frozenset(self.model.initial)
        self.trainer.add_callback(self)

    def begin(self, run: Run, model: TrainerModel, job: Job, state: ClientState) -> None:
        """Put the parameters of a round into the module, and prepare the Trainer."""
        own = replace(run, training=self.training)
        began = begin_round(own, model, job, state, cast(Examples, Hidden(size_of(self.trainer))))
        check_phases(run.method.name, began.plan)
        self.put({**began.ctx.anchor, **began.start})
        train = began.plan.train
        for name in self.model.initial:
            self.model.parameters[name].requires_grad_(name in train)
        trainer = self.trainer
        if train != self.trained and isinstance(trainer.model_wrapped, DistributedDataParallel):
            # It has decided which gradients to exchange.
            trainer.model_wrapped = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
        self.trained = train
        trainer.optimizer = trainer.lr_scheduler = None
        if job.round or not self.alone:  # train() alone would draw the same order of examples in every round
            key = run.key / "round" / job.round / "client" / job.client / "trainer"
            set_seed(key.seed() % 2**32)
        self.open = OpenRound(own, began, began.ctx)

    def finish(self) -> tuple[Update, ClientState]:
        """Return the answer after `train()`, and what the client remembers.

        Raises:
            RunError: If `train()` was not called, or more than once.
            ClientError: If it took no step, or its loss is not finite.
        """
        now = self.open
        if now is None or now.loss is None:
            raise RunError(f"the Trainer of '{self.client}' has not trained; call its train() once in every round")
        if now.calls > 1:
            raise RunError(
                f"the Trainer of '{self.client}' trained {now.calls} times; call train() once in every round"
            )
        self.open = None
        if not now.steps:
            raise ClientError(self.client, "took no optimizer step; give it more examples, or raise max_steps")
        plan, anchor = now.began.plan, now.began.ctx.anchor
        params = {name: whole(value).to(self.model.initial[name].dtype) for name, value in self._trained_now().items()}
        delta = {name: params[name] - anchor[name] for name in sorted(plan.up)}
        learned = LocalResult(
            params,
            dict.fromkeys(params, now.steps),
            [now.loss],
            self._optimizer_state() if now.run.method.carry_optimizer else {},
            DeltaFacts(delta, tensors.all_finite(delta)),
        )
        return finish_round(now.run, now.began, learned)

    def leave(self) -> None:
        """Leave the Trainer as it was before the federation, except for the values of its parameters."""
        self.open = self.trainer.optimizer = self.trainer.lr_scheduler = None
        for name in self.model.initial:
            self.model.parameters[name].requires_grad_(True)
        if self in self.trainer.callback_handler.callbacks:
            self.trainer.remove_callback(self)

    def put(self, params: Mapping[str, torch.Tensor]) -> None:
        """Set parameters in place, so that optimizers and wrappers of the module keep them."""
        self._reshard()
        with torch.no_grad():
            for name, value in params.items():
                self.model.parameters[name].copy_(placed(value, self.model.parameters[name]))

    def put_own(self, run: Run, model: TrainerModel, job: Job, state: ClientState) -> None:
        """Put the client's own model after a round into the module."""
        self.put(client_params(run, model, job, state)[1])

    def scores(self) -> dict[str, float]:
        """Return the scores of `trainer.evaluate()`; none without an `eval_dataset`."""
        if self.trainer.eval_dataset is None:
            return {}
        named = {name.removeprefix("eval_"): value for name, value in self.trainer.evaluate().items()}
        return {name: float(value) for name, value in named.items() if not name.endswith(SPEED)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Find the parameters, which FSDP may have sharded, and load the optimizer state that the client keeps.

        Raises:
            RunError: If FSDP has left parameters unsharded, of which the optimizer would train nothing.
        """
        if self.open is None:
            return
        self.model.parameters = named_parameters(self.trainer.model)
        if self.trainer.is_fsdp_enabled:
            self.trainer.accelerator.state.fsdp_plugin.activation_checkpointing = False  # every train() would add it
            if not all(isinstance(value, DTensor) for value in self._trained_now().values()):
                raise RunError(
                    f"the model of '{self.client}' ran between round() and train(), which leaves parameters whole "
                    "under FSDP; run it before round(), or by trainer.evaluate()"
                )
        self.open.ctx = self._placed(self.open.run, self.open.began.ctx)
        self.open.calls += 1
        if self.open.began.optimizer:
            self._load_optimizer(self.open.began.optimizer)

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Shard the parameters again, which FSDP leaves whole after a forward pass alone."""
        self._reshard()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Add penalties and let rules change the gradient, after the Trainer has clipped it."""
        if self.open is None or not (rules := _with_hook(self.open.run, "penalty", "gradient")):
            return
        ctx, named = self.open.ctx, self._trained_now()
        hidden = cast(Any, Hidden())
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in named.items()}
            pulls = [rule.penalty(hidden, {**ctx.anchor, **leaves}, hidden, ctx) for rule in rules]
            total = sum(pull for pull in pulls if pull is not None)
            slopes: list[torch.Tensor | None] = [None] * len(named)
            if isinstance(total, torch.Tensor):
                slopes = [*torch.autograd.grad(total, list(leaves.values()), allow_unused=True)]
        with torch.no_grad():
            parts = {
                name: [each for each in (value.grad, slope) if each is not None]
                for (name, value), slope in zip(named.items(), slopes, strict=True)
            }
            grads: Tensors = {name: sum(own[1:], own[0]) for name, own in parts.items() if own}
            for rule in rules:
                grads = rule.gradient(grads, ctx)
            for name, value in named.items():
                if name in grads and value.grad is not None:
                    value.grad.copy_(grads[name])  # DDP may own it
                else:
                    value.grad = grads[name].clone() if name in grads else None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Count the step, and let rules change the parameters."""
        if self.open is None or self.trainer.accelerator.optimizer_step_was_skipped:
            return
        self.open.steps += 1
        if rules := _with_hook(self.open.run, "after_step"):
            with torch.no_grad():
                values = {name: value.detach() for name, value in self._trained_now().items() if value.grad is not None}
                moved: Tensors = values
                for rule in rules:
                    moved = rule.after_step(moved, self.open.ctx)
                self.put({name: moved[name] for name in values if moved[name] is not values[name]})

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Note the mean loss, which ends the training."""
        if self.open is not None:
            self.open.loss = next(entry["train_loss"] for entry in reversed(state.log_history) if "train_loss" in entry)

    def _reshard(self) -> None:
        for module in self.trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _trained_now(self) -> dict[str, torch.nn.Parameter]:
        return {name: self.model.parameters[name] for name in sorted(self.trained)}

    def _placed(self, run: Run, ctx: Context) -> Context:
        """Return what rules read in a step, placed like each parameter; as it is if no rule acts in a step."""
        if not _with_hook(run, "penalty", "gradient", "after_step"):
            return ctx

        def moved(part: Tensors) -> dict[str, torch.Tensor]:
            return {name: placed(value, self.model.parameters[name]) for name, value in part.items()}

        sent, memory = ({slot: moved(part) for slot, part in own.items()} for own in (ctx.sent, ctx.memory))
        return Context(ctx.model, ctx.plan, moved(ctx.anchor), sent, memory, ctx.lr)

    def _optimizer_state(self) -> dict[str, Tensors]:
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in self._trained_now().items():
            for slot, part in self.trainer.optimizer.state[value].items():
                if not isinstance(part, torch.Tensor):
                    raise RunError(f"training.keep_optimizer: '{slot}' of the optimizer is no tensor; leave it out")
                found.setdefault(slot, {})[name] = whole(part)
        return dict(found)

    def _load_optimizer(self, kept: Slots) -> None:
        optimizer, names = self.trainer.optimizer, {id(value): name for name, value in self._trained_now().items()}
        plain = optimizer.state_dict()
        for group, own in zip(optimizer.param_groups, plain["param_groups"], strict=True):
            for value, index in zip(group["params"], own["params"], strict=True):
                name = names[id(value)]
                if state := {slot: part[name] for slot, part in kept.items() if name in part}:
                    if isinstance(value, DTensor):
                        state = {slot: placed(part, value) if part.ndim else part for slot, part in state.items()}
                    plain["state"][index] = state
        optimizer.load_state_dict(plain)


def _with_hook(run: Run, *hooks: str) -> list[ClientRule]:
    """Return the rules that have one of these hooks."""
    return [rule for rule in run.method.client_rules if any(overrides(rule, hook) for hook in hooks)]
