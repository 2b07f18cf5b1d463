"""FedAvg: train everything, send everything, average the updates weighted by the number of examples."""

from partita.core.method import Method


def fedavg() -> Method:
    """Build FedAvg."""
    return Method("fedavg")
