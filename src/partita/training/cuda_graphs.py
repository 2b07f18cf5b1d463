"""Training steps as CUDA graphs, optionally compiled, so that small models do not wait for Python.

A CUDA graph reads and writes fixed memory addresses. So a trainer whose steps were captured is cached, and the data of
later clients with work of the same shape is copied into its tensors.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from partita.core import tensors
from partita.core.data import Batch
from partita.core.model import Forward, logits_and_losses
from partita.core.tensors import Slots, Tensors
from partita.core.torch_private import foreach_copy_
from partita.training.batch_shapes import BatchPadding
from partita.training.captured_forward import CapturedForward
from partita.training.client_axis import VmapError
from partita.training.compilation import SMALL_MODEL, CompiledGradients, CompiledLayers, CompiledVmap, CompileError
from partita.training.cuda_capture import Recorder, Replay
from partita.training.gradients import GradientEstimator
from partita.training.parameter_groups import ParameterGroup, parameter_groups, split_by_group
from partita.training.phase_trainer import PhaseTrainer, Step, run_eagerly, step_estimator
from partita.training.phase_work import PhaseWork

WARMUP_STEPS = 2  # eager steps of one shape before a capture: torch selects kernels in the first steps
MAX_CACHED = 16  # cached blocks with their graphs, each with a copy of the shared tensors; least recently used go first
PARTS = 4  # sizes of padded batches up to the full size
POISSON_SIZES = 8  # sizes of padded Poisson batches up to the expected size


class GraphError(ValueError):
    """Work cannot be captured in a CUDA graph."""


class GraphCache:
    """Creates trainers with CUDA graphs and reuses them; pass it to `train_clients` in place of `PhaseTrainer`.

    Steps of DP-SGD are captured too, without the draw of their noise (`StepNoise`). They are not compiled.

    Args:
        recorder: Captures work, usually a `CudaRecorder`; None for compilation only.
        strict: Whether work that cannot be captured is an error. If False, a warning is issued and the steps run
            eagerly.
        compile: Whether to compile the forward pass with `torch.compile`.
        strict_compile: Whether a failure of the compiler is an error. If False, a warning is issued and nothing more is
            compiled.
    """

    def __init__(
        self, recorder: Recorder | None, strict: bool = True, compile: bool = False, strict_compile: bool = True
    ) -> None:
        self.recorder, self.compile = recorder, compile
        self.strict, self.strict_compile = strict, strict_compile
        self.known: OrderedDict[Hashable, PhaseTrainer] = OrderedDict()
        self.forward: Forward = CapturedForward(self.record) if recorder else logits_and_losses

    def __call__(self, work: PhaseWork) -> PhaseTrainer:
        """Return a trainer for the work: a new one, or a cached one with the work's data.

        A trainer also serves fewer clients: the graphs for its leading clients are the same.
        """
        shape = _shape(work)
        known = self.known.pop(shape, None)
        if known is not None and known.axis.count >= work.axis.count:
            self.known[shape] = known
            known.reload(work)
            return known
        self.known[shape] = trainer = self._trainer(work)
        if len(self.known) > MAX_CACHED:
            self.known.popitem(last=False)
        return trainer

    def _gradients(self, work: PhaseWork) -> GradientEstimator:
        plain = step_estimator(work)
        if not self.compile or work.dp_settings is not None:
            return plain
        size = work.axis.count * sum(work.start_params[0][name].numel() for name in work.names)
        combine = size < SMALL_MODEL and work.device.type == "cuda"
        kind = CompiledLayers if work.objective.model.compiles_by_layer() else CompiledVmap
        compiled = step_estimator(work, kind(work.axis, combine))
        on_failure = None if self.strict_compile else self._stop_compiling
        return CompiledGradients(compiled, plain, str(work.objective), on_failure)

    def _stop_compiling(self, error: CompileError) -> None:
        if self.compile:
            warnings.warn(f"{error}; steps are not compiled but run eagerly, which is slower", stacklevel=2)
        self.compile = False

    def _trainer(self, work: PhaseWork) -> PhaseTrainer:
        objective = work.objective
        what = str(objective)
        return PhaseTrainer(
            work,
            self._gradients(work),
            CapturableOptimizer(
                parameter_groups(work.run.training, objective.model, work.names),
                work.names,
                work.device,
                work.run.training.warmup_steps,
            ),
            GraphedSteps(lambda step: self.record(step, f"steps of {what}")) if self.recorder else run_eagerly,
            reused=True,
            padding=_padding(work) if self.recorder else None,
        )

    def __str__(self) -> str:
        return " and ".join(["recorded"] * bool(self.recorder) + ["compiled"] * self.compile)

    def record(self, work: Callable[[], Any], what: str) -> tuple[Callable[[], None], Any] | None:
        """Capture work; return None if it must run eagerly.

        Args:
            work: The work. It may use only tensors that stay at the same addresses.
            what: What the work is, for messages.

        Raises:
            GraphError: If the work cannot be captured and the cache is strict.
        """
        if self.recorder is None:
            return None
        try:
            return self.recorder(work)
        except (RuntimeError, VmapError, CompileError) as error:  # the last two are RuntimeErrors, re-raised
            text = f"{what} cannot be captured in a CUDA graph: {str(error.__cause__ or error).splitlines()[0]}"
            if self.strict:
                raise GraphError(f"{text}; set engine.cuda_graphs = false") from error
            warnings.warn(f"{text}; they run eagerly, which is slower", stacklevel=2)
            return None


class GraphedSteps:
    """Runs the steps of one trainer: eagerly at first, then by replaying captured graphs, one per shape of batch.

    Args:
        record: Captures work; returns None if it must run eagerly.
    """

    def __init__(self, record: Callable[[Callable[[], torch.Tensor]], Replay | None]) -> None:
        self.record = record
        self.held: dict[Hashable, Batch] = {}  # the batches that captured steps read
        self.replays: dict[Hashable, Replay | None] = {}
        self.taken = Counter[Hashable]()

    def __call__(self, step: Step, batch: Batch, variant: Hashable) -> torch.Tensor:
        shape = _layout(batch.inputs), tuple(batch.targets.shape), batch.mask is None, variant
        self.taken[shape] += 1
        if self.taken[shape] < WARMUP_STEPS or self.replays.get(shape, ()) is None:
            return step(batch)
        held = self._hold(shape, batch)
        if self.taken[shape] == WARMUP_STEPS:
            # With the tensors of the capture: the compiler makes another program where strides differ, and cannot
            # make it during a capture.
            return step(held)
        if shape not in self.replays:
            self.replays[shape] = self.record(lambda: step(held))
        captured = self.replays[shape]
        if captured is None:
            del self.held[shape]
            return step(batch)
        replay, losses = captured
        replay()
        return losses.clone()

    def _hold(self, shape: Hashable, batch: Batch) -> Batch:
        """Return the batch in the tensors of its shape."""
        if shape in self.held:
            held = self.held[shape]
            foreach_copy_(list(_tensors(held)), list(_tensors(batch)))
            return held
        mask = None if batch.mask is None else batch.mask.clone()
        self.held[shape] = Batch(tensors.clone_all(batch.inputs), batch.targets.clone(), mask)
        return self.held[shape]


class CapturableOptimizer:
    """Optimizer steps that a CUDA graph can replay: learning rate and step counts are tensors with fixed addresses.

    Args:
        groups: The parameters, by how they are stepped.
        names: All names of the groups.
        device: The device.
        warmup_steps: `Training.warmup_steps`.
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], names: Sequence[str], device: torch.device, warmup_steps: int = 0
    ) -> None:
        self.groups, self.names, self.warmup_steps = groups, names, warmup_steps
        self.lr = torch.empty((), device=device)
        self.lr_factors = torch.tensor([group.lr_factor for group in groups], device=device)
        self.rates = torch.empty(len(groups), device=device)  # of the current step
        self.taken = torch.empty((), device=device)
        self.buffer = torch.empty(len(names), device=device)
        self.step_counts = dict(zip(names, self.buffer.unbind(), strict=True))

    def reset(self, lr: float, initial_steps: Mapping[str, int]) -> None:
        self.lr.fill_(lr)
        self.taken.zero_()
        counts = [float(initial_steps[name]) for name in self.names]
        if len({*counts}) == 1:  # as usual; a copy may wait for the GPU
            self.buffer.fill_(counts[0])
        else:
            self.buffer.copy_(torch.tensor(counts), non_blocking=True)

    def step(self, trainable: Tensors, grads: Tensors, moments: Slots) -> None:
        self.buffer.add_(1)
        self.taken.add_(1)
        warm = self.lr * (self.taken / (self.warmup_steps + 1)).clamp(max=1.0) if self.warmup_steps else self.lr
        rates = torch.mul(self.lr_factors, warm, out=self.rates).unbind()
        for group, own, rate in zip(self.groups, split_by_group(self.groups, grads), rates, strict=True):
            if own:
                group.optimizer.capturable_step(trainable, own, moments, rate, self.step_counts)


