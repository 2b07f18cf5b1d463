"""Ghost clipping: clipped sums without per-example gradients, for one client or a block of clients.

One forward and one backward pass give the input of each layer and the gradient of its output. From these follow the
norms of the per-example gradients, and then their clipped sum (see `ghost_layers.py`). A TorchFunctionMode records
every call that takes a trained parameter; an unsupported call raises GhostError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from partita.core import tensors
from partita.core.dp_settings import PrivacySettings
from partita.core.tensors import Tensors
from partita.core.torch_private import client_dimension, version, without_vmap
from partita.training.dp_sgd import gradient_of_one
from partita.training.ghost_layers import KINDS, GhostError, Part, Parts

# Calls that inspect a parameter and compute nothing.
PEEKS = ("__get__", "size", "dim", "ndimension", "__len__", "numel", "is_floating_point")
CHECKED_EXAMPLES = 2  # examples of one client whose norms are also computed directly, once per phase


class _BlockTensor:
    """A tensor of one client, or of all clients if the call runs under `torch.vmap`."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.dimension = without_vmap(value), client_dimension(value)
        self.version = version(self.value)

    @property
    def changed(self) -> bool:
        return version(self.value) != self.version

    def by_client(self, value: torch.Tensor, clients: int) -> torch.Tensor:
        """Return a tensor of this shape with the clients as first dimension."""
        if self.dimension is None:
            return value.expand(clients, *value.shape)
        return value.movedim(self.dimension, 0)


@dataclass(frozen=True)
class _Recorded:
    names: tuple[str, ...]
    given: _BlockTensor
    out: _BlockTensor
    parts: Parts

    def gradients(self, grad: torch.Tensor, clients: int) -> Iterator[Part]:
        """The gradients of the layer's parameters, from the gradient of its output."""
        given = self.given.by_client(self.given.value.detach(), clients)
        return self.parts(given, self.out.by_client(grad, clients))


class _LayerRecorder(TorchFunctionMode):
    """Records every call that takes a trained parameter, with its input and output.

    Under `torch.vmap`, the recorded tensors are those of the whole block. Trained parameters are constants in a
    recorded call. So a gradient that reaches a parameter comes from a use that was not recorded.
    """

    def __init__(self, trainable: Tensors, count: int) -> None:
        super().__init__()
        self.names = {id(value): name for name, value in trainable.items()}
        self.count = count
        self.zero = torch.zeros((), device=next((v.device for v in trainable.values()), None), requires_grad=True)
        self.casts: list[torch.Tensor] = []  # keeps them alive: an id is valid only as long as its object
        self.layers: list[_Recorded] = []
        self.seen: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        called = getattr(function, "__name__", "")
        taken = [name for value in (*args, *given.values()) if (name := self._name(value))]
        if not taken or called in PEEKS:
            return function(*args, **given)
        if called == "to":
            return self._cast(function(*args, **given), self._name(args[0]))
        if function not in KINDS:
            raise GhostError(f"'{taken[0]}' is used by {called or function}")
        if again := self.seen.intersection(taken):
            raise GhostError(f"'{sorted(again)[0]}' is used more than once")
        layer = KINDS[function](self._name, self.count, *args, **given)
        result = layer.call(layer.given)
        if len(result) != self.count or len(layer.given) != self.count:
            raise GhostError(f"the first dimension of an output of '{taken[0]}' is not the example")
        self.seen.update(taken)
        if not without_vmap(result).requires_grad:  # no earlier layer trains
            result = result + self.zero.to(result.dtype)
        self.layers.append(_Recorded(layer.names, _BlockTensor(layer.given), _BlockTensor(result), layer.parts))
        return result

    def _cast(self, result: torch.Tensor, name: str | None) -> torch.Tensor:
        """Note a parameter in another type, which stands for the parameter."""
        if name is not None:
            cast = without_vmap(result)
            self.casts.append(cast)
            self.names[id(cast)] = name
        return result

    def _name(self, value: Any) -> str | None:
        return self.names.get(id(without_vmap(value))) if isinstance(value, torch.Tensor) else None


