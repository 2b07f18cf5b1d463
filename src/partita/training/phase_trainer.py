"""One phase of local training, for one client or for several side by side.

Clients share no arithmetic, so the gradient of the sum of their losses is each one's own: only the forward pass is
lifted with `vmap`, and one ordinary backward pass serves the whole block.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.core import tensors
from partita.core.data import Batch
from partita.core.dp_settings import Private
from partita.core.method import Context, Local, Unseen
from partita.core.noise import add_noise, gaussian
from partita.core.optim import clip
from partita.core.packed import Known, form_of
from partita.core.plan import Phase
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.training.dp_sgd import Draw, Loss, clipped_sum
from partita.training.ghost_clipping import CHECKED, GhostError, check_norms, ghost_sum

NOTHING: tuple[Any, Any] = ({}, None)  # shared by clients of which none looks at it
IN_ROWS = ("cuda",)  # where a call costs more than its arithmetic; a CPU's rounds by where a number lies in memory
LARGE = 2**28  # numbers of a batch's gradients, 1 GiB of them, from which reading norms off layers is tried by itself


class LiftError(ValueError):
    """A model or rule that vmap cannot lift."""


class Block:
    """One phase of one client or of several side by side; a leading dimension (client, ...) appears with the second."""

    def __init__(
        self,
        run: Run,
        phase: Phase,
        contexts: Sequence[Context],
        now: Sequence[Tensors],
        moments: Sequence[Slots],
        private: Private | None = None,
        draws: Sequence[Draw] = (),
    ) -> None:
        first = contexts[0]
        self.run, self.model, self.plan, self.lr = run, first.model, first.plan, first.lr
        self.private, self.draws = private, draws
        self.many = len(contexts) > 1
        self.count = len(contexts)
        self.names = sorted(phase.names)
        self.device = next(iter(now[0].values())).device
        self.ghost = self._ghost()
        ages = moments[0].get("age", {})
        self.born = {name: int(ages[name]) if name in ages else 0 for name in self.names}
        self.steps = 0
        self.anchor = _share([each.anchor for each in contexts])
        rest = [name for name in now[0] if name not in phase.names]
        self.shared = [_share([{name: each[name] for name in rest} for each in now]), NOTHING, NOTHING, NOTHING]
        if run.method.local:  # nobody else looks at these in a step
            sent, memory = [each.sent for each in contexts], [each.memory for each in contexts]
            self.shared[1:] = [self.anchor, _share(sent), _share(memory)]
        self.fill(now, moments)

    def fill(self, now: Sequence[Tensors], moments: Sequence[Slots]) -> None:
        """Copies of what each client starts from, since the optimizer moves them in place."""
        self.live = {name: self._join([each[name] for each in now]) for name in self.names}
        fresh = self.run.training.optimizer.init({name: now[0][name] for name in self.names})
        self.moments = {
            slot: {
                name: self._join([each.get(slot, start).get(name, start[name]) for each in moments])
                for name in self.names
            }
            for slot, start in fresh.items()
        }

    def step(self, batch: Batch) -> Tensor:
        """One step of the leading clients, those who are in the batch; the others have finished. Each one's loss."""
        count = len(batch.targets)
        live = {name: self._lead(value, count) for name, value in self.live.items()}
        fixed = [_lead_shared(part, count) if self.many else part for part in self.shared]
        given = [batch.inputs, batch.targets, batch.mask]
        dims = [0, *(dims for _, dims in self.shared), 0, 0, None if batch.mask is None else 0]
        values = [value for value, _ in fixed]
        follow = self._follow if self.private is None else self._follow_in_private
        grads, task = follow(live, [*values, *given], dims)
        with torch.no_grad():
            if self._corrects():
                grads = self._lift(self._correct, dims[:1] + dims[2:5])(grads, *values[1:])
            moments = {slot: {k: self._lead(v, count) for k, v in part.items()} for slot, part in self.moments.items()}
            self._move(live, grads, moments)
        return task.detach() if self.many else task.detach().unsqueeze(0)  # (client,)

    def params(self) -> list[Mapping[str, Tensor]]:
        """Each client's, as views of what all hold together."""
        return self._rows(self.live)

    def moved(self) -> tuple[Sequence[Mapping[str, Tensor]], Tensor, Tensor | None]:
        """How far each client came from its anchor, of what goes up; the largest number of all, one that is not finite
        if any is not; and in rows the squares of norms, (client, name) where drift will ask for them and otherwise
        (client, 1). Taken for the whole block at once, and nothing waits for it yet.
        """
        live = {name: self.live[name] for name in self.names if name in self.plan.up}
        if not live:
            return self._apart(live), torch.zeros((), device=self.device), None
        anchor, dims = self.anchor
        alike = dims is None and len({value.dtype for value in live.values()}) == 1
        if self.many and alike and self.device.type in IN_ROWS:
            form = form_of(tuple(live), tuple(anchor[name].shape for name in live))
            rows = form.lay(list(live.values())).sub_(form.lay([anchor[name].unsqueeze(0) for name in live]))
            tables = form.apart(rows).values() if self.run.drift else [rows]
            norms = [torch.linalg.vector_norm(table, dim=1, dtype=torch.float64) for table in tables]
            squares = torch.stack(norms, 1).square()
            return form.each(rows), tensors.largest({"": rows}), squares
        delta = tensors.subtract(live, anchor)
        if not self.many or self.run.drift:
            return self._apart(delta), tensors.largest(delta), None
        # Drift would look at each client and name by itself; the server needs one norm a client.
        norms = [torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64) for value in delta.values()]
        squares = torch.stack(norms).square().sum(0).unsqueeze(1)
        return [Known(each) for each in self._apart(delta)], tensors.largest(delta), squares

    def states(self, steps: Sequence[int]) -> list[dict[str, Tensors]]:
        """The optimizer's for each client, who took so many of the block's steps."""
        apart = {slot: self._apart(part) for slot, part in self.moments.items()}
        states = [{slot: parts[rank] for slot, parts in apart.items()} for rank in range(self.count)]
        if self.run.training.optimizer.ages:
            for state, taken in zip(states, steps, strict=True):
                state["age"] = {name: torch.tensor(years) for name, years in self._ages(taken).items()}
        return states

    def _move(self, live: Tensors, grads: Tensors, moments: Slots) -> None:
        self.steps += 1
        self.run.training.optimizer.step(live, grads, moments, self.lr, self._ages(self.steps))

    def _ages(self, steps: int) -> dict[str, int]:
        return {name: years + steps for name, years in self.born.items()}

    def _follow(self, live: Tensors, values: list[Any], dims: list[Any]) -> tuple[Tensors, Tensor]:
        """The gradient, and the task's loss."""
        live = {name: value.detach().requires_grad_() for name, value in live.items()}
        with self._precision():
            total, task = self._lift(self._objective, dims)(live, *values)
        slopes = torch.autograd.grad(total.sum(), list(live.values()), allow_unused=True)
        return {name: slope for name, slope in zip(live, slopes, strict=True) if slope is not None}, task

    def _follow_in_private(self, live: Tensors, values: list[Any], dims: list[Any]) -> tuple[Tensors, Tensor]:
        """The same of clipped gradients and noise."""
        private, draws = self.private, self.draws[: len(values[-2])] if self.many else self.draws[:1]
        assert private is not None
        with torch.no_grad():
            sums, slopes, task = self._lift(self._clipped, dims)(live, *values)
            noisy = self._noisy(sums, draws, private.noise * private.clip) if private.noise else sums
            shares = 1 / self._join([torch.tensor(float(draw.batch), device=self.device) for draw in draws])
            return {name: value * self._beside(shares, value) + slopes[name] for name, value in noisy.items()}, task

    def _noisy(self, sums: Tensors, draws: Sequence[Draw], std: float) -> Tensors:
        one = {name: value[0] if self.many else value for name, value in sums.items()}
        noises = [gaussian(one, draw.key / self.steps, std) for draw in draws]
        return {
            name: add_noise(value, self._join([each[name] for each in noises]), std) for name, value in sums.items()
        }

    def _objective(
        self, live: Tensors, rest: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: Tensor, mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        params = {**rest, **live}
        out = self.model(params, inputs)
        losses = self.model.losses(out, targets)  # (example,)
        task = losses.mean() if mask is None else (losses * mask).sum() / mask.sum().clamp(min=1)
        if not self.run.method.local:  # a compiled program must not depend on the rate for nothing
            return task, task
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)
        penalties = (rule.penalty(out, params, Batch(inputs, targets, mask), ctx) for rule in self.run.method.local)
        return sum((penalty for penalty in penalties if penalty is not None), start=task), task

    def _clipped(
        self, live: Tensors, rest: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: Tensor, mask: Tensor | None,
    ) -> tuple[Tensors, Tensors, Tensor]:  # fmt: skip
        """The sum of clipped gradients, the gradient of what looks at no example, and the task's loss."""
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)

        def penalties(out: Any, params: Tensors, batch: Any, each: bool) -> Iterator[Tensor]:
            for rule in self.run.method.local:
                seen: tuple[Any, Any] = (out, batch) if each else (Unseen(rule), Unseen(rule))
                if rule.per_example == each and (penalty := rule.penalty(seen[0], params, seen[1], ctx)) is not None:
                    yield penalty

        def of_one(live: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
            params = {**rest, **live}
            with self._precision():  # here alone: norms, sums and noise stay in full
                out = self.model(params, inputs)
                task = self.model.losses(out, targets).sum()
                return sum(penalties(out, params, Batch(inputs, targets), True), start=task), task

        def of_none(live: Tensors) -> Tensor:
            """What no example has a say in is differentiated beside the clipping, and needs no noise."""
            params = {**rest, **live}
            return sum(penalties(None, params, None, False), start=next(iter(live.values())).new_zeros(()))

        total, losses = self._sum(of_one, live, rest, Batch(inputs, targets, mask))
        slopes = torch.func.grad(of_none)(live)
        return total, slopes, losses.mean() if mask is None else (losses * mask).sum() / mask.sum().clamp(min=1)

    def _sum(self, of_one: Loss, live: Tensors, rest: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        private = self.private
        assert private is not None

        def of_all(live: Tensors, inputs: Tensors, targets: Tensor) -> Tensor:
            return self.model.losses(self.model({**rest, **live}, inputs), targets)

        numbers = len(batch.targets) * sum(value.numel() for value in live.values())
        if self.ghost and (private.norms == "ghost" or numbers > LARGE):
            try:
                if not self.steps:
                    few = {name: value[:CHECKED] for name, value in batch.inputs.items()}, batch.targets[:CHECKED]
                    check_norms(of_all, live, *few, private)
                whole = batch.inputs, batch.targets
                with self._precision():
                    summed = ghost_sum(lambda live: of_all(live, *whole), live, batch.mask, len(whole[1]), private)
                total, losses, norms = summed
                if bool(torch.isfinite(norms).all()):
                    return total, losses
            except GhostError as error:
                if private.norms == "ghost":
                    raise LiftError(
                        f"privacy.norms is 'ghost', but of {self.model.name} with {self.run.method.name} {error}; set "
                        "it to 'direct', or train other parts of the model"
                    ) from error
                self.ghost = False
        return clipped_sum(of_one, live, batch.inputs, batch.targets, batch.mask, private)

    def _ghost(self) -> bool:
        """Whether norms can be read off layers: not in a block, and not where a rule has a loss of its own."""
        if self.private is None or self.private.norms == "direct":
            return False
        alone = not self.many and not any(rule.per_example for rule in self.run.method.local)
        if self.private.norms == "ghost" and not alone:
            remedy = "set engine.block = 1" if self.many else "set privacy.norms = 'direct'"
            raise LiftError(f"privacy.norms = 'ghost' is for one client at a time and the task's loss alone; {remedy}")
        return alone

    def _precision(self) -> torch.autocast:
        # Without the cache: a cast that was remembered under one transform is of no use under the next.
        half = not self._in_full()
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=self.private is None)

    def _in_full(self) -> bool:
        return self.run.training.precision == "float32"

    def _corrects(self) -> bool:
        corrected = any(type(rule).gradient is not Local.gradient for rule in self.run.method.local)
        return corrected or self.run.training.clip is not None

    def _correct(self, grads: Tensors, anchor: Tensors, sent: Slots, memory: Slots) -> Tensors:
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)
        names = grads.keys()
        for rule in self.run.method.local:
            grads = {name: slope for name, slope in rule.gradient(grads, ctx).items() if name in names}
        limit = self.run.training.clip
        return grads if limit is None else clip(grads, tensors.norm(grads), limit)

    def _lift(self, function: Callable[..., Any], dims: list[Any]) -> Callable[..., Any]:
        if not self.many and self.private is None:
            return function
        lifted = torch.vmap(function, in_dims=tuple(dims)) if self.many else function
        over = "clients" if self.private is None else "clients and, for privacy, over examples"
        remedy = "set engine.block = 1 to train clients one by one" if self.many else "use another model, or no privacy"
        if self.private and not self._in_full():
            remedy = "set training.precision = 'float32'"

        what = f"{self.model.name} with {self.run.method.name} over {over}"
        return told(lifted, lambda error: LiftError(f"vmap cannot lift {what}: {error}; {remedy}"))

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)) if self.many else parts[0].clone()

    def _lead(self, value: Tensor, count: int) -> Tensor:
        return value[:count] if self.many else value

    def _beside(self, numbers: Tensor, value: Tensor) -> Tensor:
        """One number a client, in a shape that multiplies each client's part of the value."""
        return numbers.view(-1, *[1] * (value.ndim - 1)) if self.many else numbers

    def _rows(self, joined: Tensors) -> list[Mapping[str, Tensor]]:
        return [Row(joined, rank) for rank in range(self.count)] if self.many else [joined]

    def _apart(self, joined: Tensors) -> list[Tensors]:
        if not self.many:
            return [joined]
        apart = [value.unbind() for value in joined.values()]
        return [dict(zip(joined, row, strict=True)) for row in zip(*apart, strict=True)] or [{}] * self.count


