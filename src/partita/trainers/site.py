"""The client's side of a round: a Trainer's parameters are set, it trains, and its answer is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
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
from partita.core.data import Batch
from partita.core.method_error import MethodError
from partita.core.rng import Key
from partita.core.settings import Run, RunError, Training
from partita.core.tensors import Slots, Tensors
from partita.core.update import DeltaFacts, Update
from partita.trainers.checks import check_phases
from partita.trainers.model import TrainerModel

SPEED = ("runtime", "samples_per_second", "steps_per_second", "epoch", "num_tokens", "model_preparation_time")


class Hidden:
    """Stands in for what partita does not see of a Trainer's step; any access raises MethodError."""

    def __getattr__(self, name: str) -> Any:
        raise MethodError("a rule reads examples or the output of the model, which a Trainer keeps; use partita.run")


@dataclass(frozen=True)
class HiddenExamples:
    """The examples of a client, of which only the number is known."""

    count: int

    def __len__(self) -> int:
        return self.count

    def take(self, indices: torch.Tensor) -> Batch:
        raise MethodError("a rule reads examples, which a Trainer keeps; use partita.run")


@dataclass
class OpenRound:
    """A round in which a Trainer trains.

    Attributes:
        run: The run, with the settings of this Trainer.
        began: What the client began with.
        ctx: What rules read in a step, on the device of the Trainer.
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


@dataclass
class TrainerSite:
    """One client.

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
        self.trainer.add_callback(_Steps(self))

    @property
    def size(self) -> int:
        """The number of training examples; of a stream, those of `max_steps`."""
        trainer, args = self.trainer, self.trainer.args
        try:
            return len(trainer.train_dataset)
        except TypeError:
            return int(args.max_steps * args.train_batch_size * args.world_size * args.gradient_accumulation_steps)

    def begin(self, run: Run, model: TrainerModel, job: Job, state: ClientState) -> None:
        """Put the parameters of a round into the module, and prepare the Trainer."""
        own = replace(run, training=self.training)
        began = begin_round(own, model, job, state, HiddenExamples(self.size))
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
            set_seed(_seed(run.key / "round" / job.round / "client" / job.client / "trainer"))
        self.open = OpenRound(own, began, self._on_device(own, began.ctx))

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
        for name in self.model.initial:
            self.model.parameters[name].requires_grad_(True)
        if not now.steps:
            raise ClientError(self.client, "took no optimizer step; give it more examples, or raise max_steps")
        plan, anchor = now.began.plan, now.began.ctx.anchor
        params = {name: self.model.parameters[name].detach().to("cpu", copy=True) for name in sorted(plan.train)}
        delta = {name: params[name] - anchor[name] for name in sorted(plan.up)}
        learned = LocalResult(
            params,
            dict.fromkeys(params, now.steps),
            [now.loss],
            self._optimizer_state() if now.run.method.carry_optimizer else {},
            DeltaFacts(delta, tensors.all_finite(delta)),
        )
        return finish_round(now.run, now.began, learned)

    def put(self, params: Mapping[str, torch.Tensor]) -> None:
        """Set parameters in place, so that optimizers and wrappers of the module keep them."""
        with torch.no_grad():
            for name, value in params.items():
                self.model.parameters[name].copy_(value)

    def put_own(self, run: Run, model: TrainerModel, job: Job, state: ClientState) -> None:
        """Put the client's own model after a round into the module."""
        self.put(client_params(run, model, job, state)[1])

    def scores(self) -> dict[str, float]:
        """Return the scores of `trainer.evaluate()`; none without an `eval_dataset`."""
        if self.trainer.eval_dataset is None:
            return {}
        named = {name.removeprefix("eval_"): value for name, value in self.trainer.evaluate().items()}
        return {name: float(value) for name, value in named.items() if not name.endswith(SPEED)}

    def start_training(self) -> None:
        """Called by the Trainer when its optimizer exists."""
        if self.open is None:
            return
        self.open.calls += 1
        if self.open.began.optimizer:
            self._load_optimizer(self.open.began.optimizer)

    def change_gradients(self) -> None:
        """Called by the Trainer before a step, after it has clipped: add penalties, and let rules change gradients."""
        if self.open is None or not (rules := self._rules("penalty", "gradient")):
            return
        ctx, named = self.open.ctx, self._parameters()
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in named.items()}
            hidden: Any = Hidden()
            pulls = [rule.penalty(hidden, {**ctx.anchor, **leaves}, hidden, ctx) for rule in rules]
            total = [pull for pull in pulls if pull is not None and pull.requires_grad]
            slopes = (
                torch.autograd.grad(torch.stack(total).sum(), list(leaves.values()), allow_unused=True) if total else ()
            )
        with torch.no_grad():
            found = {name: value.grad for name, value in named.items()}
            for name, slope in zip(leaves, slopes, strict=bool(slopes)):
                if slope is not None:
                    found[name] = slope if (grad := found[name]) is None else grad + slope
            grads = {name: grad for name, grad in found.items() if grad is not None}
            for rule in rules:
                grads = rule.gradient(grads, ctx)
            for name, value in named.items():
                if name not in grads:
                    value.grad = None
                elif value.grad is None:
                    value.grad = grads[name].clone()
                else:
                    value.grad.copy_(grads[name])

    def count_step(self) -> None:
        """Called by the Trainer after an optimizer step: count it, and let rules change the parameters."""
        if self.open is None or self.trainer.accelerator.optimizer_step_was_skipped:
            return
        self.open.steps += 1
        if rules := self._rules("after_step"):
            with torch.no_grad():
                values = {name: value.detach() for name, value in self._parameters().items() if value.grad is not None}
                moved: Tensors = values
                for rule in rules:
                    moved = rule.after_step(moved, self.open.ctx)
                self.put({name: moved[name] for name in values if moved[name] is not values[name]})

    def end_training(self, history: list[dict[str, Any]]) -> None:
        """Called by the Trainer at the end of `train()`."""
        if self.open is not None:
            losses = [entry["train_loss"] for entry in history if "train_loss" in entry]
            self.open.loss = float(losses[-1]) if losses else None

    def _rules(self, *hooks: str) -> list[ClientRule]:
        assert self.open is not None
        rules = self.open.run.method.client_rules
        return [rule for rule in rules if any(overrides(rule, hook) for hook in hooks)]

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: self.model.parameters[name] for name in sorted(self.trained)}

    def _on_device(self, run: Run, ctx: Context) -> Context:
        """Return what rules read in a step, on the device of each parameter; as it is if no rule acts in a step."""
        hooks = ("penalty", "gradient", "after_step")
        if not any(overrides(rule, hook) for rule in run.method.client_rules for hook in hooks):
            return ctx

        def moved(part: Tensors) -> dict[str, torch.Tensor]:
            return {name: value.to(self.model.parameters[name].device) for name, value in part.items()}

        slots = {"sent": ctx.sent, "memory": ctx.memory}
        there = {which: {slot: moved(part) for slot, part in own.items()} for which, own in slots.items()}
        return Context(ctx.model, ctx.plan, moved(ctx.anchor), there["sent"], there["memory"], ctx.lr)

    def _optimizer_state(self) -> dict[str, Tensors]:
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in self._parameters().items():
            for slot, part in self.trainer.optimizer.state[value].items():
                if not isinstance(part, torch.Tensor):
                    raise RunError(f"training.keep_optimizer: '{slot}' of the optimizer is no tensor; leave it out")
                found.setdefault(slot, {})[name] = part.detach().to("cpu", copy=True)
        return dict(found)

    def _load_optimizer(self, kept: Slots) -> None:
        optimizer, names = self.trainer.optimizer, {id(value): name for name, value in self._parameters().items()}
        plain = optimizer.state_dict()
        for group, own in zip(optimizer.param_groups, plain["param_groups"], strict=True):
            for value, index in zip(group["params"], own["params"], strict=True):
                name = names[id(value)]
                if state := {slot: part[name] for slot, part in kept.items() if name in part}:
                    plain["state"][index] = state
        optimizer.load_state_dict(plain)


class _Steps(TrainerCallback):
    """Tells a site what its Trainer does. Without a round, the Trainer trains as before."""

    def __init__(self, site: TrainerSite) -> None:
        self.site = site

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.site.start_training()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.site.change_gradients()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.site.count_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.site.end_training(state.log_history)


def _seed(key: Key) -> int:
    return key.seed() % 2**32
