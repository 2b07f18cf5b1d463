"""The option `--round` of commands that read a model from a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partita.experiment.recorded_model import RoundChoice


def parse_round(text: str) -> RoundChoice:
    """Return "best", "last" or a number of finished rounds.

    Raises:
        OptionError: If the text is neither.
    """
    if text == "best":
        return "best"
    if text == "last":
        return "last"
    if not text.isdecimal() or not text.isascii() or not int(text):
        from partita.core.options import OptionError

        raise OptionError(f"--round is '{text}'; give 'best', 'last' or a number of finished rounds from 1 up")
    return int(text)
