"""Sample answers of a run: some test examples in full, with what the model generates before and after training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.core import tensors
from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.settings import Run, RunError
from partita.core.tensors import Tensors
from partita.data import Task
from partita.evaluation import sample_texts
from partita.tasks import CHAT, CHOICE, SEQ2SEQ

if TYPE_CHECKING:
    from partita.experiment.builder import Experiment

WRITERS = (CHAT, CHOICE, SEQ2SEQ)  # kinds whose examples have a text to write
MAX_NEW_TOKENS = 64


def check_samples(count: int, run: Run, model: Model, task: Task, client: str) -> None:
    """Raise a RunError if answers cannot be sampled.

    Args:
        count: `evaluate.samples`.
        run: The run.
        model: The model.
        task: The task.
        client: Any client.
    """
    if not count:
        return
    if task.kind not in WRITERS:
        raise RunError(
            f"evaluate.samples is {count}, but a task of kind '{task.kind.name}' generates no text; leave it out, or "
            "use data.name = 'chat' or 'seq2seq'"
        )
    plans = [plan_for(run.method.plan, model, RoundInfo(round, run.rounds, client)) for round in (0, run.rounds - 1)]
    if any(plan.keep for plan in plans) or run.method.adapt is not None:
        raise RunError(
            f"evaluate.samples is {count}, but with {run.method.name} every client has a model of its own, and samples "
            "are answers of a model that all share; leave it out"
        )


def sample_answers(experiment: Experiment, params: Tensors) -> list[dict[str, Any]]:
    """Return the samples: "prompt", "reference", and the answers "before" and "after" training.

    Args:
        experiment: The experiment.
        params: The server's parameters after training.
    """
    wanted, model, test = experiment.config.evaluate, experiment.model, experiment.federation.test
    initial = tensors.to(model.initial, experiment.device)
    before, after = (
        sample_texts(model, each, test, wanted.samples, wanted.max_new_tokens or MAX_NEW_TOKENS)
        for each in (initial, params)
    )
    return [
        {"prompt": prompt, "reference": reference, "before": old, "after": new}
        for (prompt, reference, old), (_, _, new) in zip(before, after, strict=True)
    ]
