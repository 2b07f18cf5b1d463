"""Error feedback: what a compressed update leaves out is added to the client's next update."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partita.core import tensors
from partita.core.method_error import MethodError
from partita.core.rng import Key
from partita.core.tensors import Names, Slots
from partita.core.update import Update
from partita.core.update_transform import UpdateTransform

RESIDUAL = "residual"


@dataclass(frozen=True)
class ErrorFeedback(UpdateTransform):
    """Compress the delta plus the residual with `inner`, and remember the new residual.

    For a delta d, a residual e and a compressor C, the client sends C(p) with p = d + e, and remembers p - C(p). The
    residual of a name that is not sent in a round stays as it is.

    Raises:
        MethodError: If `inner` has memory of its own or decodes the aggregate.
    """

    inner: UpdateTransform  # decodes single updates, and has no memory of its own
    slots: Names = frozenset({RESIDUAL})

    def __post_init__(self) -> None:
        if self.inner.slots or type(self.inner).decode_aggregate is not UpdateTransform.decode_aggregate:
            raise MethodError(
                f"error feedback of {type(self.inner).__name__}: it has memory of its own or decodes the aggregate, so "
                "a client cannot compute what arrives; use a transform that does neither"
            )

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        residual = memory.get(RESIDUAL, {})
        # No zeros are added where there is no residual: -0.0 + 0.0 has other bits than -0.0.
        delta = {name: value + residual[name] if name in residual else value for name, value in update.delta.items()}
        corrected = replace(update, delta=delta)
        sent, _ = self.inner.encode(corrected, {}, key)
        arrives = self.inner.decode_update(sent).delta
        # A tensor that `inner` passes on as the same object is sent whole, and leaves no residual to store.
        partial = {name for name in delta if name in residual or arrives[name] is not delta[name]}
        left = {name: delta[name] - arrives[name] for name in sorted(partial)}
        # The server rejects an update that is not finite. Its residual would spoil all later updates of this client.
        return sent, {RESIDUAL: left} if tensors.all_finite(left) else {}

    def decode_update(self, update: Update) -> Update:
        return self.inner.decode_update(update)
