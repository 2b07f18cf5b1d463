"""The proximal term: which parameters it covers, and its value."""

from __future__ import annotations

import pytest
import torch
from helpers import toy_model

from partita.core.client_rule import Context
from partita.core.data import Batch
from partita.core.model import Output
from partita.core.plan import Plan, share
from partita.methods.fedprox import FedProxClient

MODEL = toy_model()
HEAD = MODEL.names("head")
BODY = MODEL.all_names() - HEAD


@pytest.mark.parametrize(
    ("plan", "held"),
    [
        (share(MODEL.all_names(), down=MODEL.all_names()), MODEL.all_names()),
        (share(BODY, down=MODEL.all_names()), BODY),
        (share(MODEL.all_names(), down=BODY, keep=HEAD), BODY),
    ],
    ids=["all", "a frozen head", "a personal head"],
)
def test_fedprox_penalty_covers_trained_parameters_from_the_server(plan: Plan, held: frozenset[str]) -> None:
    """A step s in each trained coordinate costs (mu / 2) s^2 for each covered coordinate."""
    step, mu = 0.5, 3.0
    params = {name: value + step * (name in plan.train) for name, value in MODEL.initial.items()}
    ctx = Context(MODEL, plan, MODEL.initial, sent={}, memory={}, lr=0.1)
    nothing = torch.zeros(0)
    penalty = FedProxClient(mu).penalty(Output(nothing), params, Batch({}, nothing), ctx)
    count = sum(MODEL.initial[name].numel() for name in held)
    assert penalty is not None
    assert penalty.item() == pytest.approx(mu / 2 * step**2 * count, rel=1e-5)


def test_fedprox_has_no_penalty_when_everything_is_kept() -> None:
    plan = share(MODEL.all_names(), down=frozenset(), keep=MODEL.all_names())
    ctx = Context(MODEL, plan, MODEL.initial, sent={}, memory={}, lr=0.1)
    nothing = torch.zeros(0)
    assert FedProxClient(1.0).penalty(Output(nothing), MODEL.initial, Batch({}, nothing), ctx) is None
