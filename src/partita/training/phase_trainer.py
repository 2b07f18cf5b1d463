"""One phase of local training, for one client or a block of several.

Clients do not interact, so the gradient of the sum of their losses contains each client's own gradient. Therefore only
the forward pass needs `vmap`, and one ordinary backward pass serves the whole block.
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

NOTHING: tuple[Any, Any] = ({}, None)  # an empty value, shared by all clients, for what no rule reads
# Pack deltas only where a call costs more than its arithmetic. On a CPU, rounding can depend on memory alignment.
PACKED_DEVICES = ("cuda",)
# With clipping = "auto", try ghost clipping if a batch's per-example gradients have more elements than this (1 GiB).
GHOST_THRESHOLD = 2**28


class VmapError(ValueError):
    """`torch.vmap` does not support the model or a rule."""


class PhaseTrainer:
    """Trains one phase of one client, or of a block of clients.

    With more than one client, all parameters and batches have a leading client dimension.

    Args:
        run: The settings.
        phase: The phase.
        contexts: The context of each client, in the order of their numbers of steps, most first.
        start_params: All parameters of each client at the start of the phase.
        moments: The optimizer state of each client by slot; empty to start with a new state.
        dp_settings: The DP-SGD settings; None for training without example-level privacy.
        noise_sources: The noise source of each client, with DP-SGD only.
    """

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
        self.anchor = _stack_or_share([ctx.anchor for ctx in contexts])
        frozen = [name for name in start_params[0] if name not in phase.names]
        self.shared = [
            _stack_or_share([{name: params[name] for name in frozen} for params in start_params]),
            NOTHING,
            NOTHING,
            NOTHING,
        ]
        if run.method.client_rules:  # only rules read these
            sent, memory = [ctx.sent for ctx in contexts], [ctx.memory for ctx in contexts]
            self.shared[1:] = [self.anchor, _stack_or_share(sent), _stack_or_share(memory)]
        self.load(start_params, moments)

    def load(self, start_params: Sequence[Tensors], moments: Sequence[Slots]) -> None:
        """Copy the clients' parameters and optimizer states, because the optimizer updates them in place."""
        self.trainable = {name: self._stack([params[name] for params in start_params]) for name in self.names}
        fresh = self.run.training.optimizer.init({name: start_params[0][name] for name in self.names})
        self.moments = {
            slot: {
                name: self._stack([state.get(slot, start).get(name, start[name]) for state in moments])
                for name in self.names
            }
            for slot, start in fresh.items()
        }

    def step(self, batch: Batch) -> Tensor:
        """Take one step of the leading clients, those in the batch; the others have finished.

        Args:
            batch: Shape (client, example, ...), or (example, ...) for a single client.

        Returns:
            The task's loss of each client before the step, of shape (client,).
        """
        count = len(batch.targets)
        trainable = {name: self._leading(value, count) for name, value in self.trainable.items()}
        fixed = [_leading_clients(part, count) if self.many else part for part in self.shared]
        given = [batch.inputs, batch.targets, batch.mask]
        dims = [0, *(dims for _, dims in self.shared), 0, 0, None if batch.mask is None else 0]
        values = [value for value, _ in fixed]
        compute = self._loss_and_gradients if self.private is None else self._private_gradients
        grads, task = compute(trainable, [*values, *given], dims)
        with torch.no_grad():
            if self._corrects():
                grads = self._vmap(self._correct, dims[:1] + dims[2:5])(grads, *values[1:])
            moments = {
                slot: {k: self._leading(v, count) for k, v in part.items()} for slot, part in self.moments.items()
            }
            self._optimizer_step(trainable, grads, moments)
        return task.detach() if self.many else task.detach().unsqueeze(0)  # (client,)

    def params(self) -> list[Mapping[str, Tensor]]:
        """Return the trained parameters of each client, as views of the block's tensors."""
        return self._client_views(self.trainable)

    def deltas(self) -> tuple[Sequence[Mapping[str, Tensor]], Tensor, Tensor | None]:
        """Compute the deltas of the whole block, without waiting for the GPU.

        Returns:
            `(deltas, largest, squares)`:

            - each client's parameters minus its anchor, for the phase's names in `plan.up`;
            - the largest absolute value in all deltas, a scalar that is not finite if any value is not;
            - the squared norms, of shape (client, name) if drift needs them and otherwise (client, 1); None if they
              were not computed.
        """
        trainable = {name: self.trainable[name] for name in self.names if name in self.plan.up}
        if not trainable:
            return self._per_client(trainable), torch.zeros((), device=self.device), None
        anchor, dims = self.anchor
        can_pack = dims is None and len({value.dtype for value in trainable.values()}) == 1
        if self.many and can_pack and self.device.type in PACKED_DEVICES:
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
        # Without drift the server needs only one norm per client.
        norms = [torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64) for value in delta.values()]
        squares = torch.stack(norms).square().sum(0).unsqueeze(1)
        return [CheckedTensors(part) for part in self._per_client(delta)], tensors.max_abs(delta), squares

    def states(self, steps: Sequence[int]) -> list[dict[str, Tensors]]:
        """Return the optimizer state of each client by slot.

        Args:
            steps: The number of steps that each client took in this phase.
        """
        per_client = {slot: self._per_client(part) for slot, part in self.moments.items()}
        states = [{slot: parts[rank] for slot, parts in per_client.items()} for rank in range(self.count)]
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
        """The gradient by name, and the task's loss of each client."""
        trainable = {name: value.detach().requires_grad_() for name, value in trainable.items()}
        with self._precision():
            total, task = self._vmap(self._objective, dims)(trainable, *values)
        grads = torch.autograd.grad(total.sum(), list(trainable.values()), allow_unused=True)
        return {name: grad for name, grad in zip(trainable, grads, strict=True) if grad is not None}, task

    def _private_gradients(self, trainable: Tensors, values: list[Any], dims: list[Any]) -> tuple[Tensors, Tensor]:
        """Like `_loss_and_gradients`, with clipped per-example gradients and noise."""
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
            name: add_noise(value, self._stack([noise[name] for noise in noises]), std) for name, value in sums.items()
        }

    def _objective(
        self, trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: Tensor, mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        params = {**frozen, **trainable}
        out = self.model(params, inputs)
        losses = self.model.losses(out, targets)  # (example,)
        task = losses.mean() if mask is None else (losses * mask).sum() / mask.sum().clamp(min=1)
        if not self.run.method.client_rules:  # a compiled program must not depend on `lr` without need
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
        """The sum of clipped gradients, the gradient of penalties that read no examples, and the task's loss."""
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)

        def penalties(out: Any, params: Tensors, batch: Any, each: bool) -> Iterator[Tensor]:
            for rule in self.run.method.client_rules:
                seen: tuple[Any, Any] = (out, batch) if each else (ForbiddenData(rule), ForbiddenData(rule))
                if rule.per_example == each and (penalty := rule.penalty(seen[0], params, seen[1], ctx)) is not None:
                    yield penalty

        def of_one(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
            params = {**frozen, **trainable}
            with self._precision():  # only here: norms, sums and noise stay in float32
                out = self.model(params, inputs)
                task = self.model.losses(out, targets).sum()
                return sum(penalties(out, params, Batch(inputs, targets), True), start=task), task

        def of_none(trainable: Tensors) -> Tensor:
            """Penalties that do not depend on examples need neither clipping nor noise."""
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
                        f"privacy.clipping is 'ghost', but {self.model.name} with {self.run.method.name} does not "
                        f"support it: {error}; set it to 'direct', or train other parts of the model"
                    ) from error
                self.ghost = False
        return clipped_sum(of_one, trainable, batch.inputs, batch.targets, batch.mask, dp_settings)

    def _ghost(self) -> bool:
        """Whether ghost clipping is possible: not for a block, and not if a rule has a per-example penalty."""
        if self.private is None or self.private.clipping == "direct":
            return False
        possible = not self.many and not any(rule.per_example for rule in self.run.method.client_rules)
        if self.private.clipping == "ghost" and not possible:
            remedy = "set engine.clients_per_block = 1" if self.many else "set privacy.clipping = 'direct'"
            raise VmapError(
                f"privacy.clipping = 'ghost' supports one client at a time and the task's loss only; {remedy}"
            )
        return possible

    def _precision(self) -> torch.autocast:
        # Disable the cache under privacy: a cast that is cached inside one functional transform is invalid in the next.
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
        return translate_errors(lifted, lambda error: VmapError(f"vmap does not support {what}: {error}; {remedy}"))

    def _stack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)) if self.many else parts[0].clone()

    def _leading(self, value: Tensor, count: int) -> Tensor:
        return value[:count] if self.many else value

    def _broadcast(self, numbers: Tensor, value: Tensor) -> Tensor:
        """Reshape one number per client so that it multiplies each client's part of `value`."""
        return numbers.view(-1, *[1] * (value.ndim - 1)) if self.many else numbers

    def _client_views(self, stacked: Tensors) -> list[Mapping[str, Tensor]]:
        return [ClientView(stacked, rank) for rank in range(self.count)] if self.many else [stacked]

    def _per_client(self, stacked: Tensors) -> list[Tensors]:
        if not self.many:
            return [stacked]
        parts = [value.unbind() for value in stacked.values()]
        return [dict(zip(stacked, row, strict=True)) for row in zip(*parts, strict=True)] or [{}] * self.count


