"""The options of `[model.adapter]`. This file imports neither torch nor PEFT, so that configs are read quickly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from partita.core.options import Count, OptionError, PartialShare, Positive, validate_options

TABLE = "model.adapter"
LORA_ONLY = ("dropout", "dora", "rslora", "ranks")
ADAPTER = "default"  # PEFT's name for a single adapter
FACTORS = ("lora_A", "lora_B")  # (rank, in) and (out, rank)


@dataclass(frozen=True)
class AdapterOptions:
    """An adapter of PEFT at the linear layers of a model.

    Raises:
        OptionError: If options contradict each other.
    """

    kind: Annotated[
        Literal["lora", "lokr", "hra", "miss", "ia3"], "type of adapter; all are PEFT's, see its documentation"
    ] = "lora"
    rank: Annotated[Count, "rank; with `ranks`, the largest of them. 'ia3' has none"] = 8
    alpha: Annotated[Positive, "the product of LoRA's or LoKr's factors is multiplied by alpha / rank"] = 16.0
    roles: Annotated[tuple[str, ...], "roles or layers of the linear layers that get an adapter"] = ("query", "value")
    dropout: Annotated[PartialShare, "'lora' only: dropout of the input of the factors, in training"] = 0.0
    dora: Annotated[bool, "'lora' only: DoRA, which also trains the length of each row of a weight"] = False
    rslora: Annotated[bool, "'lora' only: multiply by alpha / sqrt(rank) instead"] = False
    head: Annotated[
        bool, "also train the task's head in full; the output layer of a language model is not one and never trains"
    ] = True
    ranks: Annotated[
        dict[str, Count] | tuple[Count, ...] | None,
        "'lora' only: smaller ranks of clients, by name (the others have `rank`), or a list dealt out to the clients "
        "in turn",
    ] = field(default=None)

    def __post_init__(self) -> None:
        for option in LORA_ONLY:
            if self.kind != "lora" and getattr(self, option):
                raise OptionError(f"{TABLE}.{option} is for kind 'lora', not for '{self.kind}'; leave it out")
        for rank in self._given():
            if rank > self.rank:
                raise OptionError(
                    f"{TABLE}.ranks has {rank}, but {TABLE}.rank is {self.rank}; set {TABLE}.rank to the largest rank"
                )
        if self.ranks is not None and not self.ranks:
            raise OptionError(f"{TABLE}.ranks is empty; leave it out")
        if isinstance(self.ranks, tuple | list) and max(self.ranks) < self.rank:
            raise OptionError(
                f"{TABLE}.rank is {self.rank}, but the largest of {TABLE}.ranks is {max(self.ranks)}, so no client "
                f"would train the rest; set {TABLE}.rank = {max(self.ranks)}"
            )
        if self.dora and len(self.bounds) > 1:
            raise OptionError(
                f"{TABLE}.ranks and {TABLE}.dora are both set; the lengths of DoRA depend on all factors together, so "
                "leave one of them out"
            )

    def _given(self) -> Iterable[int]:
        return self.ranks.values() if isinstance(self.ranks, Mapping) else self.ranks or ()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The distinct ranks in order. Factors are cut there, so that a client of a small rank has the first pieces."""
        return tuple(sorted({*self._given(), self.rank}))

    @property
    def pieces(self) -> dict[str, int]:
        """The width of each piece into which the factors are cut, by the name of its adapter in PEFT."""
        if len(self.bounds) == 1:
            return {ADAPTER: self.rank}
        lower = (0, *self.bounds[:-1])
        return {f"rank{high}": high - low for low, high in zip(lower, self.bounds, strict=True)}

    @property
    def scale(self) -> float:
        """What the product of LoRA's factors is multiplied by; the same for clients of all ranks."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def rank_of(self, clients: Iterable[str]) -> dict[str, int]:
        """Return the rank of each client.

        Args:
            clients: The names of all clients, in their order.

        Raises:
            OptionError: If `ranks` names a client that does not exist.
        """
        clients = list(clients)
        if not isinstance(self.ranks, Mapping):
            dealt = self.ranks or (self.rank,)
            return {client: dealt[place % len(dealt)] for place, client in enumerate(clients)}
        if unknown := sorted(self.ranks.keys() - set(clients)):
            raise OptionError(
                f"{TABLE}.ranks names client '{unknown[0]}', which does not exist; clients are "
                f"{', '.join(clients[:3])}, ..."
            )
        return {client: self.ranks.get(client, self.rank) for client in clients}


def factor_name(site: str, factor: str, piece: str = ADAPTER) -> str:
    """Return the name of a factor, or of a piece of it.

    Args:
        site: The path of the linear layer.
        factor: One of `FACTORS`.
        piece: A name of `AdapterOptions.pieces`.
    """
    return f"{site}.{factor}.weight" if piece == ADAPTER else f"{site}.{factor}.{piece}.weight"


def frozen_part(head: bool, outputs: str) -> Literal["base", "all"]:
    """Return which word of `model.frozen` an adapter stands for: "all" if no head of the task trains beside it.

    Args:
        head: `AdapterOptions.head`.
        outputs: `TaskKind.outputs`. The output layer of a language model is not a head of the task.
    """
    return "base" if head and outputs != "vocabulary" else "all"


def adapter_options(table: Any) -> AdapterOptions:
    """Check the table `[model.adapter]`.

    Raises:
        OptionError: If a key is unknown, or a value is invalid.
    """
    if not isinstance(table, Mapping):
        raise OptionError(f"{TABLE} is {table!r}; it must be a table, [{TABLE}]")
    return AdapterOptions(**validate_options(AdapterOptions, table, TABLE))