def _tensors(batch: Batch) -> Iterator[torch.Tensor]:
    yield from batch.inputs.values()
    yield batch.targets
    if batch.mask is not None:
        yield batch.mask


def _padding(work: PhaseWork) -> BatchPadding:
    """How to pad batches, so that few graphs serve all steps. Poisson batches have many sizes, some above the full."""
    training = work.run.training
    if work.dp_settings is not None and work.dp_settings.sampling == "poisson":
        return BatchPadding(max(1, training.batch_size // POISSON_SIZES), None)
    return BatchPadding(-(-training.examples_per_step // PARTS), training.examples_per_step)


def _shape(work: PhaseWork) -> Hashable:
    """Return a key that is equal for work that can use the same tensors and graphs."""
    objective, rules = work.objective, work.run.method.client_rules
    # A rule may read `lr`, which is then a constant in the captured graph.
    lr = objective.lr if rules else None
    layout = (
        _layout({name: work.start_params[0][name] for name in work.names}),
        *(_layout(*part) for part in work.fixed),
    )
    settings = id(objective.model), objective.plan, work.phase, tuple(map(id, rules)), work.run.training, lr
    return settings, work.dp_settings, work.axis.many, layout


def _layout(part: Any, dims: Any = None) -> Hashable:
    """Names, shapes and types of nested dicts of tensors, for one client, and which of them have a client dimension.

    Args:
        part: The tensors.
        dims: Their client dimension, as `in_dims` of `torch.vmap`.
    """
    if isinstance(part, torch.Tensor):
        return part.shape if dims is None else part.shape[1:], part.dtype, dims
    within = {name: dims[name] if isinstance(dims, Mapping) else dims for name in part}
    return tuple([(name, _layout(part[name], within[name])) for name in sorted(part)])
