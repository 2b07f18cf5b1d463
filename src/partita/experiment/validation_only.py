"""Configs that are scored on the clients' validation parts only, to choose settings."""

from __future__ import annotations

from dataclasses import replace

from partita.core.options import OptionError
from partita.experiment.config import Config


def without_test(config: Config, metric: str | None = None, disclose_validation: bool = False) -> Config:
    """Return a config that is scored on validation and never touches a test set.

    Args:
        config: The config.
        metric: The metric on validation. Default: the config's own.
        disclose_validation: Whether a private run may report exact scores on validation.
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
    privacy = config.privacy and replace(config.privacy, disclose_validation=disclose_validation)
    return replace(config, evaluate=evaluate, privacy=privacy)


def check_validation(config: Config, disclose_validation: bool = False) -> None:
    """Check that a config can be scored on validation.

    Args:
        config: The config.
        disclose_validation: Whether the user accepts that a private run reports exact scores on validation.

    Raises:
        OptionError: If it holds out no validation examples, or is private and may not report scores on them.
    """
    if config.privacy and (config.privacy.unit == "client" or not disclose_validation):
        accept = "" if config.privacy.unit == "client" else ", or accept that with --disclose-validation"
        raise OptionError(
            "tuning reads exact scores on the clients' validation examples, which the guarantee of [privacy] does not "
            f"cover; tune on public data of the same kind{accept}"
        )
    if disclose_validation and not config.privacy:
        raise OptionError("--disclose-validation is for a config with a table [privacy]; leave it out")
    if not config.split["validation"]:
        raise OptionError(
            "split.validation is 0, so no client has validation examples to tune on; set it, e.g. with "
            "--set split.validation=0.1"
        )
    if config.validation_every > config.rounds:
        raise OptionError(
            f"evaluate.validation_every is {config.validation_every}, but there are only {config.rounds} rounds; "
            "lower it, or leave it out"
        )
