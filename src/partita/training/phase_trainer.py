"""One phase of local training, for one client or a block of several."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from partita.core import tensors
from partita.core.client_rule import ClientRule
from partita.core.data import Batch
from partita.core.method_error import MethodError
from partita.core.optim import warmup_factor
from partita.core.outside_vmap import outside_vmap
from partita.core.packed import layout_for
from partita.core.tensors import Slots, Tensors
from partita.core.torch_private import foreach_copy_, foreach_zero_
from partita.training.batch_shapes import BatchPadding
from partita.training.client_axis import ClientAxis, ClientVmap, leading_clients
from partita.training.gradients import AccumulatedGradients, GradientEstimator, Lift, PlainGradients
from partita.training.objective import Objective
from partita.training.parameter_groups import ParameterGroup, parameter_groups, split_by_group
from partita.training.phase_work import PhaseWork
from partita.training.private_gradients import PrivateGradients


def step_gradients(objective: Objective, axis: ClientAxis, lift: Lift | None = None) -> GradientEstimator:
    """Return the gradients of training without privacy: the plain ones, or those of a rule with `step_gradient`.

    The arguments are those of `PlainGradients`.
    """
    plain = PlainGradients(objective, axis, lift)
    return plain if objective.step_rule is None else RuleGradients(objective.step_rule, plain, axis)


class RuleGradients:
    """The gradient that a rule's `step_gradient` returns.

    The rule is written for one client and runs under `torch.vmap`. A gradient that it asks for is computed outside
    `vmap` for the whole block, with one ordinary backward pass. So it equals that of a step without such a rule.

    Args:
        rule: The rule.
        plain: Computes the gradient at a point.
        axis: The clients.
    """

    def __init__(self, rule: ClientRule, plain: PlainGradients, axis: ClientAxis) -> None:
        self.rule, self.plain, self.axis = rule, plain, axis
        self.lift = ClientVmap(axis, str(plain.objective))

    def __call__(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int
    ) -> tuple[Tensors, torch.Tensor]:
        names, losses = list(trainable), list[torch.Tensor]()

        def evaluate(point: Tensors, unchanged: bool) -> Tensors:
            with torch.enable_grad():
                grads, task = self.plain.at(point, names, values, dims)
            if unchanged:
                losses.append(task.detach())
            return grads

        def of_one(trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots) -> Tensors:
            params = {**frozen, **trainable}

            def gradient_at(point: Tensors) -> Tensors:
                if stray := point.keys() - params.keys():
                    raise MethodError(
                        f"{type(self.rule).__name__} asks for the gradient at a value of '{min(stray)}', which "
                        f"{self.plain.objective.model.name} does not have; use names of the model"
                    )
                unchanged = all(value is params[name] for name, value in point.items())
                # A frozen parameter at another value joins the trained ones, which take precedence in the loss.
                whole = {**trainable, **point} if not unchanged else trainable
                return self._leave_vmap(lambda whole: evaluate(whole, unchanged), whole, trainable)

            ctx = self.plain.objective.context(anchor, sent, memory)
            found = self.rule.step_gradient(gradient_at, params, ctx)
            return {name: found[name] for name in names if name in found}

        with torch.no_grad():
            grads = self.lift(of_one, dims[:5])(trainable, *values[:4])
        return grads, losses[0] if losses else self.plain.task_losses(trainable, values, dims)

    def _leave_vmap(self, evaluate: Callable[[Tensors], Tensors], point: Tensors, batched: Tensors) -> Tensors:
        """Call `evaluate` with a point that has the client dimension, if there are several clients."""
        if not self.axis.many:
            return evaluate(point)
        found: list[str] = []

        def call(values: Sequence[torch.Tensor], dims: Sequence[int | None]) -> tuple[torch.Tensor, ...]:
            clients = values[-1].shape[dims[-1] or 0]
            stacked = [
                value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)
                for value, dim in zip(values, dims, strict=True)
            ]
            grads = evaluate(dict(zip(point, stacked[:-1], strict=True)))
            found.extend(grads)
            return tuple(grads.values())

        # The last value makes sure that at least one has the client dimension: a point may be the same for all.
        grads = outside_vmap(call, [*point.values(), next(iter(batched.values()))])
        return dict(zip(found, grads, strict=True))


# Pack deltas only where a call costs more than its arithmetic. On a CPU, rounding can depend on memory alignment.
PACKED_DEVICES = ("cuda",)

Step = Callable[[Batch], torch.Tensor]  # batch -> losses (client,)
# Runs a step now, or replays a captured one. The last argument says which of several ways the step computes.
StepRunner = Callable[[Step, Batch, Hashable], torch.Tensor]


class OptimizerSteps(Protocol):
    """Takes optimizer steps and knows how many it took."""

    def reset(self, lr: float, initial_steps: Mapping[str, int]) -> None:
        """Start a phase.

        Args:
            lr: The learning rate.
            initial_steps: The number of earlier steps by name.
        """
        ...

    def step(self, trainable: Tensors, grads: Tensors, moments: Slots) -> None:
        """Update parameters and optimizer state in place, for the names in `grads`.

        Args:
            trainable: The parameters, (client, ...) in a block of several clients.
            grads: Their gradients, of the same shapes.
            moments: The optimizer state by slot, of the same shapes.
        """
        ...


class EagerOptimizer:
    """Optimizer steps with the learning rate and the step counts as Python numbers.

    Args:
        groups: The parameters, by how they are stepped.
        warmup_steps: `Training.warmup_steps`.
    """

    def __init__(self, groups: Sequence[ParameterGroup], warmup_steps: int = 0) -> None:
        self.groups, self.warmup_steps = groups, warmup_steps

    def reset(self, lr: float, initial_steps: Mapping[str, int]) -> None:
        self.lr, self.step_counts, self.taken = lr, dict(initial_steps), 0

    def step(self, trainable: Tensors, grads: Tensors, moments: Slots) -> None:
        for name in self.step_counts:
            self.step_counts[name] += 1
        warmup = warmup_factor(self.taken, self.warmup_steps)
        self.taken += 1
        for group, own in zip(self.groups, split_by_group(self.groups, grads), strict=True):
            if own:
                group.optimizer.step(trainable, own, moments, self.lr * group.lr_factor * warmup, self.step_counts)


def run_eagerly(step: Step, batch: Batch, variant: Hashable) -> torch.Tensor:
    """Run a step now, and return the losses (client,)."""
    return step(batch)


@dataclass(frozen=True)
class PhaseDeltas:
    """The deltas of a block, which the GPU may still compute.

    Attributes:
        deltas: Each client's parameters minus its anchor, for the phase's names in `plan.up`.
        largest: The largest absolute value in all deltas, a scalar that is not finite if any value is not.
        squares: The squared norms, of shape (client, name) if drift needs them and otherwise (client, 1); None if they
            were not computed.
    """

    deltas: Sequence[Mapping[str, torch.Tensor]]
    largest: torch.Tensor
    squares: torch.Tensor | None


class PhaseTrainer:
    """Trains one phase of one client, or of a block of clients.

    With more than one client, all parameters and batches have a leading client dimension.

    Args:
        work: The phase and where it starts.
        gradients: Computes gradients; by default those of plain training, or of DP-SGD if `work` has its settings.
        optimizer: Takes optimizer steps.
        run_step: Runs a step, or replays a captured one.
        reused: Whether the trainer's tensors are used again for other clients, so that results must be copies.
        padding: How batches are padded, so that they have few shapes; None if they are not.
    """

    def __init__(
        self,
        work: PhaseWork,
        gradients: GradientEstimator | None = None,
        optimizer: OptimizerSteps | None = None,
        run_step: StepRunner = run_eagerly,
        reused: bool = False,
        padding: BatchPadding | None = None,
    ) -> None:
        self.run, self.axis, self.names, self.device = work.run, work.axis, work.names, work.device
        self.objective = work.objective
        training, model = work.run.training, work.objective.model
        self.gradients = gradients or step_estimator(work)
        self.private = self.gradients if isinstance(self.gradients, PrivateGradients) else None
        if training.accumulate > 1:
            self.gradients = AccumulatedGradients(self.gradients, self.axis, training)
        self.optimizer = optimizer or EagerOptimizer(
            parameter_groups(training, model, work.names), training.warmup_steps
        )
        self.lift = ClientVmap(self.axis, str(self.objective))
        self.run_step, self.reused, self.padding = run_step, reused, padding
        self.trainable, self.moments = work.stacked()
        # The owners of shared tensors may change or free them, so a trainer that is used again has its own copies.
        self.fixed = [(_cloned(value), dims) for value, dims in work.fixed] if reused else work.fixed
        self._begin(work)

    def _begin(self, work: PhaseWork) -> None:
        self.present = work.axis  # the clients of this work; the block may have room for more
        self.anchor, self.initial_steps = work.anchor, work.initial_steps
        self.finished: list[
            tuple[int, list[torch.Tensor]]
        ] = []  # (first client, parameters and moments of some clients)
        self.first_finished = self.axis.count
        self.optimizer.reset(work.objective.lr, self.initial_steps)
        if self.private is not None:
            self.private.begin(work.noise_sources)

    def reload(self, work: PhaseWork) -> None:
        """Start other work of the same shape in the same tensors, of as many clients or fewer."""
        self._begin(work)
        count = self.present.count
        own = [leading_clients(part, count)[0] for part in self.fixed]
        if fixed := list(leaves(own)):
            foreach_copy_(fixed, list(leaves([value for value, _ in work.fixed])))
        start = [work.start_params[0][name] for name in self.names]
        others = work.start_params[1:]
        same_start = all(all(map(operator.is_, [params[name] for name in self.names], start)) for params in others)
        if same_start and not any(work.moments):
            foreach_copy_(list(self.trainable.values()), start)  # broadcast to all clients
            if self.moments:
                foreach_zero_(list(leaves(self.moments)))
        else:
            own = [self.axis.leading(value, count) for value in leaves([self.trainable, self.moments])]
            foreach_copy_(own, list(leaves(list(work.stacked()))))

    def step(self, batch: Batch, active: int | None = None) -> torch.Tensor:
        """Take one step of the leading clients; the others have finished.

        Args:
            batch: Shape (client, example, ...), or (example, ...) for a single client.
            active: The number of clients that take the step; None for all in the batch. Those after them are computed
                as well, because a program for each number of clients would cost more. Their results do not change.

        Returns:
            The task's loss of each client that takes the step, before the step, of shape (client,).
        """
        count = len(batch.targets) if self.axis.many else 1
        active = count if active is None else active
        self._set_aside(active, count)
        variant = None
        if self.private is not None:
            trainable, values, dims, _ = self._arguments(batch)
            self.private.prepare(trainable, values, dims, active)  # outside the step, which may be captured
            variant = self.private.ghost
        losses = self.run_step(self._step, batch, variant)
        return losses if active == count else losses[:active]

    def _set_aside(self, active: int, count: int) -> None:
        """Copy the clients that have finished, from `active` to `count`, before steps change their tensors."""
        end = min(count, self.first_finished)
        if active < end:
            values = [value[active:end].clone() for value in leaves([self.trainable, self.moments])]
            self.finished.append((active, values))
            self.first_finished = active

    def _restore(self) -> None:
        """Copy the clients that were set aside back into the block."""
        for first, values in self.finished:
            whole = leaves([self.trainable, self.moments])
            parts = [value[first : first + len(saved)] for value, saved in zip(whole, values, strict=True)]
            foreach_copy_(parts, values)
        self.finished = []

    def _arguments(self, batch: Batch) -> tuple[Tensors, list[Any], list[Any], int]:
        """The arguments of a gradient estimator."""
        count = len(batch.targets) if self.axis.many else 1
        fixed = [leading_clients(part, count) if self.axis.many else part for part in self.fixed]
        values = [*(value for value, _ in fixed), batch.inputs, batch.targets, batch.mask]
        dims = [0, *(dims for _, dims in self.fixed), 0, 0, None if batch.mask is None else 0]
        return self._leading(self.trainable, count), values, dims, count

    def _step(self, batch: Batch) -> torch.Tensor:
        trainable, values, dims, count = self._arguments(batch)
        grads, task = self.gradients(trainable, values, dims, count)
        with torch.no_grad():
            if self.objective.corrects:
                grads = self.lift(self.objective.correct, dims[:1] + dims[2:5])(grads, *values[1:4])
            moments = {slot: self._leading(part, count) for slot, part in self.moments.items()}
            self.optimizer.step(trainable, grads, moments)
            if self.objective.moves:
                stepped = {name: trainable[name] for name in grads}
                moved = self.lift(self.objective.move, [0, *dims[2:5]])(stepped, *values[1:4])
                foreach_copy_(list(stepped.values()), [moved[name] for name in stepped])
        return task.detach() if self.axis.many else task.detach().unsqueeze(0)  # (client,)

    def params(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the trained parameters of each client, as views of the block's tensors."""
        self._restore()
        trained = self._leading(self.trainable, self.present.count)
        return self.present.views(tensors.clone_all(trained) if self.reused else trained)

    def deltas(self) -> PhaseDeltas:
        """Compute the deltas of all clients, without waiting for the GPU."""
        self._restore()
        sent = {name: self.trainable[name] for name in self.names if name in self.objective.plan.up}
        trainable = self._leading(sent, self.present.count)
        if not trainable:
            return PhaseDeltas(self.present.split(trainable), torch.zeros((), device=self.device), None)
        anchor, dims = self.anchor
        shared = dims is None or all(dims[name] is None for name in trainable)
        can_pack = shared and len({value.dtype for value in trainable.values()}) == 1
        if self.axis.many and can_pack and self.device.type in PACKED_DEVICES:
            return self._packed_deltas(trainable, anchor)
        delta = tensors.subtract(trainable, anchor)
        squares = None
        if self.axis.many and not self.run.drift:  # without drift the server needs only one norm per client
            squares = _squared_norms([value.reshape(len(value), -1) for value in delta.values()]).sum(0).unsqueeze(1)
        return PhaseDeltas(self.present.split(delta), tensors.max_abs(delta), squares)

    def _packed_deltas(self, trainable: Tensors, anchor: Tensors) -> PhaseDeltas:
        layout = layout_for(tuple(trainable), tuple(anchor[name].shape for name in trainable))
        rows = layout.pack(list(trainable.values())).sub_(
            layout.pack([anchor[name].unsqueeze(0) for name in trainable])
        )
        tables = list(layout.per_name(rows).values()) if self.run.drift else [rows]
        return PhaseDeltas(layout.per_client(rows), tensors.max_abs({"": rows}), _squared_norms(tables).T)

    def states(self, steps: Sequence[int]) -> list[dict[str, Tensors]]:
        """Return the optimizer state of each client by slot.

        Args:
            steps: The number of steps that each client took in this phase.
        """
        self._restore()
        count = self.present.count
        parts = {slot: self._leading(part, count) for slot, part in self.moments.items()}
        parts = {slot: tensors.clone_all(part) if self.reused else part for slot, part in parts.items()}
        per_client = {slot: self.present.split(part) for slot, part in parts.items()}
        states = [{slot: parts[rank] for slot, parts in per_client.items()} for rank in range(count)]
        if self.run.training.steps_by.uses_step_count:
            for state, taken in zip(states, steps, strict=True):
                state["age"] = {name: torch.tensor(count + taken) for name, count in self.initial_steps.items()}
        return states

    def _leading(self, stacked: Tensors, count: int) -> Tensors:
        return {name: self.axis.leading(value, count) for name, value in stacked.items()}


def step_estimator(work: PhaseWork, lift: Lift | None = None) -> GradientEstimator:
    """Return the gradients of plain training, or of DP-SGD if the work has its settings.

    Args:
        work: The phase and where it starts.
        lift: Turns the loss of one client into that of a block, without privacy; None for `torch.vmap`.
    """
    if work.dp_settings is None:
        return step_gradients(work.objective, work.axis, lift)
    return PrivateGradients(work.objective, work.axis, work.dp_settings, work.noise_sources)


def _squared_norms(tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared norms of tables (client, element) as (table, client)."""
    return torch.stack([torch.linalg.vector_norm(table, dim=1, dtype=torch.float64) for table in tables]).square()


def leaves(part: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested dicts and lists, sorted by name: dicts from a file can have any order."""
    if isinstance(part, torch.Tensor):
        yield part
        return
    for value in [part[name] for name in sorted(part)] if isinstance(part, Mapping) else part:
        yield from leaves(value)


def _cloned(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {name: _cloned(value) for name, value in part.items()}
    return part.clone()
