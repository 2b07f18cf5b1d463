"""Centralized: pool all clients' data and train one model on it. The reference that federation is measured against."""

from partita.core.method import Method
from partita.methods.local_only import keep_everything


def centralized() -> Method:
    """Build the centralized baseline."""
    return Method("centralized", plan=keep_everything, carry_optimizer=True, pool=True)
