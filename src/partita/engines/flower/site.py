"""A site: one client with its data, its folder, and what decides whether it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from partita.core.client import Job
from partita.core.data import ClientData
from partita.core.model import Model
from partita.core.plan import Plan
from partita.core.rounds import Engine
from partita.core.settings import Run
from partita.engines.availability import Availability
from partita.engines.flower.messages import SiteRequest
from partita.engines.simulation import SimulationEngine
from partita.evaluation import Evaluator
from partita.storage.client_store import ClientStore

JobKind = Literal["train", "evaluate"]
# Decides whether a site answers a valid job. It raises a ClientError if not, before the site changes any file.
Consent = Callable[[JobKind, SiteRequest, Plan], None]


@dataclass(frozen=True)
class Site:
    """One client, its data, and the folder with its state and its copy of the parameters it was sent.

    It is also a population that consists of this one client.
    """

    run: Run
    model: Model
    client: str
    data: ClientData
    folder: Path
    availability: Availability
    device: torch.device
    evaluator: Evaluator
    config: str = ""  # digest of the config that server and sites share
    base: Callable[[], str] = str  # computes the digest of the frozen weights; default: there are none
    data_digest: Callable[[], str] = str  # computes the digest of the training examples; default: unknown
    answered: Path | None = None  # record of the rounds for which noise was drawn; None: a file in `folder`
    charge: Callable[[Job], None] | None = None  # charges a job to the site's privacy ledger; a ValueError refuses it
    consent: Consent = lambda kind, request, plan: None  # default: every valid job is answered
    peers: Sequence[str] = ()  # the names of all clients of the experiment
    key: Path | None = None  # the private SSH key with which the site signs its keys of secure aggregation
    make_engine: Callable[[ClientStore], Engine] | None = None  # default: the model of partita trains

    def engine(self, store: ClientStore) -> Engine:
        """Return the engine that trains and scores this one client."""
        if self.make_engine is not None:
            return self.make_engine(store)
        return SimulationEngine(
            self.run,
            self.model,
            self,
            device=self.device,
            store=store,
            availability=self.availability,
            evaluator=self.evaluator,
        )

    @property
    def clients(self) -> tuple[str, ...]:
        return (self.client,)

    def __getitem__(self, client: str) -> ClientData:
        return self.data
