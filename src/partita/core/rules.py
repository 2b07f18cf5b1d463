"""Tables of rules: which settings do not go together, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from partita.core.options import format_value

TASK, METHOD, UNIT = "the task", "method.name", "privacy.unit"  # what cannot be left out; a task's value is its kind
ANY = ...  # any value


@dataclass(frozen=True)
class Rule:
    """Settings that do not go together.

    Attributes:
        settings: The settings that meet, and the values that clash: True if it is set, False if not, one value, a tuple
            of them, or `ANY`. A table is a setting, such as "[privacy]". An error begins with the settings.
        why: Why they do not go together.
        remedy: What to do; by default, to leave one of them out.
        when: Whether they clash if the values alone do not say it. A text takes the place of `why`.
    """

    settings: Mapping[str, object]
    why: str
    remedy: str = ""
    when: Callable[[Any], object] | None = None

    @property
    def advice(self) -> str:
        """What to do."""
        first, second, *_ = self.settings
        return self.remedy or f"leave {first if second in (TASK, METHOD, UNIT) else 'one of them'} out"


def first_clash(rules: Iterable[Rule], parts: Any, read: Callable[[str], object]) -> str | None:
    """Return the error for the first rule that is broken; None if there is none.

    Args:
        rules: The rules.
        parts: What `Rule.when` takes.
        read: Returns the value of a setting; None if it is not set.
    """
    for rule in rules:
        if all(_is(read(key), wanted) for key, wanted in rule.settings.items() if wanted is not ANY):
            found = rule.when(parts) if rule.when else True
            if found:
                said = " and ".join(_said(key, read(key)) for key in rule.settings)
                return f"{said}: {found if isinstance(found, str) else rule.why}; {rule.advice}"
    return None


def _is(value: object, wanted: object) -> bool:
    if isinstance(wanted, bool):
        return bool(value) == wanted
    return value in wanted if isinstance(wanted, tuple) else value == wanted


def _said(key: str, value: object) -> str:
    if value is None:
        return f"{key} is not set"
    if key.startswith("["):
        return f"{key} is set"
    if key == TASK:
        return f"{key} is of kind '{value}'"
    if isinstance(value, bool):
        return f"{key} is {str(value).lower()}"
    return f"{key} is {format_value(list(value) if isinstance(value, tuple) else value)}"
