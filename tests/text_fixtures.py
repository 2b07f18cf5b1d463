"""Clients with texts of many lengths, and a BERT that reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from architecture_fixtures import make_model

from partita.core.data import ClientData
from partita.core.model import Model
from partita.core.rng import Key
from partita.data.ragged import ragged
from partita.data.task import Subset


def long_bert() -> Model:
    return make_model("bert-text", sizes={"max_position_embeddings": 64})


class TextClients:
    """Clients with these numbers of texts of many lengths, from one table."""

    def __init__(self, counts: Sequence[int] = (9, 7, 6, 5, 4, 2)) -> None:
        sizes = dict(zip("abcdef", counts, strict=False))
        draw = Key(5).generator()
        lengths = torch.randint(3, 60, (sum(sizes.values()),), generator=draw).tolist()
        rows = [torch.randint(1, 20, (length,), generator=draw).tolist() for length in lengths]
        table = ragged(rows, 60, torch.randint(2, (len(rows),), generator=draw))
        parts = torch.arange(len(rows)).split(list(sizes.values()))
        self.parts = {client: Subset(table, part) for client, part in zip(sizes, parts, strict=True)}
        self.clients = list(sizes)

    def __getitem__(self, client: str) -> ClientData:
        return ClientData(*[self.parts[client]] * 3)
