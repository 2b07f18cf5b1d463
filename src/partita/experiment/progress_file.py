"""Progress of a run within its round: for a caller that counts replies, and in a file that `partita watch` reads."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from partita.core.client import Job
from partita.core.rounds import ClientFailure, Listener, Reply, RoundResult
from partita.core.settings import Run
from partita.core.update import MaskedUpdate, SecureSum, Update
from partita.record.file_names import PROGRESS
from partita.storage.atomic_files import write
from partita.storage.processes import this_process

Phase = Literal["waiting", "training", "evaluating"]
Connected = Callable[[], Sequence[str]]
OnReply = Callable[[int, int], None]  # gets the number of replies in this round so far, and the size of the cohort

EVERY = 1.0  # seconds between two writes, if something has changed
FIRST = 0.2  # seconds before the first write: clients that are here already are not waited for
HEARTBEAT = 10.0  # seconds between two writes if nothing has changed
NAMED = 200  # maximum number of clients that the file names
MAX_TEXT = 300  # characters of a reason or an error
RECENT = 5  # rounds whose time counts for the time that a round takes


class ReplyCounter(Listener):
    """Counts the clients that have replied. Replies of one block of clients arrive together.

    Args:
        on_reply: Called at the start of a round, and for each reply.
    """

    def __init__(self, on_reply: OnReply) -> None:
        self.on_reply, self.count, self.cohort = on_reply, 0, 0

    def begins(self, number: int, clients: int, cohort: int) -> None:
        self.count, self.cohort = 0, cohort
        self.on_reply(0, cohort)

    def receives(self, reply: Reply) -> None:
        if not isinstance(reply, SecureSum):  # it is the server's, not a client's
            self.count += 1
            self.on_reply(self.count, self.cohort)


class ProgressFile(Listener):
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

    def waits(self) -> None:
        self.update(phase="waiting")
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

    def begins(self, number: int, clients: int, cohort: int) -> None:
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
            self.known |= {"phase": "training", "online": clients, "round": number, "cohort": cohort}
            self.known["started"] = time.time()
            if len(self.starts) > 1:
                self.known["pace"] = (self.starts[-1] - self.starts[0]) / (len(self.starts) - 1)
            self.changed = True

    def asks(self, job: Job) -> None:
        with self.lock:
            self.asked += 1
            if len(self.clients) < NAMED:
                self.clients[job.client] = "asked"
            self.changed = True

    def receives(self, reply: Reply) -> None:
        # A reply that is something else is left to the server's checks.
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

    def ends(self, result: RoundResult) -> None:
        self.update(phase="evaluating")

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


@contextmanager
def record_progress(
    folder: Path, run: Run, private: bool, connected: Connected | None = None
) -> Iterator[ProgressFile]:
    """Record the progress of the rounds that run in this context with the returned listener.

    Args:
        folder: The run folder.
        run: The run.
        private: Whether the run has a privacy guarantee.
        connected: Returns the clients that are connected, if they are remote.
    """
    progress = ProgressFile(folder, run, private, connected)
    try:
        yield progress
    except Exception as error:
        # Under privacy, an error may quote values.
        progress.close("failed", type(error).__name__ if private else f"{type(error).__name__}: {error}")
        raise
    except BaseException:
        progress.close("stopped")
        raise
    progress.close("finished")
