"""What a config and its parts may contradict: checked once all parts are built, before the first round."""

from __future__ import annotations

import warnings

from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.settings import Run, RunError
from partita.data import Federation, Task
from partita.data.groups import groups_at_several_clients
from partita.experiment.config import Config
from partita.privacy.guard import PrivacyGuard
from partita.tasks.losses import CLASS_LOSSES
from partita.training.parameter_groups import parameter_groups


def check_class_loss(config: Config, task: Task) -> None:
    """Refuse options of the loss that the task's loss does not have."""
    given = [key for key in ("label_smoothing", "class_weights") if getattr(config.training, key)]
    if given and task.kind.loss not in CLASS_LOSSES:
        raise RunError(
            f"training.{given[0]} is for tasks in which a target is one class, not for a task of kind "
            f"'{task.kind.name}'; leave it out"
        )


def check_augmentation(config: Config, task: Task) -> None:
    """Refuse augmentation of what is no image, or of images that are cached."""
    if config.training.augment and task.kind.inputs != "image":
        raise RunError(f"training.augment is for images, not for a task of kind '{task.kind.name}'; leave it out")
    if config.training.augment and config.engine.cache_frozen:
        raise RunError(
            "training.augment and engine.cache_frozen are both set; a cache needs the same images in every round, so "
            "leave one of them out"
        )


def check_plan(run: Run, model: Model, client: str) -> None:
    """Compute the plan of the first and last round and the adaptation, so that errors come before any training."""
    for round in (0, run.rounds - 1):
        plan = plan_for(run.method.plan, model, RoundInfo(round, run.rounds, client))
        parameter_groups(run.training, model, plan.train)
    if run.method.adapt:
        run.method.adapt(model)


def check_unseen(config: Config, run: Run, model: Model, federation: Federation, guard: PrivacyGuard | None) -> None:
    """Refuse to train clients that take no part where that has no effect."""
    epochs = config.evaluate.unseen_epochs
    if not epochs:
        return
    if not federation.unseen:
        raise RunError(
            f"evaluate.unseen_epochs is {epochs}, but all clients take part; set split.unseen, or leave it out"
        )
    if not config.evaluate.personal_every:
        raise RunError(
            f"evaluate.unseen_epochs is {epochs}, but no client is tested on its own data; set "
            "evaluate.personal_every above 0, or leave it out"
        )
    if guard is not None and guard.withholds_own_scores:
        raise RunError(
            f"evaluate.unseen_epochs is {epochs}, but the privacy guarantee withholds the scores of clients' own "
            "models; leave it out, or set privacy.unit to 'example' with a method that fits nothing for the test"
        )
    if model.personal(model.initial) is not model.initial:
        # Copies and caches: the loss of plain training does not read them, so they have no gradient.
        raise RunError(
            f"evaluate.unseen_epochs is {epochs}, but clients of {run.method.name} are tested with a copy or a cache "
            "that only the method's own rounds fill; leave it out, or use a method that keeps a part of the model, "
            "such as fedper"
        )


def warn_shared_groups(federation: Federation, column: str | None) -> None:
    """Warn if a value of the group column is at several clients."""
    shared, total = groups_at_several_clients(federation)
    if shared:
        warnings.warn(
            f"{shared:,} of {total:,} values of column '{column}' have examples at several clients; the guarantee is "
            "for what one client has of a value, and its cost adds up over clients: use split.name = 'groups' with "
            "this column, or another split that keeps a value at one client",
            stacklevel=3,
        )


def warn_slow_bf16(times: float) -> None:
    """Warn if bfloat16 is slow on this machine."""
    if times > 2:
        warnings.warn(
            f"bfloat16 is about {times:.0f} times slower than float32 on this CPU; to try a run here, set "
            "training.precision and model.dtype to 'float32'",
            stacklevel=3,
        )
