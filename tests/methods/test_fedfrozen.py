"""The random freeze, an ablation of the kernel: the same number of each shape, drawn at random."""

from __future__ import annotations

import torch

from partita.core.model import Model
from partita.methods.fedfrozen import frozen_names


class MatricesAndVectors(Model):
    """Nine matrices and nine vectors, of which four and two are tagged as the kernel."""

    name = "shelf"

    def __init__(self) -> None:
        self.initial = {f"{kind}.{place}": value for kind, value in self.kinds().items() for place in range(9)}
        kernel = {f"matrix.{place}" for place in range(4)} | {"vector.0", "vector.1"}
        self.tags = {name: frozenset({"query", "key"} if name in kernel else {"other"}) for name in self.initial}

    def kinds(self) -> dict[str, torch.Tensor]:
        return {"matrix": torch.zeros(2, 3), "vector": torch.zeros(3)}


def indices_of(names: frozenset[str], kind: str) -> set[str]:
    return {name.removeprefix(kind) for name in names if name.startswith(kind)}


def test_random_freeze_matches_the_kernel_count_of_each_shape() -> None:
    for draw in range(5):
        names = frozen_names(MatricesAndVectors(), "random", draw)
        assert (len(indices_of(names, "matrix")), len(indices_of(names, "vector"))) == (4, 2)


def test_random_freeze_draws_each_shape_independently() -> None:
    """With one random stream for both shapes, the drawn vectors would always follow the drawn matrices."""
    drawn = [frozen_names(MatricesAndVectors(), "random", draw) for draw in range(5)]
    assert not all(indices_of(names, "vector") <= indices_of(names, "matrix") for names in drawn)
