"""Call the hooks `start` and `step_gradient` twice, and see that they change nothing and give one result.

In a run, what these hooks modify may never be read again, so its result would not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from partita.core import tensors
from partita.core.client import ClientRound, begin_round
from partita.core.client_rule import ClientRule, Context, overrides
from partita.core.data import Population
from partita.core.model import Model
from partita.core.rounds import make_job
from partita.core.server_rule import Server
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.storage.client_store import ClientStore
from partita.testing.probes import equal_slots
from partita.testing.promises import NotApplicable, require

Hook = Callable[[Tensors], Slots]


def check_hooks(run: Run, model: Model, population: Population, server: Server, store: ClientStore) -> None:
    """Check the hooks of all clients in the last round of a run.

    Args:
        run: The settings.
        model: The model.
        population: The clients.
        server: The server after the run.
        store: The clients' state after the run.

    Raises:
        ConformanceError: If a hook modifies its arguments or gives two results.
        NotApplicable: If no rule has one of the hooks.
    """
    if not any(overrides(rule, hook) for rule in run.method.client_rules for hook in ("start", "step_gradient")):
        raise NotApplicable("no client rule has the hooks start or step_gradient")
    for client in population.clients:
        job, _ = make_job(run, model, server, run.rounds - 1, client)
        state = store.load(client, run.rounds)
        each = begin_round(run, model, job, state, population[client].train, trains=False)
        for name, hook in _hooks(run, each):
            _check_pure(name, hook, each.ctx)


def _hooks(run: Run, each: ClientRound) -> Iterator[tuple[str, Hook]]:
    for rule in run.method.client_rules:
        if overrides(rule, "start"):
            yield f"{type(rule).__name__}.start", partial(_started, rule, each)
        if overrides(rule, "step_gradient"):
            yield f"{type(rule).__name__}.step_gradient", partial(_step_gradient, rule, each)


def _check_pure(name: str, hook: Hook, ctx: Context) -> None:
    given: Slots = {"params": tensors.clone_all(ctx.anchor), "anchor": ctx.anchor, **ctx.sent, **ctx.memory}
    held = {slot: tensors.clone_all(part) for slot, part in given.items()}
    one, two = (hook(given["params"]) for _ in range(2))
    require(equal_slots(given, held), f"{name} modifies the tensors that it is given")
    require(equal_slots(one, two), f"{name} gives two results for the same arguments")


def _started(rule: ClientRule, each: ClientRound, params: Tensors) -> Slots:
    values, notes = rule.start(params, each.examples, each.ctx, each.key)
    return {"values": values, **notes}


def _step_gradient(rule: ClientRule, each: ClientRound, params: Tensors) -> Slots:
    batch = each.examples.take(torch.arange(min(8, len(each.examples))))
    ctx = each.ctx
    ctx = Context(ctx.model, ctx.plan, ctx.anchor, ctx.sent, ctx.memory, ctx.lr)  # as in a step

    def gradient_at(point: Tensors) -> Tensors:
        whole = {**params, **point}
        live = {name: whole[name].detach().requires_grad_() for name in sorted(ctx.plan.train)}
        with torch.enable_grad():
            loss = ctx.model.losses(ctx.model({**whole, **live}, batch.inputs), batch.targets).mean()
        grads = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
        return {name: grad for name, grad in zip(live, grads, strict=True) if grad is not None}

    with torch.no_grad():
        return {"grads": rule.step_gradient(gradient_at, params, ctx)}
