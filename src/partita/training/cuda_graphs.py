"""Training steps as CUDA graphs, optionally compiled, so that small models do not wait for Python.

A CUDA graph reads and writes fixed memory addresses. So a block whose steps were captured is cached, and the data of
later clients with work of the same shape is copied into its buffers.
"""

from __future__ import annotations

import gc
import operator
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from partita.core import tensors
from partita.core.data import Batch
from partita.core.dp_settings import DPSGDSettings
from partita.core.method import Context
from partita.core.plan import Phase
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.core.torch_private import RecompileLimitError, foreach_copy_, foreach_zero_, limit_recompiles
from partita.training.dp_sgd import NoiseSource
from partita.training.phase_trainer import PhaseTrainer, VmapError, translate_errors

WARMUP_STEPS = 2  # eager steps of one shape before a capture: torch selects kernels in the first steps
MAX_CACHED = 16  # cached blocks with their graphs, each with a copy of the shared tensors; least recently used go first
SMALL_MODEL = 2**26  # parameters of a whole block, up to which launching kernels costs more than computing
MAX_PROGRAMS = 8 * MAX_CACHED  # compiled programs of all blocks together; torch's own limit is 8

Replay = tuple[Callable[[], None], Tensor]  # a function that replays the captured work, and the tensor of its result
Recorder = Callable[[Callable[[], Tensor]], Replay]


class GraphError(ValueError):
    """Work cannot be captured in a CUDA graph or cannot be compiled."""


class GraphCache:
    """Creates trainers with CUDA graphs and reuses them; pass it to `train_clients` in place of `PhaseTrainer`.

    Training with DP-SGD draws new random numbers in each step, so it is neither captured nor compiled.

    Args:
        recorder: Captures work, usually a `CudaRecorder`; None for compilation only.
        strict: Whether work that cannot be captured is an error. If False, a warning is issued and the steps run
            eagerly.
        compile: Whether to compile the forward pass with `torch.compile`.
    """

    def __init__(self, recorder: Recorder | None, strict: bool = True, compile: bool = False) -> None:
        self.recorder, self.compile = recorder, compile
        self.strict = strict
        self.known: OrderedDict[Hashable, GraphedPhaseTrainer] = OrderedDict()

    def __call__(
        self,
        run: Run,
        phase: Phase,
        contexts: Sequence[Context],
        start_params: Sequence[Tensors],
        moments: Sequence[Slots],
        dp_settings: DPSGDSettings | None = None,
        noise_sources: Sequence[NoiseSource] = (),
    ) -> PhaseTrainer:
        if dp_settings is not None:
            return PhaseTrainer(run, phase, contexts, start_params, moments, dp_settings, noise_sources)
        block = GraphedPhaseTrainer(self, run, phase, contexts, start_params, moments)
        shape = block.shape(start_params[0])
        if shape in self.known:
            self.known.move_to_end(shape)
            self.known[shape].reload(block, start_params, moments)
            return self.known[shape]
        block.allocate(start_params, moments)
        self.known[shape] = block
        if len(self.known) > MAX_CACHED:
            self.known.popitem(last=False)
        return block

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


