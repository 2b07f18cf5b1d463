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
from partita.core.dp_settings import DPSGDSettings
from partita.core.method import ClientRule, Context, ForbiddenData
from partita.core.noise import add_noise, gaussian_noise
from partita.core.optim import clip_gradients
from partita.core.packed import CheckedTensors, layout_for
from partita.core.plan import Phase
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.training.dp_sgd import Loss, NoiseSource, clipped_sum
from partita.training.ghost_clipping import CHECKED_EXAMPLES, GhostError, check_norms, ghost_sum

NOTHING: tuple[Any, Any] = ({}, None)  # shared by clients of which none looks at it
PACKED_DEVICES = (
    "cuda",
)  # where a call costs more than its arithmetic; a CPU's rounds by where a number lies in memory
GHOST_THRESHOLD = (
    2**28
)  # numbers of a batch's gradients, 1 GiB of them, from which reading norms off layers is tried by itself


class VmapError(ValueError):
    """A model or rule that vmap cannot lift."""


class PhaseTrainer:
    """One phase of one client or of several side by side; a leading dimension (client, ...) appears with the second."""

    def __init__(
        self,
        run: Run,
        phase: Phase,
        contexts: Sequence[Context],
        start_params: Sequence[Tensors],
        moments: Sequence[Slots],
        dp_settings: DPSGDSettings | None = None,
        noise_sources: Sequence[NoiseSource] = (),
    ) -> None:
        first = contexts[0]
        self.run, self.model, self.plan, self.lr = run, first.model, first.plan, first.lr
        self.private, self.noise_sources = dp_settings, noise_sources
        self.many = len(contexts) > 1
        self.count = len(contexts)
        self.names = sorted(phase.names)
        self.device = next(iter(start_params[0].values())).device
        self.ghost = self._ghost()
        step_counts = moments[0].get("age", {})
        self.initial_steps = {name: int(step_counts[name]) if name in step_counts else 0 for name in self.names}
        self.steps = 0
        self.anchor = _stack_or_share([each.anchor for each in contexts])
        frozen = [name for name in start_params[0] if name not in phase.names]
        self.shared = [
            _stack_or_share([{name: each[name] for name in frozen} for each in start_params]),
            NOTHING,
            NOTHING,
            NOTHING,
        ]
        if run.method.client_rules:  # nobody else looks at these in a step
            sent, memory = [each.sent for each in contexts], [each.memory for each in contexts]
            self.shared[1:] = [self.anchor, _stack_or_share(sent), _stack_or_share(memory)]
        self.load(start_params, moments)

    def load(self, start_params: Sequence[Tensors], moments: Sequence[Slots]) -> None:
        """Copies of what each client starts from, since the optimizer moves them in place."""
        self.trainable = {name: self._stack([each[name] for each in start_params]) for name in self.names}
        fresh = self.run.training.optimizer.init({name: start_params[0][name] for name in self.names})
        self.moments = {
            slot: {
                name: self._stack([each.get(slot, start).get(name, start[name]) for each in moments])
                for name in self.names
            }
            for slot, start in fresh.items()
        }

    def step(self, batch: Batch) -> Tensor:
        """One step of the leading clients, those who are in the batch; the others have finished. Each one's loss."""
        count = len(batch.targets)
        trainable = {name: self._leading(value, count) for name, value in self.trainable.items()}
        fixed = [_leading_clients(part, count) if self.many else part for part in self.shared]
        given = [batch.inputs, batch.targets, batch.mask]
        dims = [0, *(dims for _, dims in self.shared), 0, 0, None if batch.mask is None else 0]
        values = [value for value, _ in fixed]
        follow = self._loss_and_gradients if self.private is None else self._private_gradients
        grads, task = follow(trainable, [*values, *given], dims)
        with torch.no_grad():
            if self._corrects():
                grads = self._vmap(self._correct, dims[:1] + dims[2:5])(grads, *values[1:])
            moments = {
                slot: {k: self._leading(v, count) for k, v in part.items()} for slot, part in self.moments.items()
            }
            self._optimizer_step(trainable, grads, moments)
        return task.detach() if self.many else task.detach().unsqueeze(0)  # (client,)

    def params(self) -> list[Mapping[str, Tensor]]:
        """Each client's, as views of what all hold together."""
        return self._client_views(self.trainable)

    def deltas(self) -> tuple[Sequence[Mapping[str, Tensor]], Tensor, Tensor | None]:
        """How far each client came from its anchor, of what goes up; the largest number of all, one that is not finite
        if any is not; and in rows the squares of norms, (client, name) where drift will ask for them and otherwise
        (client, 1). Taken for the whole block at once, and nothing waits for it yet.
        """
        trainable = {name: self.trainable[name] for name in self.names if name in self.plan.up}
        if not trainable:
            return self._per_client(trainable), torch.zeros((), device=self.device), None
        anchor, dims = self.anchor
        alike = dims is None and len({value.dtype for value in trainable.values()}) == 1
        if self.many and alike and self.device.type in PACKED_DEVICES:
            layout = layout_for(tuple(trainable), tuple(anchor[name].shape for name in trainable))
            rows = layout.pack(list(trainable.values())).sub_(
                layout.pack([anchor[name].unsqueeze(0) for name in trainable])
            )
            tables = layout.per_name(rows).values() if self.run.drift else [rows]
            norms = [torch.linalg.vector_norm(table, dim=1, dtype=torch.float64) for table in tables]
            squares = torch.stack(norms, 1).square()
            return layout.per_client(rows), tensors.max_abs({"": rows}), squares
        delta = tensors.subtract(trainable, anchor)
        if not self.many or self.run.drift:
            return self._per_client(delta), tensors.max_abs(delta), None
        # Drift would look at each client and name by itself; the server needs one norm a client.
        norms = [torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64) for value in delta.values()]
        squares = torch.stack(norms).square().sum(0).unsqueeze(1)
        return [CheckedTensors(each) for each in self._per_client(delta)], tensors.max_abs(delta), squares

    def states(self, steps: Sequence[int]) -> list[dict[str, Tensors]]:
        """The optimizer's for each client, who took so many of the block's steps."""
        apart = {slot: self._per_client(part) for slot, part in self.moments.items()}
        states = [{slot: parts[rank] for slot, parts in apart.items()} for rank in range(self.count)]
        if self.run.training.optimizer.uses_step_count:
            for state, taken in zip(states, steps, strict=True):
                state["age"] = {name: torch.tensor(count) for name, count in self._step_counts(taken).items()}
        return states

    def _optimizer_step(self, trainable: Tensors, grads: Tensors, moments: Slots) -> None:
        self.steps += 1
        self.run.training.optimizer.step(trainable, grads, moments, self.lr, self._step_counts(self.steps))

    def _step_counts(self, steps: int) -> dict[str, int]:
        return {name: count + steps for name, count in self.initial_steps.items()}

    def _loss_and_gradients(self, trainable: Tensors, values: list[Any], dims: list[Any]) -> tuple[Tensors, Tensor]:
        """The gradient, and the task's loss."""
        trainable = {name: value.detach().requires_grad_() for name, value in trainable.items()}
        with self._precision():
            total, task = self._vmap(self._objective, dims)(trainable, *values)
        grads = torch.autograd.grad(total.sum(), list(trainable.values()), allow_unused=True)
        return {name: grad for name, grad in zip(trainable, grads, strict=True) if grad is not None}, task

    def _private_gradients(self, trainable: Tensors, values: list[Any], dims: list[Any]) -> tuple[Tensors, Tensor]:
        """The same of clipped gradients and noise."""
        dp_settings, noise_sources = (
            self.private,
            self.noise_sources[: len(values[-2])] if self.many else self.noise_sources[:1],
        )
        assert dp_settings is not None
        with torch.no_grad():
            sums, grads, task = self._vmap(self._clipped, dims)(trainable, *values)
            noisy = (
                self._noisy(sums, noise_sources, dp_settings.noise * dp_settings.clip) if dp_settings.noise else sums
            )
            shares = 1 / self._stack(
                [torch.tensor(float(noise_source.batch), device=self.device) for noise_source in noise_sources]
            )
            return {name: value * self._broadcast(shares, value) + grads[name] for name, value in noisy.items()}, task

    def _noisy(self, sums: Tensors, noise_sources: Sequence[NoiseSource], std: float) -> Tensors:
        one = {name: value[0] if self.many else value for name, value in sums.items()}
        noises = [gaussian_noise(one, noise_source.key / self.steps, std) for noise_source in noise_sources]
        return {
            name: add_noise(value, self._stack([each[name] for each in noises]), std) for name, value in sums.items()
        }

    def _objective(
        self, trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: Tensor, mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        params = {**frozen, **trainable}
        out = self.model(params, inputs)
        losses = self.model.losses(out, targets)  # (example,)
        task = losses.mean() if mask is None else (losses * mask).sum() / mask.sum().clamp(min=1)
        if not self.run.method.client_rules:  # a compiled program must not depend on the rate for nothing
            return task, task
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)
        penalties = (
            rule.penalty(out, params, Batch(inputs, targets, mask), ctx) for rule in self.run.method.client_rules
        )
        return sum((penalty for penalty in penalties if penalty is not None), start=task), task

    def _clipped(
        self, trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: Tensor, mask: Tensor | None,
    ) -> tuple[Tensors, Tensors, Tensor]:  # fmt: skip
        """The sum of clipped gradients, the gradient of what looks at no example, and the task's loss."""
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)

        def penalties(out: Any, params: Tensors, batch: Any, each: bool) -> Iterator[Tensor]:
            for rule in self.run.method.client_rules:
                seen: tuple[Any, Any] = (out, batch) if each else (ForbiddenData(rule), ForbiddenData(rule))
                if rule.per_example == each and (penalty := rule.penalty(seen[0], params, seen[1], ctx)) is not None:
                    yield penalty

        def of_one(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
            params = {**frozen, **trainable}
            with self._precision():  # here alone: norms, sums and noise stay in full
                out = self.model(params, inputs)
                task = self.model.losses(out, targets).sum()
                return sum(penalties(out, params, Batch(inputs, targets), True), start=task), task

        def of_none(trainable: Tensors) -> Tensor:
            """What no example has a say in is differentiated beside the clipping, and needs no noise."""
            params = {**frozen, **trainable}
            return sum(penalties(None, params, None, False), start=next(iter(trainable.values())).new_zeros(()))

        total, losses = self._clipped_sum(of_one, trainable, frozen, Batch(inputs, targets, mask))
        grads = torch.func.grad(of_none)(trainable)
        return total, grads, losses.mean() if mask is None else (losses * mask).sum() / mask.sum().clamp(min=1)

    def _clipped_sum(self, of_one: Loss, trainable: Tensors, frozen: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        dp_settings = self.private
        assert dp_settings is not None

        def of_all(trainable: Tensors, inputs: Tensors, targets: Tensor) -> Tensor:
            return self.model.losses(self.model({**frozen, **trainable}, inputs), targets)

        numbers = len(batch.targets) * sum(value.numel() for value in trainable.values())
        if self.ghost and (dp_settings.clipping == "ghost" or numbers > GHOST_THRESHOLD):
            try:
                if not self.steps:
                    few = (
                        {name: value[:CHECKED_EXAMPLES] for name, value in batch.inputs.items()},
                        batch.targets[:CHECKED_EXAMPLES],
                    )
                    check_norms(of_all, trainable, *few, dp_settings)
                whole = batch.inputs, batch.targets
                with self._precision():
                    summed = ghost_sum(
                        lambda trainable: of_all(trainable, *whole), trainable, batch.mask, len(whole[1]), dp_settings
                    )
                total, losses, norms = summed
                if bool(torch.isfinite(norms).all()):
                    return total, losses
            except GhostError as error:
                if dp_settings.clipping == "ghost":
                    raise VmapError(
                        f"privacy.clipping is 'ghost', but of {self.model.name} with {self.run.method.name} {error}; "
                        "set it to 'direct', or train other parts of the model"
                    ) from error
                self.ghost = False
        return clipped_sum(of_one, trainable, batch.inputs, batch.targets, batch.mask, dp_settings)

    def _ghost(self) -> bool:
        """Whether norms can be read off layers: not in a block, and not where a rule has a loss of its own."""
        if self.private is None or self.private.clipping == "direct":
            return False
        alone = not self.many and not any(rule.per_example for rule in self.run.method.client_rules)
        if self.private.clipping == "ghost" and not alone:
            remedy = "set engine.clients_per_block = 1" if self.many else "set privacy.clipping = 'direct'"
            raise VmapError(
                f"privacy.clipping = 'ghost' is for one client at a time and the task's loss alone; {remedy}"
            )
        return alone

    def _precision(self) -> torch.autocast:
        # Without the cache: a cast that was remembered under one transform is of no use under the next.
        half = not self._in_full()
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=self.private is None)

    def _in_full(self) -> bool:
        return self.run.training.precision == "float32"

    def _corrects(self) -> bool:
        corrected = any(type(rule).gradient is not ClientRule.gradient for rule in self.run.method.client_rules)
        return corrected or self.run.training.clip is not None

    def _correct(self, grads: Tensors, anchor: Tensors, sent: Slots, memory: Slots) -> Tensors:
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)
        names = grads.keys()
        for rule in self.run.method.client_rules:
            grads = {name: grad for name, grad in rule.gradient(grads, ctx).items() if name in names}
        limit = self.run.training.clip
        return grads if limit is None else clip_gradients(grads, tensors.norm(grads), limit)

    def _vmap(self, function: Callable[..., Any], dims: list[Any]) -> Callable[..., Any]:
        if not self.many and self.private is None:
            return function
        lifted = torch.vmap(function, in_dims=tuple(dims)) if self.many else function
        over = "clients" if self.private is None else "clients and, for privacy, over examples"
        remedy = (
            "set engine.clients_per_block = 1 to train clients one by one"
            if self.many
            else "use another model, or no privacy"
        )
        if self.private and not self._in_full():
            remedy = "set training.precision = 'float32'"

        what = f"{self.model.name} with {self.run.method.name} over {over}"
        return translate_errors(lifted, lambda error: VmapError(f"vmap cannot lift {what}: {error}; {remedy}"))

    def _stack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)) if self.many else parts[0].clone()

    def _leading(self, value: Tensor, count: int) -> Tensor:
        return value[:count] if self.many else value

    def _broadcast(self, numbers: Tensor, value: Tensor) -> Tensor:
        """One number a client, in a shape that multiplies each client's part of the value."""
        return numbers.view(-1, *[1] * (value.ndim - 1)) if self.many else numbers

    def _client_views(self, stacked: Tensors) -> list[Mapping[str, Tensor]]:
        return [ClientView(stacked, rank) for rank in range(self.count)] if self.many else [stacked]

    def _per_client(self, stacked: Tensors) -> list[Tensors]:
        if not self.many:
            return [stacked]
        apart = [value.unbind() for value in stacked.values()]
        return [dict(zip(stacked, row, strict=True)) for row in zip(*apart, strict=True)] or [{}] * self.count


