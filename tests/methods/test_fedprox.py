"""What the proximal term holds, by its formula."""

from __future__ import annotations

import pytest
import torch
from helpers import small

from partita.core.data import Batch
from partita.core.method import Context
from partita.core.model import Output
from partita.core.plan import Plan, share
from partita.methods.fedprox import Proximal

MODEL = small()
HEAD = MODEL.names("head")
BODY = MODEL.every() - HEAD


@pytest.mark.parametrize(
    ("plan", "held"),
    [
        (share(MODEL.every(), down=MODEL.every()), MODEL.every()),
        (share(BODY, down=MODEL.every()), BODY),
        (share(MODEL.every(), down=BODY, keep=HEAD), BODY),
    ],
    ids=["all", "a frozen head", "a personal head"],
)
def test_it_holds_what_trains_and_came_from_the_server(plan: Plan, held: frozenset[str]) -> None:
    """One step of length s in each coordinate that trains: (mu / 2) s^2 for each coordinate that is held."""
    step, mu = 0.5, 3.0
    params = {name: value + step * (name in plan.train) for name, value in MODEL.initial.items()}
    ctx = Context(MODEL, plan, MODEL.initial, sent={}, memory={}, lr=0.1)
    nothing = torch.zeros(0)
    penalty = Proximal(mu).penalty(Output(nothing), params, Batch({}, nothing), ctx)
    count = sum(MODEL.initial[name].numel() for name in held)
    assert penalty is not None
    assert penalty.item() == pytest.approx(mu / 2 * step**2 * count, rel=1e-5)


def test_with_nothing_to_hold_there_is_no_term() -> None:
    plan = share(MODEL.every(), down=frozenset(), keep=MODEL.every())
    ctx = Context(MODEL, plan, MODEL.initial, sent={}, memory={}, lr=0.1)
    nothing = torch.zeros(0)
    assert Proximal(1.0).penalty(Output(nothing), MODEL.initial, Batch({}, nothing), ctx) is None