def ghost_sum(
    losses_of: Callable[[Tensors], torch.Tensor],
    trainable: Tensors,
    mask: torch.Tensor | None,
    count: int,
    dp_settings: PrivacySettings,
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Sum clipped per-example gradients with one backward pass over the batch.

    Examples whose gradient is not finite are left out: a NaN in the sum would reveal that the example was present.

    Args:
        losses_of: Maps trained parameters to the losses of the batch, of shape (example,), or (client, example) for a
            block. Only there, the parameters have a client dimension, over which it applies `torch.vmap`.
        trainable: The trained parameters.
        mask: Shape (example,) or (client, example), zero for examples to leave out; None if all count.
        count: The number of examples of one client.
        dp_settings: The clip.

    Returns:
        `(sum by name, losses, gradient norms)`; losses and norms have the shape of the mask.

    Raises:
        GhostError: If the model uses a trained parameter in an unsupported way.
    """
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in trainable.items()}
        with _LayerRecorder(leaves, count) as recorder:
            losses = losses_of(leaves)
        layers = _backward(losses, leaves, recorder.layers)
    recorder.layers.clear()
    shape = losses.shape
    clients = len(losses) if losses.ndim > 1 else 1
    parts: list[Part] = []
    while layers:
        layer, grad = layers.pop()  # its output is no longer needed
        parts += layer.gradients(grad, clients)
    if not parts:
        return tensors.zeros_like(trainable), losses.detach(), torch.zeros_like(losses)
    norms = torch.stack([part.squares for part in parts]).sum(0).clamp(min=0).sqrt()  # (client, example)
    left_out = ~torch.isfinite(norms)
    if mask is not None:
        left_out |= mask.reshape(left_out.shape) == 0
    shares = (dp_settings.clip / norms).clamp(max=1.0).masked_fill(left_out, 0.0)
    sums = tensors.zeros_like(trainable)
    while parts:
        part = parts.pop()  # its tensors are no longer needed
        sums[part.name] = part.weighted(shares).to(trainable[part.name].dtype).view(trainable[part.name].shape)
    return sums, losses.detach(), norms.view(shape)


def _backward(losses: torch.Tensor, leaves: Tensors, layers: list[_Recorded]) -> list[tuple[_Recorded, torch.Tensor]]:
    """Return the layers that the losses depend on, with the gradients of their outputs."""
    if changed := next((layer for layer in layers if layer.given.changed or layer.out.changed), None):
        raise GhostError(f"an input or output of '{changed.names[0]}' is changed in place")
    if not losses.requires_grad:
        return []
    outs = [layer.out.value for layer in layers]
    grads = torch.autograd.grad(losses.sum(), [*outs, *leaves.values()], allow_unused=True)
    for name, grad in zip(leaves, grads[len(outs) :], strict=True):
        if grad is not None:
            raise GhostError(f"'{name}' is used in a way that cannot be recorded")
    return [(layer, grad) for layer, grad in zip(layers, grads, strict=False) if grad is not None]


def check_norms(
    losses_of: Callable[[Tensors, Tensors, torch.Tensor], torch.Tensor],
    trainable: Tensors,
    inputs: Tensors,
    targets: torch.Tensor,
    norms: torch.Tensor,
    close: float,
) -> None:
    """Compare ghost norms with directly computed norms.

    This detects outputs whose first dimension has the right size but is not the example. Call it in float32 where the
    model allows it: in half precision the two computations can differ by a few percent.

    Args:
        losses_of: Returns the losses of shape (example,), from the parameters, inputs and targets of one client.
        trainable: The parameters.
        inputs: The inputs by name, each of shape (example, ...).
        targets: The targets, of shape (example, ...).
        norms: The ghost norms, (example,).
        close: The largest relative difference.

    Raises:
        GhostError: If the norms differ.
    """

    def of_one(trainable: Tensors, inputs: Tensors, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = losses_of(trainable, inputs, targets).sum()
        return loss, loss

    found = []
    for place in range(len(targets)):
        one = {name: value[place : place + 1] for name, value in inputs.items()}
        found.append(gradient_of_one(of_one, trainable, one, targets[place : place + 1])[1])
    direct = torch.cat(found)
    if bool(torch.isfinite(direct).all()) and not torch.allclose(norms.to(direct), direct, rtol=close, atol=1e-6):
        raise GhostError("the norms computed from its layers differ from the norms of its gradients")