class GraphedPhaseTrainer(PhaseTrainer):
    """A PhaseTrainer that a CUDA graph can replay: everything that changes is in a tensor with a fixed address.

    This includes the learning rate and the step counts.
    """

    def __init__(
        self,
        graphs: GraphCache,
        run: Run,
        phase: Phase,
        contexts: Sequence[Context],
        start_params: Sequence[Tensors],
        moments: Sequence[Slots],
    ) -> None:
        super().__init__(run, phase, contexts, start_params, moments)
        self.graphs, self.phase = graphs, phase

    def load(self, start_params: Sequence[Tensors], moments: Sequence[Slots]) -> None:
        """Do nothing yet: the cache decides between `allocate` and reusing another trainer's buffers."""

    def shape(self, start_params: Tensors) -> Hashable:
        """Return a key that is equal for trainers that can reuse each other's buffers and graphs."""
        rules = self.run.method.client_rules
        # A rule may read `lr`, which is then a constant in the captured graph.
        rate = self.lr if rules else None
        layout = _layout({name: start_params[name] for name in self.names}), *map(_layout, self.shared)
        return id(self.model), self.plan, self.phase, tuple(map(id, rules)), self.run.training, rate, self.count, layout

    def allocate(self, start_params: Sequence[Tensors], moments: Sequence[Slots]) -> None:
        """Allocate buffers, also for tensors that clients share, because their owners may change or free them."""
        super().load(start_params, moments)
        self.slots = list(_leaves(self.moments))
        self.shared = [(_cloned(value), dims) for value, dims in self.shared]
        self.rate = torch.tensor(self.lr, device=self.device)
        self.step_count_buffer = torch.empty(len(self.names), device=self.device)
        self._reset_step_counts()
        self.step_counts = dict(zip(self.names, self.step_count_buffer.unbind(), strict=True))
        self.replays: dict[Hashable, tuple[Batch, Replay] | None] = {}
        self.taken = Counter[Hashable]()
        self.compiled: dict[Hashable, Callable[..., Any]] = {}

    def reload(self, other: GraphedPhaseTrainer, start_params: Sequence[Tensors], moments: Sequence[Slots]) -> None:
        """Copy another trainer's data into the buffers of this one."""
        self.lr, self.initial_steps, self.steps, self.anchor = other.lr, other.initial_steps, 0, other.anchor
        self.rate.fill_(self.lr)
        self._reset_step_counts()
        if shared := list(_leaves([value for value, _ in self.shared])):
            foreach_copy_(shared, list(_leaves([value for value, _ in other.shared])))
        start = [start_params[0][name] for name in self.names]
        others = start_params[1:]
        same_start = all(all(map(operator.is_, [params[name] for name in self.names], start)) for params in others)
        if same_start and not any(moments):
            foreach_copy_(list(self.trainable.values()), start)  # broadcast to all clients
            if self.moments:
                foreach_zero_(self.slots)
        else:
            buffers = self.trainable, self.moments
            super().load(start_params, moments)
            foreach_copy_(list(_leaves(list(buffers))), list(_leaves([self.trainable, self.moments])))
            self.trainable, self.moments = buffers

    def _reset_step_counts(self) -> None:
        """If all counts are equal, as usual, fill instead of copying: a copy may wait for the GPU."""
        initial_steps = [float(self.initial_steps[name]) for name in self.names]
        if len({*initial_steps}) == 1:
            self.step_count_buffer.fill_(initial_steps[0])
        else:
            self.step_count_buffer.copy_(torch.tensor(initial_steps), non_blocking=True)

    def step(self, batch: Batch) -> Tensor:
        shape = _layout(batch.inputs), tuple(batch.targets.shape), batch.mask is None
        if shape not in self.replays:
            self.taken[shape] += 1
            if self.taken[shape] <= WARMUP_STEPS:
                return super().step(batch)
            self.replays[shape] = self._record(batch)
        captured = self.replays[shape]
        if captured is None:
            return super().step(batch)
        held, (replay, losses) = captured
        foreach_copy_(list(_tensors(held)), list(_tensors(batch)))
        replay()
        return losses.clone()

    def params(self) -> list[Mapping[str, Tensor]]:
        return self._client_views(tensors.clone_all(self.trainable))

    def states(self, steps: Sequence[int]) -> list[dict[str, Tensors]]:
        buffers, self.moments = self.moments, {slot: tensors.clone_all(part) for slot, part in self.moments.items()}
        states = super().states(steps)
        self.moments = buffers
        return states

    def _record(self, batch: Batch) -> tuple[Batch, Replay] | None:
        mask = None if batch.mask is None else batch.mask.clone()
        held = Batch(tensors.clone_all(batch.inputs), batch.targets.clone(), mask)
        what = f"{self.model.name} with {self.run.method.name}"
        replay = self.graphs.record(lambda: PhaseTrainer.step(self, held), what)
        return None if replay is None else (held, replay)

    def _vmap(self, function: Callable[..., Any], dims: list[Any]) -> Callable[..., Any]:
        if not self.graphs.compile or function != self._objective:
            return super()._vmap(function, dims)
        masked = dims[-1] is not None
        if masked not in self.compiled:
            whole = torch.vmap(function, in_dims=tuple(dims)) if self.many else function
            small = sum(value.numel() for value in self.trainable.values()) < SMALL_MODEL
            self.compiled[masked] = translate_errors(
                _compiled(whole, small and self.device.type == "cuda"), self._compile_error
            )
        return self.compiled[masked]

    def _compile_error(self, error: RuntimeError) -> GraphError:
        what = f"{self.model.name} with {self.run.method.name}"
        return GraphError(f"{what} cannot be compiled: {str(error).splitlines()[0]}; set engine.compile = false")

    def _optimizer_step(self, trainable: Tensors, grads: Tensors, moments: Slots) -> None:
        self.step_count_buffer.add_(1)
        self.run.training.optimizer.capturable_step(trainable, grads, moments, self.rate, self.step_counts)


def _compiled(function: Callable[..., Any], combined: bool) -> Callable[..., Any]:
    """Compile a function. One program serves most shapes, except for one client, one example, or a mask.

    With `combined`, independent kernels are merged into one.
    """

    def contiguous_gradients(trainable: Tensors, *rest: Any) -> Any:
        # Flattening makes each gradient contiguous, as the optimizer requires. The compiler does this at no cost; a
        # copy per name afterwards took a twelfth of a large model's step.
        return function({name: value.flatten().view(value.shape) for name, value in trainable.items()}, *rest)

    options: dict[str, Any] | None = {"combo_kernels": True} if combined else None
    program = torch.compile(contiguous_gradients, fullgraph=True, options=options)

    def call(*parts: Any) -> Any:
        try:
            with limit_recompiles(MAX_PROGRAMS):
                return program(*parts)
        except RecompileLimitError as error:
            raise RuntimeError(
                f"its clients' plans and batches need more than {MAX_PROGRAMS} compiled programs"
            ) from error

    return call


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from batch.inputs.values()
    yield batch.targets
    if batch.mask is not None:
        yield batch.mask


def _leaves(part: Any) -> Iterator[Tensor]:
    """The tensors of nested dicts and lists, sorted by name: dicts from a file can have any order."""
    if isinstance(part, Tensor):
        yield part
        return
    for value in [part[name] for name in sorted(part)] if isinstance(part, Mapping) else part:
        yield from _leaves(value)


def _cloned(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {name: _cloned(value) for name, value in part.items()}
    return part.clone()


def _layout(part: Any) -> Hashable:
    """Names, shapes and types of nested dicts and tuples, with the vmap dimensions of their values."""
    if isinstance(part, Tensor):
        return part.shape, part.dtype
    if isinstance(part, Mapping):
        return tuple([(name, _layout(part[name])) for name in sorted(part)])
    return tuple(map(_layout, part)) if isinstance(part, tuple) else part
