"""The random freeze, an ablation of the kernel: the same number of each shape, drawn at random."""

from __future__ import annotations

import torch

from partita.core.model import Model
from partita.methods.fedfrozen import frozen_names


class Shelf(Model):
    """Nine matrices and nine vectors, of which four and two are tagged as the kernel."""

    name = "shelf"

    def __init__(self) -> None:
        self.initial = {f"{kind}.{place}": value for kind, value in self.kinds().items() for place in range(9)}
        kernel = {f"matrix.{place}" for place in range(4)} | {"vector.0", "vector.1"}
        self.tags = {name: frozenset({"query", "key"} if name in kernel else {"other"}) for name in self.initial}

    def kinds(self) -> dict[str, torch.Tensor]:
        return {"matrix": torch.zeros(2, 3), "vector": torch.zeros(3)}


def places(names: frozenset[str], kind: str) -> set[str]:
    return {name.removeprefix(kind) for name in names if name.startswith(kind)}


def test_it_freezes_as_many_of_each_shape_as_the_kernel_has() -> None:
    for draw in range(5):
        names = frozen_names(Shelf(), "random", draw)
        assert (len(places(names, "matrix")), len(places(names, "vector"))) == (4, 2)


def test_it_draws_each_shape_apart() -> None:
    """With one random stream for both shapes, the drawn vectors would always follow the drawn matrices."""
    drawn = [frozen_names(Shelf(), "random", draw) for draw in range(5)]
    assert not all(places(names, "vector") <= places(names, "matrix") for names in drawn)
