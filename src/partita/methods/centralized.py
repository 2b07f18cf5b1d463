"""Centralized: all clients' data in one place and one model on it. What federation is measured against."""

from partita.core.method import Method
from partita.methods.local_only import keep_everything


def centralized() -> Method:
    return Method("centralized", plan=keep_everything, carry_optimizer=True, pool=True)