def told(function: Callable[..., Any], say: Callable[[RuntimeError], ValueError]) -> Callable[..., Any]:
    """The function, of whose failures but for memory's a user is told in other words."""

    def call(*parts: Any) -> Any:
        try:
            return function(*parts)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise say(error) from error

    return call


class Row(Mapping[str, Tensor]):
    """One client's part of what all hold together, taken apart only where somebody looks: for most methods, nobody."""

    def __init__(self, joined: Tensors, rank: int) -> None:
        self.joined, self.rank = joined, rank

    def __getitem__(self, name: str) -> Tensor:
        return self.joined[name][self.rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self.joined)

    def __len__(self) -> int:
        return len(self.joined)


def _share(parts: Sequence[Any]) -> tuple[Any, Any]:
    """(value, vmap dimension) of nested dicts: what all clients hold as one object is held once, the rest stacked."""
    first = parts[0]
    if all(_one(part, first) for part in parts):
        return first, None
    if isinstance(first, Mapping):
        pairs = {name: _share([part[name] for part in parts]) for name in first}
        return {name: value for name, (value, _) in pairs.items()}, {name: dim for name, (_, dim) in pairs.items()}
    return torch.stack(list(parts)), 0


def _one(left: Any, right: Any) -> bool:
    """Whether both are one object, or dicts of the very same ones."""
    if left is right or not isinstance(left, Mapping):
        return left is right
    return list(left) == list(right) and all(map(operator.is_, left.values(), right.values()))


def _lead_shared(part: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    value, dims = part
    if dims is None:
        return part
    if isinstance(value, Mapping):
        return {name: _lead_shared((value[name], dims[name]), count)[0] for name in value}, dims
    return value[:count], dims
