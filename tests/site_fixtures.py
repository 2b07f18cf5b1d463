"""A site's folder for tests, and messages of a server to it, all within one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flower_fixtures import through_bytes
from flwr.app import Context, Message, RecordDict
from helpers import SMALL_TASK

from partita.core.client import Job
from partita.core.rounds import initial_server, make_job
from partita.core.tensors import Tensors
from partita.engines.flower import messages
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.task_loop import ANSWERED, Task
from partita.experiment.config import load
from partita.site.answering import answer, site_log
from partita.site.config import SiteConfig, load_site
from partita.site.own_experiment import load_terms
from partita.site.policy import LeaveTable, Policy
from partita.site.site_log import SiteLog
from partita.site.terms import Terms

EXPERIMENT = (
    """
rounds = 4
label = "wards"
method = {{name = "{method}"}}
[model]
name = "{model}"
[evaluate]
personal_every = 0
[federation]
skip_failed_clients = true
"""
    + SMALL_TASK
    + "test_examples = 20\nclasses = 3\n"
)
MODEL = Path(__file__).with_name("plain_model.py")
NOON = datetime(2026, 11, 16, 12)  # a Monday


@dataclass(frozen=True)
class SiteKit:
    """A site's folder.

    Attributes:
        folder: The folder.
        clock: The site's local time.
    """

    folder: Path
    clock: Callable[[], datetime] = lambda: NOON

    @property
    def site(self) -> SiteConfig:
        return load_site(self.folder)

    @property
    def log(self) -> SiteLog:
        return site_log(self.site)

    @property
    def terms(self) -> Terms:
        """The experiment, whatever the policy says."""
        code = tuple(load(self.site.experiment_file).code.values())
        return load_terms(self.site, Policy(LeaveTable(()), code=code))

    def kinds(self) -> list[str]:
        return [line["kind"] for line in self.log.lines()]

    def allow(self, text: str = '[leave]\nroles = ["*"]\n', approve: bool = True) -> None:
        """Write the policy. The code is approved, and so is the experiment unless `approve` is false."""
        config = load(self.site.experiment_file)
        lists = {"code": list(config.code.values()), "experiments": [self.terms.digest] if approve else []}
        head = "".join(f"{key} = {values!r}\n" for key, values in lists.items())
        self.site.policy_file.write_text(head.replace("'", '"') + text)

    def order(
        self,
        number: int = 0,
        change: Callable[[Job], Job] = lambda job: job,
        params: Tensors | None = None,
        **more: Any,
    ) -> RecordDict:
        """An honest server's job, with changes; `more` are entries of the job's record."""
        terms = self.terms
        run, model = terms.experiment.run, terms.experiment.model
        job, _ = make_job(run, model, initial_server(run, model), number, "c1")
        job = change(replace(job, params=params or job.params))
        about = {"session": "1", "config": terms.digest, "base": "", "void": 0, "settled": 0} | more
        return messages.encode_job(job, Fingerprints()(job.params), **about)

    def send(
        self,
        content: RecordDict,
        kind: str = "train",
        task: str = ANSWERED,
        app: str = "ab",
        run_config: dict[str, Any] | None = None,
    ) -> RecordDict:
        """The site's reply to a message that went through its serialized form."""
        message = through_bytes(Message(content, 1, kind))
        context = Context(1, 1, {}, RecordDict(), run_config or {})
        return answer(self.site, Task(task, message, context, app), self.clock).content


def write_site(folder: Path, method: str = "fedavg", more: str = "", model: Path | None = None) -> SiteKit:
    """Write the folder of site c1."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model or folder / MODEL.name
    if not model.exists():
        model.write_bytes(MODEL.read_bytes())
    text = EXPERIMENT.format(method=method, model=f"{model.name}:plain")
    (folder / "experiment.toml").write_text(text + more)
    (folder / "site.toml").write_text('name = "c1"\n[server]\naddress = "127.0.0.1:8765"\n')
    kit = SiteKit(folder)
    kit.allow()
    return kit


def refused(reply: RecordDict) -> str:
    """The text of a refusal."""
    error = messages.decode_error(reply)
    assert error is not None, "the job was answered"
    return error.reason
