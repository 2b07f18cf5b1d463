"""Training steps as CUDA graphs, optionally compiled, so that small models do not wait for Python.

A CUDA graph reads and writes fixed memory addresses. So a trainer whose steps were captured is cached, and the data of
later clients with work of the same shape is copied into its tensors.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from partita.core import tensors
from partita.core.data import Batch
from partita.core.tensors import Slots, Tensors
from partita.core.torch_private import foreach_copy_
from partita.training.batch_shapes import BatchPadding
from partita.training.client_axis import VmapError
from partita.training.compilation import SMALL_MODEL, CompiledLayers, CompiledVmap
from partita.training.gradients import Lift
from partita.training.parameter_groups import ParameterGroup, parameter_groups, split_by_group
from partita.training.phase_trainer import PhaseTrainer, Step, step_estimator
from partita.training.phase_work import PhaseWork

WARMUP_STEPS = 2  # eager steps of one shape before a capture: torch selects kernels in the first steps
MAX_CACHED = 16  # cached blocks with their graphs, each with a copy of the shared tensors; least recently used go first
PARTS = 4  # sizes of padded batches up to the full size
POISSON_SIZES = 8  # sizes of padded Poisson batches up to the expected size

Replay = tuple[Callable[[], None], Tensor]  # a function that replays the captured work, and the tensor of its result
Recorder = Callable[[Callable[[], Tensor]], Replay]


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
    """

    def __init__(self, recorder: Recorder | None, strict: bool = True, compile: bool = False) -> None:
        self.recorder, self.compile = recorder, compile
        self.strict = strict
        self.known: OrderedDict[Hashable, PhaseTrainer] = OrderedDict()

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

    def _trainer(self, work: PhaseWork) -> PhaseTrainer:
        objective = work.objective
        what = str(objective)
        lift: Lift | None = None
        if self.compile and work.dp_settings is None:
            size = work.axis.count * sum(work.start_params[0][name].numel() for name in work.names)
            combine = size < SMALL_MODEL and work.device.type == "cuda"
            kind = CompiledLayers if objective.model.compiles_by_layer() else CompiledVmap
            lift = kind(work.axis, what, combine)
        return PhaseTrainer(
            work,
            step_estimator(work, lift),
            CapturableOptimizer(
                parameter_groups(work.run.training, objective.model, work.names),
                work.names,
                work.device,
                work.run.training.warmup_steps,
            ),
            GraphedSteps(lambda step: self.record(step, what)),
            reused=True,
            padding=_padding(work) if self.recorder else None,
        )

    def __str__(self) -> str:
        return " and ".join(["recorded"] * bool(self.recorder) + ["compiled"] * self.compile)

    def record(self, work: Callable[[], Tensor], what: str) -> Replay | None:
        """Capture work; return None if it must run eagerly.

        Args:
            work: The work. It may use only tensors that stay at the same addresses.
            what: The model and method, for messages.

        Raises:
            GraphError: If the work cannot be captured and the cache is strict.
        """
        if self.recorder is None:
            return None
        try:
            return self.recorder(work)
        except (RuntimeError, VmapError) as error:  # a VmapError is a RuntimeError from vmapped code, re-raised
            text = (
                f"steps of {what} cannot be captured in a CUDA graph: {str(error.__cause__ or error).splitlines()[0]}"
            )
            if self.strict:
                raise GraphError(f"{text}; set engine.cuda_graphs = false") from error
            warnings.warn(f"{text}; they run eagerly, which is slower", stacklevel=2)
            return None


class CudaRecorder:
    """Captures CUDA graphs. They share one memory pool: only tensors outside the pool must survive a replay."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _no_garbage(), torch.cuda.graph(graph, pool=self.pool):
            result = work()
        return graph.replay, result


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection: collecting an old graph during a capture would break the capture."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class GraphedSteps:
    """Runs the steps of one trainer: eagerly at first, then by replaying captured graphs, one per shape of batch.

    Args:
        record: Captures work; returns None if it must run eagerly.
    """

    def __init__(self, record: Callable[[Callable[[], Tensor]], Replay | None]) -> None:
        self.record = record
        self.replays: dict[Hashable, tuple[Batch, Replay] | None] = {}
        self.taken = Counter[Hashable]()

    def __call__(self, step: Step, batch: Batch, variant: Hashable) -> Tensor:
        shape = _layout(batch.inputs), tuple(batch.targets.shape), batch.mask is None, variant
        if shape not in self.replays:
            self.taken[shape] += 1
            if self.taken[shape] <= WARMUP_STEPS:
                return step(batch)
            self.replays[shape] = self._capture(step, batch)
        captured = self.replays[shape]
        if captured is None:
            return step(batch)
        held, (replay, losses) = captured
        foreach_copy_(list(_tensors(held)), list(_tensors(batch)))
        replay()
        return losses.clone()

    def _capture(self, step: Step, batch: Batch) -> tuple[Batch, Replay] | None:
        mask = None if batch.mask is None else batch.mask.clone()
        held = Batch(tensors.clone_all(batch.inputs), batch.targets.clone(), mask)
        replay = self.record(lambda: step(held))
        return None if replay is None else (held, replay)


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


def _tensors(batch: Batch) -> Iterator[Tensor]:
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
    if isinstance(part, Tensor):
        return part.shape if dims is None else part.shape[1:], part.dtype, dims
    within = {name: dims[name] if isinstance(dims, Mapping) else dims for name in part}
    return tuple([(name, _layout(part[name], within[name])) for name in sorted(part)])
