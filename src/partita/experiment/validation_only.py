"""Configs for tuning: runs that are scored on validation examples and never touch a test set."""

from __future__ import annotations

from dataclasses import replace

from partita.experiment.config import Config


def validation_only(config: Config, metric: str | None, disclose: bool) -> Config:
    """Return a config that is scored on validation and never touches a test set.

    Args:
        config: The config.
        metric: The validation metric. None: that of the config.
        disclose: Whether clients of a private run report their validation scores.
    """
    evaluate = replace(
        config.evaluate,
        every=0,
        personal_every=0,
        samples=0,
        subgroups=None,
        subgroup_min=None,
        validation_every=config.validation_every or 1,
        validation_metric=metric or config.evaluate.validation_metric,
    )
    privacy = config.privacy and replace(config.privacy, disclose_validation=disclose)
    return replace(config, evaluate=evaluate, privacy=privacy)
