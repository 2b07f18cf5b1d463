"""Progress of a run within its round, in a small file that `partita watch` reads."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from partita.core.client import Job
from partita.core.data import EvaluateOn
from partita.core.rounds import ClientFailure, Engine, Reply
from partita.core.settings import Run
from partita.core.update import MaskedUpdate, Update
from partita.record.file_names import PROGRESS
from partita.storage.atomic_files import write
from partita.storage.processes import this_process

Phase = Literal["waiting", "training", "evaluating"]
Connected = Callable[[], Sequence[str]]

EVERY = 1.0  # seconds between two writes, if something has changed
FIRST = 0.2  # seconds before the first write: clients that are here already are not waited for
HEARTBEAT = 10.0  # seconds between two writes if nothing has changed
NAMED = 200  # maximum number of clients that the file names
MAX_TEXT = 300  # characters of a reason or an error
RECENT = 5  # rounds whose time counts for the time that a round takes


class ProgressFile:
    """Writes the progress of a run from a thread, so that no round waits for the disk.

    The file holds no data of clients. In a private run it also leaves out which clients take part, how many they are,
    and which were lost. A failure to write is a warning.

    Args:
        folder: The run folder.
        run: The run.
        private: Whether the run has a privacy guarantee.
        connected: Returns the clients that are connected, if they are remote.
    """

    def __init__(self, folder: Path, run: Run, private: bool, connected: Connected | None = None) -> None:
        self.path, self.run, self.private, self.connected = folder / PROGRESS, run, private, connected
        self.known: dict[str, Any] = {
            "state": "running",
            "phase": "waiting",
            "rounds": run.rounds,
            "process": this_process(),
        }
        self.clients: dict[str, str] = {}  # the clients of this round -> "asked", "replied" or "lost"
        self.lost: dict[str, str] = {}
        self.asked = self.replied = 0
        self.starts: deque[float] = deque(maxlen=RECENT + 1)  # of the last rounds, in monotonic time
        self.changed = True
        self.failure = ""
        self.lock, self.end = threading.Lock(), threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to write, if that has not happened yet."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._write_until_end, name="progress", daemon=True)
            self.thread.start()

    def close(self, state: Literal["finished", "stopped", "failed"], error: str = "") -> None:
        """Stop to write. A finished run has a result, and no progress."""
        if self.thread is not None:
            self.end.set()
            self.thread.join()
        if state == "finished":
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
        elif self.thread is not None:
            self.update(state=state, **({"error": error[:MAX_TEXT]} if error else {}))
            self._write()

    def update(self, **values: Any) -> None:
        """Set values of the file."""
        with self.lock:
            self.known |= values
            self.changed = True

    def begin_round(self, number: int, cohort: int) -> None:
        """A round starts, and will ask this many clients."""
        if self.failure:
            warnings.warn(
                f"cannot write {self.path} ({self.failure}), so 'partita watch' does not show the current round",
                stacklevel=2,
            )
            self.failure = ""
        self.starts.append(time.monotonic())
        with self.lock:
            self.clients.clear()
            self.lost.clear()
            self.asked = self.replied = 0
            self.known |= {"phase": "training", "round": number, "cohort": cohort, "started": time.time()}
            if len(self.starts) > 1:
                self.known["pace"] = (self.starts[-1] - self.starts[0]) / (len(self.starts) - 1)
            self.changed = True

    def ask(self, client: str) -> None:
        """A client is asked."""
        with self.lock:
            self.asked += 1
            if len(self.clients) < NAMED:
                self.clients[client] = "asked"
            self.changed = True

    def receive(self, reply: Reply) -> None:
        """A client has replied, or was lost. A reply that is something else is left to the server's checks."""
        if not isinstance(reply, Update | MaskedUpdate | ClientFailure) or not isinstance(reply.client, str):
            return
        with self.lock:
            lost = isinstance(reply, ClientFailure)
            self.replied += not lost
            if reply.client in self.clients:
                self.clients[reply.client] = "lost" if lost else "replied"
            if isinstance(reply, ClientFailure) and len(self.lost) < NAMED:
                self.lost[reply.client] = reply.reason[:MAX_TEXT]
            self.changed = True

    def _write_until_end(self) -> None:
        last = -HEARTBEAT
        if self.end.wait(FIRST):
            return
        while True:
            now = time.monotonic()
            if self.changed or now - last >= HEARTBEAT or self.known["phase"] == "waiting":
                self._write()
                last = now
            if self.end.wait(EVERY):
                return

    def _write(self) -> None:
        try:
            write(self.path, (json.dumps(self._content()) + "\n").encode(), sync=False)
        except Exception as error:  # whatever it is, the run goes on
            self.failure = self.failure or str(error.__cause__ or error)

    def _content(self) -> dict[str, Any]:
        with self.lock:
            self.changed = False
            content = {**self.known, "updated": time.time()}
            if self.private:
                return {key: value for key, value in content.items() if key not in ("cohort", "online", "present")}
            more = {"asked": self.asked, "replied": self.replied, "clients": {**self.clients}, "lost": {**self.lost}}
        if self.connected is not None:
            present = list(self.connected())
            more |= {"online": len(present), "present": present[:NAMED]}
        return {**content, **more}


class ProgressEngine:
    """An engine that tells a ProgressFile what happens.

    Args:
        engine: The engine that trains the clients.
        progress: The file.
    """

    def __init__(self, engine: Engine, progress: ProgressFile) -> None:
        self.engine, self.progress = engine, progress

    def clients(self) -> Sequence[str]:
        progress = self.progress
        before = progress.known["phase"]
        progress.update(phase="waiting")
        progress.begin()
        names = self.engine.clients()
        progress.update(phase=before, online=len(names))
        return names

    def train(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in self.engine.train(self._asked(jobs)):
            self.progress.receive(reply)
            yield reply
        self.progress.update(phase="evaluating")

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs, on)

    def _asked(self, jobs: Iterable[Job]) -> Iterator[Job]:
        progress = self.progress
        for place, job in enumerate(jobs):
            if not place:
                progress.begin_round(job.round, progress.run.cohort_size(progress.known["online"]))
            progress.ask(job.client)
            yield job


@contextmanager
def record_progress(
    engine: Engine, folder: Path, run: Run, private: bool, connected: Connected | None = None
) -> Iterator[Engine]:
    """Record the progress of the rounds that run in this context with the returned engine.

    Args:
        engine: The engine.
        folder: The run folder.
        run: The run.
        private: Whether the run has a privacy guarantee.
        connected: Returns the clients that are connected, if they are remote.
    """
    progress = ProgressFile(folder, run, private, connected)
    try:
        yield ProgressEngine(engine, progress)
    except Exception as error:
        # Under privacy, an error may quote values.
        progress.close("failed", type(error).__name__ if private else f"{type(error).__name__}: {error}")
        raise
    except BaseException:
        progress.close("stopped")
        raise
    progress.close("finished")
