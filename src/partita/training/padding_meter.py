"""Measures how much of the work of training is padding."""

from __future__ import annotations

import torch

from partita.core.data import Batch
from partita.core.update import ComputedWork

TOKEN_MASK = "attention_mask"  # the input that tells tokens of a text from padding


class PaddingMeter:
    """Counts the tokens of each client's batches, or the examples where inputs are not texts, with and without padding.

    Args:
        clients: The number of clients.
    """

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.real = torch.zeros(clients, dtype=torch.long)
        self.computed = torch.zeros(clients, dtype=torch.long)

    def add(self, batch: Batch) -> None:
        """Count a batch of the leading clients, (client, example, ...), or of a single client, (example, ...).

        Its masks must be in memory of the CPU. Tokens that are on a GPU are not counted, which would wait for it.
        """
        tokens, mask = batch.inputs.get(TOKEN_MASK), batch.mask
        counted = None
        if tokens is not None and tokens.device.type == "cpu":
            counted = tokens if mask is None else tokens * mask.unsqueeze(-1)
        elif mask is not None:
            counted = mask
        shape = batch.targets.shape[: 1 + int(self.clients > 1)] if counted is None else counted.shape
        leading = shape[0] if self.clients > 1 else 1
        each = shape.numel() // leading
        self.computed[:leading] += each
        self.real[:leading] += each if counted is None else counted.reshape(leading, -1).sum(1).long()

    def work(self) -> list[ComputedWork]:
        """Return the work of each client."""
        return [ComputedWork(*each) for each in zip(self.real.tolist(), self.computed.tolist(), strict=True)]