def translate_errors(function: Callable[..., Any], say: Callable[[RuntimeError], ValueError]) -> Callable[..., Any]:
    """Wrap `function` so that any RuntimeError except out-of-memory is re-raised as the error that `say` returns."""

    def call(*parts: Any) -> Any:
        try:
            return function(*parts)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise say(error) from error

    return call


class ClientView(Mapping[str, Tensor]):
    """One client's part of stacked tensors. Indexing creates a view on demand; most methods need none."""

    def __init__(self, stacked: Tensors, rank: int) -> None:
        self.stacked, self.rank = stacked, rank

    def __getitem__(self, name: str) -> Tensor:
        return self.stacked[name][self.rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stacked)

    def __len__(self) -> int:
        return len(self.stacked)


def _stack_or_share(parts: Sequence[Any]) -> tuple[Any, Any]:
    """(value, vmap dimension) of nested dicts: objects that all clients share are kept once, all others stacked."""
    first = parts[0]
    if all(_same_objects(part, first) for part in parts):
        return first, None
    if isinstance(first, Mapping):
        pairs = {name: _stack_or_share([part[name] for part in parts]) for name in first}
        return {name: value for name, (value, _) in pairs.items()}, {name: dim for name, (_, dim) in pairs.items()}
    return torch.stack(list(parts)), 0


def _same_objects(left: Any, right: Any) -> bool:
    """Whether both are the same object, or dicts with the same objects as values."""
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
