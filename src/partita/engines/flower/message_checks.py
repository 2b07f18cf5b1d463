"""Validation of messages on both sides. Neither side trusts that the other runs partita."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from partita.core import tensors
from partita.core.client import ClientError, Job
from partita.core.model import Model
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run
from partita.core.tensors import Names, Slots
from partita.core.update import Update
from partita.engines.flower.messages import JobId, MessageError, SiteRequest, Size, first_unknown, printable_line
from partita.evaluation import Evaluator
from partita.evaluation.evaluator import OpenEvaluator, without_types
from partita.record.metric import Metric

MAX_ABS = 1e100  # largest number in a message: squares and sums of such numbers stay finite
MAX_ENTRY_BYTES = 256  # size of a tensor's header entry without its name
MAX_SCORES = 256  # in one message
SCORE_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
MAX_SLOTS = 8  # that a server sends besides the parameters


# ---- server


@dataclass(frozen=True)
class ExpectedReply:
    """What is known of a reply before its tensors are read. `core/update_checks.py` checks the update itself."""

    job_id: JobId
    most: Size

    def check(self, job_id: JobId) -> None:
        """Raise a MessageError if a reply belongs to another job."""
        if job_id != self.job_id:
            raise MessageError(
                f"it answers round {job_id.round} of client '{printable_line(job_id.client)}' in session "
                f"'{printable_line(job_id.session)}', not round {self.job_id.round} of '{self.job_id.client}' in "
                f"session '{self.job_id.session}'"
            )


def expected_reply(run: Run, model: Model, job: Job, session: str) -> ExpectedReply:
    """Compute which job id a reply must have, and how many bytes of tensors an honest update has at most."""
    plan = plan_for(run.method.plan, model, RoundInfo(job.round, run.rounds, job.client, job.signal))
    own = {slot for rule in run.method.client_rules for slot in rule.slots}
    # A transform may add slots, each smaller than the tensors it describes. The header has one entry per tensor.
    copies, entries = 1 + len(own) + len(run.method.transforms), 1 + len(own) + 4 * len(run.method.transforms)
    return ExpectedReply(JobId(job.round, job.client, session), _size(model, plan.up, copies, entries))


def largest_job(model: Model) -> Size:
    """Return how large the tensors of an honest job are at most: all parameters, and slots of the same names."""
    return _size(model, model.initial, 1 + MAX_SLOTS, 1 + MAX_SLOTS)


def _size(model: Model, names: Iterable[str], copies: int, entries: int) -> Size:
    """Return the size of some copies of these parameters, with that many entries of the header for each."""
    header = MAX_ENTRY_BYTES + entries * sum(len(name.encode()) + MAX_ENTRY_BYTES for name in names)
    return Size(header + copies * sum(model.initial[name].nbytes for name in names), header)


def check_scores(scores: Mapping[str, float], evaluator: Evaluator) -> None:
    """Raise a MessageError if a score is of an unknown metric or out of range."""
    if len(scores) > MAX_SCORES:
        raise MessageError(f"sent {len(scores)} scores; it must be at most {MAX_SCORES}")
    for name, value in scores.items():
        metric = _metric(evaluator, name)
        if metric is None:
            known = ", ".join(each.name for each in evaluator.metrics)
            raise MessageError(f"sent a score for the unknown metric '{printable_line(name)}'; known metrics: {known}")
        if not _is_valid_score(metric, value):
            raise MessageError(f"sent {value} for {name}; it must be {_range(metric)}")


def _metric(evaluator: Evaluator, name: str) -> Metric | None:
    """Return the metric of a score; None if it is unknown. A Trainer names its scores itself."""
    if isinstance(evaluator, OpenEvaluator) and SCORE_NAME.fullmatch(name):
        return evaluator.named(name)
    return next((metric for metric in evaluator.metrics if metric.name == name), None)


def _is_valid_score(metric: Metric, value: float) -> bool:
    return 0 <= value <= 1 if metric.fraction else abs(value) <= MAX_ABS


def _range(metric: Metric) -> str:
    return "a number from 0 to 1" if metric.fraction else f"a finite number up to {MAX_ABS:g}"


# ---- site


def valid_scores(scores: Mapping[str, float], evaluator: Evaluator) -> dict[str, float]:
    """Return the scores that may leave the site: those that can be recorded and averaged.

    A diverged model may have others. Scores of single entity types stay at the site.
    """
    metrics = {name: _metric(evaluator, name) for name in without_types(scores)}
    return {name: scores[name] for name, metric in metrics.items() if metric and _is_valid_score(metric, scores[name])}


def check_request(run: Run, model: Model, client: str, config: str, base: str, request: SiteRequest, done: int) -> Plan:
    """Validate a request at the site.

    Args:
        run: The site's run.
        model: The site's model.
        client: The site's client.
        config: Digest of the site's config.
        base: Digest of the site's frozen weights.
        request: The request.
        done: 1 if the job's round is over, as for an evaluation, else 0.

    Returns:
        The plan for the job, computed at the site.

    Raises:
        ClientError: If the request does not fit this run. The text gives the reason.
    """
    job_id = request.job_id
    if job_id.client != client:
        raise ClientError(client, f"this site is '{client}'; check the node config of both sites")
    if request.config != config:
        raise ClientError(
            client,
            f"the server's config has the digest '{printable_line(request.config)}', but the site's has "
            f"'{config}'; run the same app with the same run config on both sides (only data. and engine. "
            "keys may differ)",
        )
    if request.base != base:
        raise ClientError(
            client,
            f"the frozen weights of {model.name} have the digest '{_short(base)}' at the site and "
            f"'{_short(request.base)}' at the server; copy the files of model.path from the server to the site",
        )
    if not 0 <= job_id.round < run.rounds:
        raise ClientError(client, f"was asked for round {job_id.round}; this run has rounds 0 to {run.rounds - 1}")
    for what, number in (("void", request.void), ("settled", request.settled)):
        if not 0 <= number <= job_id.round + done:
            raise ClientError(
                client,
                f"was sent {what} = {number} in round {job_id.round}; it must be from 0 to {job_id.round + done}",
            )
    if not 0 < len(job_id.session) <= 100 or job_id.session != printable_line(job_id.session):
        raise ClientError(client, "was sent an invalid session; it must be 1 to 100 printable characters")
    known = _known_slots(run, model, client, request) if request.signal or request.slots else {}
    plan = plan_for(run.method.plan, model, RoundInfo(job_id.round, run.rounds, client, request.signal))
    _check_sent(request.sent, model.initial, plan.down, client, f"the plan of round {job_id.round} does not bring down")
    for slot, part in request.slots.items():
        like = {**model.initial, **known[slot]}
        _check_sent(part, like, plan.train, client, f"is not trained in round {job_id.round}")
    return plan


def _short(digest: str) -> str:
    return printable_line(digest)[:12] or "none"


def _known_slots(run: Run, model: Model, client: str, request: SiteRequest) -> Slots:
    """Return the slots that an honest server has before the first round. Signal and slots must have its names."""
    honest, _ = make_job(run, model, initial_server(run, model), request.job_id.round, client)
    for what, given, known in (("signal", request.signal, honest.signal), ("slot", request.slots, honest.slots)):
        if (unknown := first_unknown(given, known)) is not None:
            raise ClientError(
                client, f"was sent the {what} '{printable_line(unknown)}', which {run.method.name} does not know"
            )
    for name, number in request.signal.items():
        if not abs(number) <= MAX_ABS:
            raise ClientError(client, f"was sent {number} as the signal '{name}'; it must be a finite number")
    return honest.slots


def _check_sent(
    sent: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor], names: Names, client: str, why: str
) -> None:
    for name, value in sent.items():
        if name not in initial or initial[name].shape != value.shape:
            here = f"is {tuple(initial[name].shape)}" if name in initial else "does not exist"
            raise ClientError(
                client,
                f"the server's '{printable_line(name)}' is {tuple(value.shape)} and here it {here}; are model and "
                "classes the same?",
            )
        if value.dtype != initial[name].dtype:
            raise ClientError(client, f"the server's '{name}' is {value.dtype} and here it is {initial[name].dtype}")
        if name not in names:
            raise ClientError(client, f"the server sent '{name}', which {why}")
        if value.is_floating_point() and not math.isfinite(tensors.max_abs({name: value}).item()):
            raise ClientError(client, f"the server's '{name}' has values that are not finite")


def check_reply(update: Update, plan: Plan, client: str) -> None:
    """Check at the site, before an update leaves, that it holds only parameters that the plan sends up.

    Raises:
        ClientError: If the update holds another parameter, such as one that the client keeps.
    """
    for part in (update.delta, *update.slots.values()):
        if (unknown := first_unknown(part, plan.up)) is not None:
            raise ClientError(client, f"would send '{unknown}', which the plan of the round does not send up")
