"""FedAvg: train everything, send everything, take the mean weighted by the number of examples."""

from partita.core.method import Method


def fedavg() -> Method:
    return Method("fedavg")
