"""Charge the rounds of a private run to a privacy ledger before anything leaves a client."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from partita.core.client import Job
from partita.core.rounds import Listener
from partita.experiment.config import shared_digest
from partita.experiment.experiment import Experiment
from partita.privacy.guard import PrivacyGuard
from partita.privacy.ledger import Charge, Ledger


@dataclass(frozen=True)
class RunLedger(Listener):
    """The ledger of a run, which every job is charged to before it leaves the server.

    Attributes:
        ledger: The ledger.
        guard: The run's guard.
        run: Identity of the run.
        experiment: Digest of the run's config.
    """

    ledger: Ledger
    guard: PrivacyGuard = field(repr=False)
    run: str
    experiment: str

    def admit(self, client: str | None = None) -> None:
        """Raise a LedgerError if the ledger does not allow all rounds of the run. Nothing is charged.

        Args:
            client: The client that the ledger is about; None for all clients of the run.
        """
        planned = self.guard.planned_releases(self.guard.run.rounds)
        self.ledger.check(
            [
                Charge(self.run, number, name, tuple(releases), self.experiment)
                for number, name, releases in planned
                if client in (None, name) and (self.run, number, name) not in self.ledger.charges
            ]
        )

    def asks(self, job: Job) -> None:
        """Charge a client for a round, once. The charge is on disk when this returns.

        Raises:
            LedgerError: If the limit would be exceeded.
        """
        releases = tuple(self.guard.releases(job.round, job.client, job.signal))
        self.ledger.charge(Charge(self.run, job.round, job.client, releases, self.experiment))


def open_ledger(experiment: Experiment, place: Path) -> RunLedger | None:
    """Open the ledger that `engine.ledger` names, for a run that it can account for; None if it names none.

    Args:
        experiment: The experiment.
        place: The folder of the run or of the site. A run that is started again in another folder is another run.

    Raises:
        LedgerError: If the ledger cannot be read, or cannot account for the run.
    """
    config, guard = experiment.config, experiment.guard
    if config.engine.ledger is None:
        return None
    ledger = Ledger.load(Path(config.engine.ledger))
    assert guard is not None  # a config with a ledger is private
    ledger.check_unit(guard.privacy.unit, guard.privacy.group)
    assert experiment.run.secret is not None  # the noise of a run that is not repeatable
    identity = (experiment.run.secret / "ledger" / str(place.resolve())).digest(8).hex()
    return RunLedger(ledger, guard, identity, shared_digest(config))
