"""One Trainer as a client of a federation, with the loop in the user's hands."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

from partita.core.client import ClientError
from partita.core.method import Method
from partita.core.options import OptionError
from partita.core.own_code import end_at_fit, is_read_as_config
from partita.core.settings import RunError
from partita.experiment.experiment import Experiment
from partita.experiment.preview import preview_of
from partita.record.row import Row
from partita.trainers.engine import Crew, Order, Ranks, Test
from partita.trainers.federation import assemble, config_for_sites, last_model, recorded_rows


class Closed(BaseException):
    """The user has left the loop."""


class Rounds:
    """The rounds of a federation in a thread of their own. It and the caller take turns; they never run together.

    The thread computes what the server does. What touches a Trainer is an order, which the caller carries out.
    """

    def __init__(self) -> None:
        self.orders: SimpleQueue[Order | BaseException | None] = SimpleQueue()
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.thread: Thread | None = None

    def carry_out(self, order: Order) -> Any:
        """In the thread: pass an order on, and return its result."""
        self.orders.put(order)
        answer = self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def next(self, rows: Iterator[Row], answer: Any = None) -> Order | None:
        """In the caller: answer the last order, and return the next one; None at the end.

        Raises:
            BaseException: What was raised in the thread.
        """
        if self.thread is None:
            self.thread = Thread(target=self._run, args=(rows,), name="partita rounds", daemon=True)
            self.thread.start()
        else:
            self.answers.put(answer)
        order = self.orders.get()
        if isinstance(order, BaseException):
            raise order
        return order

    def stop(self) -> None:
        """In the caller: end the thread, wherever it is."""
        if self.thread is not None and self.thread.is_alive():
            self.answers.put(Closed())
            self.thread.join()

    def _run(self, rows: Iterator[Row]) -> None:
        try:
            for _ in rows:
                pass
        except BaseException as error:
            self.orders.put(error)
        else:
            self.orders.put(None)


class PatchedTrainer:
    """A Trainer that takes part in a federation: call `trainer.train()` once for each `round()` that returns True.

    It can be used in a `with` block, which closes it.

    Attributes:
        folder: The run folder; it is deleted at the end if `patch` got none.
        plan: What trains, travels and stays in the first round, as a table.
    """

    def __init__(self, crew: Crew, experiment: Experiment, folder: Path | None, resume: bool) -> None:
        [(name, self._site)] = crew.sites.items()
        self._ranks, self._experiment = Ranks(self._site.trainer.args.device, crew.model), experiment
        initial = crew.model.initial
        crew.model.initial = dict(self._ranks.copy(initial, initial))  # FSDP may have loaded them in the first only
        self._crew = replace(crew, run=replace(crew.run, secret=self._ranks.agree(crew.run.secret)))
        self._temporary = None if folder or not self._ranks.first else tempfile.TemporaryDirectory(prefix="partita-")
        self._rounds, self._done, self._training = Rounds(), False, False
        self.folder = folder or Path(self._temporary.name if self._temporary else "") / "run"
        self.plan = preview_of(experiment.run, experiment.model, [name]).to_text()
        self._rows: Iterator[Row] = iter(())
        if self._ranks.first:
            print(self.plan, end="")
            self._rows = recorded_rows(experiment, self._rounds.carry_out, self.folder, resume)
        self._finalizer = weakref.finalize(self, _close, self._rounds, self._temporary)

    def round(self) -> bool:
        """Take the answer of the last round, and put the parameters of the next one into the Trainer's module.

        Returns:
            Whether there is a round to train. If not, the module holds the client's last model.

        Raises:
            RunError: If `trainer.train()` was not called since, or more than once.
        """
        if self._done:
            return False
        answer: Any = None
        if self._training:
            try:
                answer = self._site.finish()
            except ClientError as error:
                answer = error  # the server decides what a lost client means
            self._training = False
        try:
            return self._continue(answer)
        except BaseException:
            self.close()
            raise

    def _continue(self, answer: Any) -> bool:
        while True:
            order = self._next(answer)
            if order is None:
                self._put_last()
                self._done = True
                self.close()
                return False
            if order.kind == "train":
                self._crew.begin(order)
                self._training = True
                return True
            answer = self._crew.score(order)

    def _next(self, answer: Any) -> Order | None:
        """Return the next order, the same in all processes."""
        passed: Order | str | None = None
        failure: BaseException | None = None
        if self._ranks.first:
            try:
                passed = self._rounds.next(self._rows, answer)
            except BaseException as error:
                passed, failure = f"{type(error).__name__}: {error}", error
        passed = self._ranks.share(passed)
        if failure is not None:
            raise failure
        if isinstance(passed, str):
            raise RunError(f"the first process has stopped: {passed}")
        return passed

    def _put_last(self) -> None:
        params = last_model(self._experiment, self.folder).params(self._site.client) if self._ranks.first else {}
        self._site.put(self._ranks.copy(params, self._crew.model.initial))

    def close(self) -> None:
        """End the federation; without effect if it has ended. The module keeps what it holds."""
        self._done = True
        self._finalizer()
        self._site.leave()

    def __enter__(self) -> PatchedTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def patch(
    trainer: Any,
    method: str | Mapping[str, Any] | Method = "fedavg",
    *,
    rounds: int = 1,
    name: str = "client",
    folder: Path | str | None = None,
    seed: int = 0,
    test: Test | None = None,
    resume: bool = False,
    clients: Sequence[str] = (),
    **tables: Any,
) -> PatchedTrainer:
    """Make a Trainer the client of a federation, and print what trains, travels and stays.

        client = partita.patch(trainer, method="fedsa-lora", rounds=3)
        while client.round():
            trainer.train()

    In a file, this call is a config for sites, each of which trains the Trainer that the file makes there.

    Under torchrun, each process calls this with its own Trainer. The first one has the federation.

    Args:
        trainer: A Trainer of transformers, or one that inherits from it, as TRL's do.
        method: A method: its name, a table with its name and options, or a `Method`.
        rounds: The number of rounds.
        name: The name of the client.
        folder: The run folder. Default: a temporary one, so that nothing is kept.
        seed: The seed of the run.
        test: Returns the scores of a module, for the central test. Default: no central test.
        resume: If the folder holds this very run, continue it after its last finished round instead of failing.
        clients: The names of all sites, if the file is a config for sites. Without effect when it is run.
        **tables: Tables of a config, as for `federate`.

    Raises:
        RunError: If the Trainer cannot take part.
        MethodError: If the method cannot run on a Trainer.
        OptionError: If a table does not apply to Trainers.
    """
    if resume and not folder:
        raise OptionError("resume continues the run in a folder; name it with folder")
    given = Path(folder) if folder else None
    if is_read_as_config(patch):
        own = {name: trainer}
        end_at_fit(patch, *config_for_sites(own, method, rounds, seed, test, tables, [*clients], trainer))
    crew, experiment, _ = assemble({name: trainer}, method, rounds, seed, test, tables, given, resume)
    return PatchedTrainer(crew, experiment, given, resume)


def _close(rounds: Rounds, temporary: tempfile.TemporaryDirectory[str] | None) -> None:
    rounds.stop()
    if temporary is not None:
        temporary.cleanup()
