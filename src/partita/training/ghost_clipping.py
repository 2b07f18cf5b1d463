"""Ghost clipping: clipped sums without materializing per-example gradients.

Per-example norms are computed from layer inputs and output gradients; then one weighted backward pass gives the clipped
sum. For example, a linear layer's gradient is the sum over tokens of input times output gradient, so its norm needs
only their inner products. A TorchFunctionMode records every call that takes a trained parameter; an unsupported call
raises GhostError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from partita.core import tensors
from partita.core.dp_settings import DPSGDSettings
from partita.core.tensors import Tensors
from partita.training.dp_sgd import per_example_gradients

PEEKS = ("__get__", "size", "dim", "ndimension", "__len__")  # calls that inspect a parameter and compute nothing
CHECKED_EXAMPLES = 2  # examples whose norms are also computed directly, once per phase


class GhostError(ValueError):
    """The model uses a trained parameter in a way that ghost clipping does not support."""


class _NormRecorder(TorchFunctionMode):
    """Records every call that takes a trained parameter, with its output and a function for its squared norms."""

    def __init__(self, trainable: Tensors, count: int) -> None:
        super().__init__()
        self.names = {id(value): name for name, value in trainable.items()}
        self.count = count
        self.calls: list[tuple[Callable[..., Tensor], Tensor]] = []  # (squared norms from output gradients, output)
        self.seen: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = function(*args, **given)
        taken = [self.names[id(value)] for value in (*args, *given.values()) if id(value) in self.names]
        if not taken or getattr(function, "__name__", "") in PEEKS:
            return result
        read = _KINDS.get(function)
        if read is None or not isinstance(result, Tensor):
            raise GhostError(f"'{taken[0]}' is used by {getattr(function, '__name__', function)}")
        if again := self.seen.intersection(taken):
            raise GhostError(f"'{sorted(again)[0]}' is used more than once")
        if len(result) != self.count:
            raise GhostError(f"the first dimension of an output of '{taken[0]}' is not the example")
        self.seen.update(taken)
        self.calls.append((read(self._trained, *args, **given), result))
        return result

    def _trained(self, value: Any) -> bool:
        return id(value) in self.names


Trained = Callable[[Any], bool]
Squares = Callable[[Tensor], Tensor]  # output gradient -> (example,)


def _linear(trained: Trained, given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Squares:
    def squares(grad: Tensor) -> Tensor:
        total = _square(grad.sum(1)) if trained(bias) else grad.new_zeros(len(grad))
        if not trained(weight):
            return total
        inputs = _by_token(given)
        tokens = inputs.shape[1]
        if 2 * tokens**2 < inputs.shape[2] * grad.shape[2]:
            return total + ((inputs @ inputs.mT) * (grad @ grad.mT)).sum((1, 2))
        return total + _square(grad.mT @ inputs)

    return squares


def _layer_norm(
    trained: Trained, given: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Squares:
    def squares(grad: Tensor) -> Tensor:
        total = _square(grad.sum(1)) if trained(bias) else grad.new_zeros(len(grad))
        if not trained(weight):
            return total
        return total + _square((grad * _by_token(functional.layer_norm(given, shape, eps=eps))).sum(1))

    return squares


def _embedding(trained: Trained, tokens: Tensor, weight: Tensor, *others: Any, **more: Any) -> Squares:
    def squares(grad: Tensor) -> Tensor:
        rows = tokens.reshape(len(tokens), -1)
        same = (rows.unsqueeze(1) == rows.unsqueeze(2)).to(grad)  # (example, token, token)
        return (same * (grad @ grad.mT)).sum((1, 2))

    return squares


def _scale(trained: Trained, left: Tensor, right: Tensor) -> Squares:
    """Multiplication by a weight per element of the last dimension, as in an RMS norm."""
    weight, other = (left, right) if trained(left) else (right, left)
    if weight.ndim != 1:
        raise GhostError("a parameter with more than one dimension is multiplied element-wise")
    return lambda grad: _square((grad * _by_token(other)).sum(1))


_KINDS: dict[Any, Callable[..., Squares]] = {
    functional.linear: _linear,
    functional.layer_norm: _layer_norm,
    functional.embedding: _embedding,
    torch.Tensor.mul: _scale,
    torch.Tensor.__mul__: _scale,
}


def _by_token(value: Tensor) -> Tensor:
    """The value as (example, token, width), in float32 or higher."""
    return tensors.upcast(value.detach()).reshape(len(value), -1, value.shape[-1])


def _square(value: Tensor) -> Tensor:
    return value.flatten(1).square().sum(1)


def ghost_sum(
    losses_of: Callable[[Tensors], Tensor],
    trainable: Tensors,
    mask: Tensor | None,
    count: int,
    dp_settings: DPSGDSettings,
) -> tuple[Tensors, Tensor, Tensor]:
    """Sum clipped per-example gradients with two backward passes over the batch.

    Args:
        losses_of: Maps trained parameters to the losses of the batch, of shape (example,).
        trainable: The trained parameters.
        mask: Shape (example,), zero for examples to leave out; None if all count.
        count: The number of examples.
        dp_settings: The clip.

    Returns:
        `(sum by name, losses, gradient norms)`; losses and norms have shape (example,).

    Raises:
        GhostError: If the model uses a trained parameter in an unsupported way.
    """
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in trainable.items()}
        with _NormRecorder(leaves, count) as watch:
            losses = losses_of(leaves)  # (example,)
        if missed := _missed(leaves, watch.seen, losses):
            raise GhostError(f"'{missed}' is used in a way that cannot be recorded")
        outs = [out for _, out in watch.calls]
        grads = torch.autograd.grad(losses.sum(), outs, retain_graph=True, allow_unused=True)
        pairs = zip(watch.calls, grads, strict=True)
        parts = [squares(_by_token(grad)) for (squares, _), grad in pairs if grad is not None]
        norms = torch.stack(parts).sum(0).clamp(min=0).sqrt()
        shares = (dp_settings.clip / norms).clamp(max=1.0)
        shares = shares if mask is None else shares * mask
        grads = torch.autograd.grad((losses * shares.to(losses)).sum(), list(leaves.values()), allow_unused=True)
    total = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {name: total.get(name, torch.zeros_like(value)) for name, value in trainable.items()}, losses.detach(), norms


def check_norms(
    losses_of: Callable[[Tensors, Tensors, Tensor], Tensor],
    trainable: Tensors,
    inputs: Tensors,
    targets: Tensor,
    dp_settings: DPSGDSettings,
) -> None:
    """Compare ghost norms with directly computed norms.

    This detects outputs whose first dimension has the right size but is not the example. Call it in float32: in half
    precision the two computations can differ by a few percent.

    Args:
        losses_of: Returns the losses of shape (example,), from the parameters, inputs and targets.
        trainable: The parameters.
        inputs: The inputs by name, each of shape (example, ...).
        targets: The targets, of shape (example, ...).
        dp_settings: The DP-SGD settings.

    Raises:
        GhostError: If the norms differ.
    """

    def of_one(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = losses_of(trainable, inputs, targets).sum()
        return loss, loss

    ghost = ghost_sum(
        lambda trainable: losses_of(trainable, inputs, targets), trainable, None, len(targets), dp_settings
    )[2]
    direct = per_example_gradients(of_one, trainable, inputs, targets)[1]
    if bool(torch.isfinite(direct).all()) and not torch.allclose(ghost.to(direct), direct, rtol=1e-2, atol=1e-6):
        raise GhostError("the norms computed from its layers differ from the norms of its gradients")


def _missed(leaves: Tensors, seen: Iterable[str], losses: Tensor) -> str | None:
    """A trained parameter that no recorded call took although the loss depends on it, or None."""
    others = [name for name in leaves if name not in set(seen)]
    if not others:
        return None
    grads = torch.autograd.grad(losses.sum(), [leaves[name] for name in others], retain_graph=True, allow_unused=True)
    return next((name for name, grad in zip(others, grads, strict=True) if grad is not None), None)