def translate_errors(function: Callable[..., Any], say: Callable[[RuntimeError], ValueError]) -> Callable[..., Any]:
    """The function, of whose failures but for memory's a user is told in other words."""

    def call(*parts: Any) -> Any:
        try:
            return function(*parts)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise say(error) from error

    return call


class ClientView(Mapping[str, Tensor]):
    """One client's part of what all hold together, taken apart only where somebody looks: for most methods, nobody."""

    def __init__(self, stacked: Tensors, rank: int) -> None:
        self.stacked, self.rank = stacked, rank

    def __getitem__(self, name: str) -> Tensor:
        return self.stacked[name][self.rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stacked)

    def __len__(self) -> int:
        return len(self.stacked)


def _stack_or_share(parts: Sequence[Any]) -> tuple[Any, Any]:
    """(value, vmap dimension) of nested dicts: what all clients hold as one object is held once, the rest stacked."""
    first = parts[0]
    if all(_same_objects(part, first) for part in parts):
        return first, None
    if isinstance(first, Mapping):
        pairs = {name: _stack_or_share([part[name] for part in parts]) for name in first}
        return {name: value for name, (value, _) in pairs.items()}, {name: dim for name, (_, dim) in pairs.items()}
    return torch.stack(list(parts)), 0


def _same_objects(left: Any, right: Any) -> bool:
    """Whether both are one object, or dicts of the very same ones."""
    if left is right or not isinstance(left, Mapping):
        return left is right
    return list(left) == list(right) and all(map(operator.is_, left.values(), right.values()))


def _leading_clients(part: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    value, dims = part
    if dims is None:
        return part
    if isinstance(value, Mapping):
        return {name: _leading_clients((value[name], dims[name]), count)[0] for name in value}, dims
    return value[:count], dims
