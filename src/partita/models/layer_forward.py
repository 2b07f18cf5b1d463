"""How a layer of a model runs: as it is, compiled on its own, or with its activations recomputed in the backward pass.

A layer that is compiled or recomputed runs outside `torch.vmap`, as a function of the stacked parameters and states of
all clients. One program serves all layers that are alike, and checkpoints work as without `vmap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from partita.core.layer_compiler import layer_compiler
from partita.core.outside_vmap import outside_vmap, under_vmap
from partita.core.tensors import Tensors
from partita.core.torch_private import is_gradtrackingtensor, own_parameters
from partita.models import ModelError
from partita.models.dropout import DropoutDraws, functional_dropout
from partita.models.vmap_layers import is_layer


@dataclass(frozen=True, eq=False)
class LayerForward:
    """The forward method of a layer.

    Attributes:
        layer: The layer.
        draws: What the dropout of the model draws from; None if it has none.
        recomputes: Whether to drop the activations and recompute them in the backward pass.
    """

    layer: torch.nn.Module
    draws: DropoutDraws | None
    recomputes: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the whole model
            return _plain(self.layer, args, kwargs)
        compiler, recomputes = layer_compiler(), self.recomputes and torch.is_grad_enabled()
        if compiler is None and not recomputes:
            return _plain(self.layer, args, kwargs)
        params = {
            path: value for path, value in self.layer.named_parameters() if not isinstance(value, torch.nn.Parameter)
        }  # those that the model has installed; frozen ones stay where they are
        seeds = None if self.draws is None else self.draws.seeds
        given = params, seeds, args, kwargs
        values = list(_tensors(given))
        if any(map(is_gradtrackingtensor, values)):
            raise ModelError(
                "a layer cannot be recomputed or compiled under torch.func.grad, which example-level privacy uses; "
                "turn off example-level privacy, or set model.checkpointing = false"
            )
        run = _Run(self.layer, self.draws, given, compiler)
        if not under_vmap(values):
            return run(values, None, recomputes)
        return run.structured(outside_vmap(lambda values, dims: run.tensors(values, dims, recomputes), values))


class _Run:
    """One run of a layer, which the backward pass may repeat.

    Args:
        layer: The layer.
        draws: What its dropout draws from.
        given: Its parameters, seeds and arguments. Only the structure is used.
        compiler: Compiles the layer; None to run it as it is.
    """

    def __init__(self, layer: torch.nn.Module, draws: DropoutDraws | None, given: Any, compiler: Any) -> None:
        self.layer, self.draws, self.given = layer, draws, given
        self.names: dict[int | str, str] = {}
        if compiler is not None and draws is not None and draws.seeds is not None:
            for path, part in layer.named_modules():
                if hasattr(part, "place"):
                    part.name_in_layer = path
                    self.names[part.place] = path
        self.in_layer = compiler is not None
        self.calls = {} if draws is None else self._calls(draws.calls)
        self.compiler = compiler
        self.structure: Any = None

    def _calls(self, calls: Mapping[int | str, int]) -> dict[int | str, int]:
        """The draws so far, of all places or by name in the layer."""
        if not self.in_layer:
            return dict(calls)
        return {name: calls[place] for place, name in self.names.items() if place in calls}

    def __call__(self, values: Sequence[torch.Tensor], dims: Any, recomputes: bool) -> Any:
        return self.structured(self.tensors(values, dims, recomputes))

    def structured(self, tensors: Sequence[torch.Tensor]) -> Any:
        return _with_tensors(self.structure, iter(tensors))

    def tensors(self, values: Sequence[torch.Tensor], dims: Any, recomputes: bool) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the layer's output, with the client dimension first if there is one."""
        in_dims = None if dims is None else _with_tensors(self.given, iter(dims), others=True)
        function = run_layer if dims is None else run_layer_of_block
        function = function if self.compiler is None else self.compiler(function)

        def compute(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            params, seeds, args, kwargs = _with_tensors(self.given, iter(values))
            with _emptied(self.layer, params, self.draws):
                out, self.structure, calls = function(
                    self.layer, self.draws, self.in_layer, in_dims, dict(self.calls), params, seeds, args, kwargs
                )
            self.made = calls
            return tuple(out)

        if recomputes:
            # A layer draws no random numbers from torch's generator.
            out: tuple[torch.Tensor, ...] = checkpoint(compute, *values, use_reentrant=False, preserve_rng_state=False)
        else:
            out = compute(*values)
        if self.draws is not None:
            places = {name: place for place, name in self.names.items()}
            self.draws.calls.update({places.get(str(name), name): count for name, count in self.made.items()})
        return out


def run_layer(
    layer: torch.nn.Module,
    draws: DropoutDraws | None,
    in_layer: bool,
    in_dims: Any,
    calls: dict[int | str, int],
    params: Tensors,
    seeds: torch.Tensor | None,
    args: Any,
    kwargs: Any,
) -> tuple[tuple[torch.Tensor, ...], Any, dict[int | str, int]]:
    """Run a layer, for one client or for all clients of a block.

    Args:
        layer: The layer, without the parameters in `params`.
        draws: What its dropout draws from.
        in_layer: `DropoutDraws.in_layer`.
        in_dims: The client dimensions of the last four arguments; None for one client.
        calls: `DropoutDraws.calls`; changed in place.
        params: The parameters to install, by their path in the layer.
        seeds: The seeds of the examples; None without dropout.
        args: The positional arguments of the layer.
        kwargs: Its other arguments.

    Returns:
        The tensors of the output, its structure with places for them, and `calls` afterwards.
    """
    structure = []

    def of_one(params: Tensors, seeds: torch.Tensor | None, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
        # Flattening makes each gradient contiguous, as the optimizer requires. The compiler does this at no cost.
        _install(layer, {path: value.flatten().view(value.shape) for path, value in params.items()})
        if draws is not None:
            draws.seeds, draws.calls, draws.in_layer = seeds, calls, in_layer
        out = _plain(layer, args, kwargs)
        if draws is not None:
            draws.seeds, draws.calls, draws.in_layer = None, {}, False
        _install(layer, dict.fromkeys(params))
        structure.append(_without_tensors(out))
        return tuple(_tensors(out))

    if in_dims is None:
        tensors = of_one(params, seeds, args, kwargs)
    else:
        tensors = torch.vmap(of_one, in_dims=in_dims)(params, seeds, args, kwargs)
    return tensors, structure[0], calls


def run_layer_of_block(*arguments: Any) -> tuple[tuple[torch.Tensor, ...], Any, dict[int | str, int]]:
    """`run_layer` for the clients of a block, as a function of its own.

    The compiler remembers which sizes of a function's arguments change. A client without a client dimension would make
    all of them change, the widths of the weights too.
    """
    return run_layer(*arguments)


def use_layer_forward(module: torch.nn.Module, draws: DropoutDraws | None, recomputes: bool) -> None:
    """Let all layers of a module run by `LayerForward`. Changes the module in place.

    Args:
        module: The module.
        draws: What its dropout layers draw from; None if it has none.
        recomputes: Whether the layers recompute their activations in the backward pass.
    """
    for layer in module.modules():
        if is_layer(layer):
            layer.forward = LayerForward(layer, draws, recomputes)


def layer_forwards(module: torch.nn.Module) -> list[LayerForward]:
    """Return what the layers of a module run by."""
    found = (vars(layer).get("forward") for layer in module.modules())
    return [forward for forward in found if isinstance(forward, LayerForward)]


def _plain(layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    with functional_dropout(layer):
        return type(layer).forward(layer, *args, **kwargs)


def _install(layer: torch.nn.Module, params: Mapping[str, torch.Tensor | None]) -> None:
    for path, value in params.items():
        owner, _, leaf = path.rpartition(".")
        own_parameters(layer.get_submodule(owner))[leaf] = value  # type: ignore[assignment]


@contextmanager
def _emptied(layer: torch.nn.Module, params: Iterable[str], draws: DropoutDraws | None) -> Iterator[None]:
    """Take what belongs to the running forward pass out of a layer, and put it back afterwards.

    A layer that is recomputed in the backward pass has nothing to put back.
    """
    slots = [(own_parameters(layer.get_submodule(path.rpartition(".")[0])), path.rpartition(".")[2]) for path in params]
    before = [owner[leaf] for owner, leaf in slots]
    for owner, leaf in slots:
        owner[leaf] = None
    try:
        with nullcontext() if draws is None else draws.set_aside():
            yield
    finally:
        for (owner, leaf), value in zip(slots, before, strict=True):
            owner[leaf] = value


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested dicts, lists and tuples."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _tensors(value)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _tensors(value)


class _Place:
    """Stands for a tensor in a structure."""


def _without_tensors(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return _Place
    if isinstance(part, Mapping):
        return {name: _without_tensors(value) for name, value in part.items()}
    return tuple([_without_tensors(value) for value in part]) if isinstance(part, list | tuple) else part


def _with_tensors(part: Any, values: Iterator[Any], others: bool = False) -> Any:
    """Put values into the places of tensors.

    Args:
        part: The structure.
        values: The values, in order.
        others: Whether to replace everything else by None.
    """
    if part is _Place or isinstance(part, torch.Tensor):
        return next(values)
    if isinstance(part, Mapping):
        return {name: _with_tensors(value, values, others) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return tuple([_with_tensors(value, values, others) for value in part])
    return None if others else part
