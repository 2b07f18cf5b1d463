"""Steps compiled, and recorded once on a GPU and replayed as one program, so that a round is not a wait for Python.

A recording reads and writes fixed places in memory. So a block that was recorded is kept, and the next clients whose
work has the same shape are copied into its places.
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
from partita.training.dp_sgd import NoiseSource
from partita.training.phase_trainer import PhaseTrainer, VmapError, translate_errors

WARMUP_STEPS = (
    2  # steps of one shape are taken plainly before the next is recorded: kernels are chosen in the first ones
)
MAX_CACHED = (
    16  # blocks with their graphs, each with a copy of what its clients share; the one unused for longest makes room
)
SMALL_MODEL = (
    2**26
)  # numbers of all clients of a block together, up to which launching kernels costs more than computing
MAX_PROGRAMS = 8 * MAX_CACHED  # of all blocks together, which torch would stop at 8

Replay = tuple[Callable[[], None], Tensor]  # plays the recorded work anew, and where its result lies
Recorder = Callable[[Callable[[], Tensor]], Replay]


class GraphError(ValueError):
    """Work that cannot be recorded, or not compiled."""


class GraphCache:
    """Makes blocks, or hands out again those that it made: `learn` takes it in the place of `Block`.

    What depends on chance in each step, as privacy does, is neither recorded nor compiled.
    """

    def __init__(self, recorder: Recorder | None, strict: bool = True, compile: bool = False) -> None:
        self.recorder, self.compile = recorder, compile
        self.strict = strict  # whether what cannot be recorded is an error, or is said once and then taken plainly
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
        if self.recorder is None:
            return None
        try:
            return self.recorder(work)
        except (RuntimeError, VmapError) as error:  # the latter of the former, in what vmap has lifted twice before
            text = f"steps of {what} cannot be recorded: {str(error.__cause__ or error).splitlines()[0]}"
            if self.strict:
                raise GraphError(f"{text}; set engine.cuda_graphs = false") from error
            warnings.warn(f"{text}; they are taken one by one, which is slower", stacklevel=2)
            return None


class CudaRecorder:
    """CUDA graphs. They share their working memory, since only what lies outside of it outlives a replay."""

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
    """An old graph that is collected as garbage in the middle of a recording would break it."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class GraphedPhaseTrainer(PhaseTrainer):
    """A block whose learning rate and ages are tensors as well, so that all that changes has its place in memory."""

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
        """Not before it is clear whether another block has places for it."""

    def shape(self, start_params: Tensors) -> Hashable:
        """Blocks of which this is equal can take each other's places."""
        local = self.run.method.client_rules
        # A rule may look at the rate, which is then a number that was recorded.
        rate = self.lr if local else None
        layout = _layout({name: start_params[name] for name in self.names}), *map(_layout, self.shared)
        return id(self.model), self.plan, self.phase, tuple(map(id, local)), self.run.training, rate, self.count, layout

    def allocate(self, start_params: Sequence[Tensors], moments: Sequence[Slots]) -> None:
        """Have places of its own, also for what clients share, which others may change or drop."""
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
        """Become the other, in the places of this one."""
        self.lr, self.initial_steps, self.steps, self.anchor = other.lr, other.initial_steps, 0, other.anchor
        self.rate.fill_(self.lr)
        self._reset_step_counts()
        if shared := list(_leaves([value for value, _ in self.shared])):
            torch._foreach_copy_(shared, list(_leaves([value for value, _ in other.shared])))
        start = [start_params[0][name] for name in self.names]
        alike = all(all(map(operator.is_, [each[name] for name in self.names], start)) for each in start_params[1:])
        if alike and not any(moments):
            torch._foreach_copy_(list(self.trainable.values()), start)  # the same for each client
            if self.moments:
                torch._foreach_zero_(self.slots)
        else:
            mine = self.trainable, self.moments
            super().load(start_params, moments)
            torch._foreach_copy_(list(_leaves(list(mine))), list(_leaves([self.trainable, self.moments])))
            self.trainable, self.moments = mine

    def _reset_step_counts(self) -> None:
        """Where all are of one age, as they mostly are, nothing is copied: a copy may wait for what the GPU is at."""
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
        found = self.replays[shape]
        if found is None:
            return super().step(batch)
        held, (replay, losses) = found
        torch._foreach_copy_(list(_tensors(held)), list(_tensors(batch)))
        replay()
        return losses.clone()

    def params(self) -> list[Mapping[str, Tensor]]:
        return self._client_views(tensors.clone_all(self.trainable))

    def states(self, steps: Sequence[int]) -> list[dict[str, Tensors]]:
        mine, self.moments = self.moments, {slot: tensors.clone_all(part) for slot, part in self.moments.items()}
        states = super().states(steps)
        self.moments = mine
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
    """One program for most shapes: but one client, one example and a mask have each their own. Combined: kernels that
    do not need each other are put into one.
    """
    from torch import _dynamo  # takes a second

    def straight(trainable: Tensors, *rest: Any) -> Any:
        # Of what was flat for a moment the gradient lies in order, as the optimizer wants it. The compiler sees to that
        # at no cost; a copy for each name afterwards took a twelfth of a large model's step.
        return function({name: value.flatten().view(value.shape) for name, value in trainable.items()}, *rest)

    program = torch.compile(straight, fullgraph=True, options={"combo_kernels": True} if combined else None)

    def call(*parts: Any) -> Any:
        try:
            with _dynamo.config.patch(recompile_limit=MAX_PROGRAMS):
                return program(*parts)
        except _dynamo.exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"its clients' plans and batches would need more than {MAX_PROGRAMS} programs"
            ) from error

    return call


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from batch.inputs.values()
    yield batch.targets
    if batch.mask is not None:
        yield batch.mask


def _leaves(part: Any) -> Iterator[Tensor]:
    """The tensors of nested dicts and lists, by name: what comes from a file may come in any order."""
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
    """Names, shapes and types of nested dicts, and which values each client has for itself."""
    if isinstance(part, Tensor):
        return part.shape, part.dtype
    if isinstance(part, Mapping):
        return tuple([(name, _layout(part[name])) for name in sorted(part)])
    return tuple(map(_layout, part)) if isinstance(part, tuple) else part
