"""Objects that a program hands over instead of files. A config names them by the digest of their content.

A run of objects is therefore recorded like every run. To resume, evaluate or export it, a program hands over the same
objects again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from partita.core.options import OptionError

PREFIX = "object:"


@dataclass(eq=False)
class Given:
    """An object that a program has handed over. It can be found as long as somebody holds this.

    Attributes:
        name: What a config calls it.
        value: The object.
        digest_of: Computes the digest of its content; None if it does not change.
        config: The config of transformers of the model that a tokenizer is for, once it is known.
    """

    name: str
    value: Any = field(repr=False)
    digest_of: Callable[[Any], str] | None = field(default=None, repr=False)
    config: Any = field(default=None, repr=False)


_HANDED_OVER: WeakValueDictionary[str, Given] = WeakValueDictionary()


def hand_over(value: Any, digest_of: Callable[[Any], str], changes: bool = False) -> Given:
    """Let configs name an object.

    Args:
        value: The object.
        digest_of: Computes the digest of its content.
        changes: Whether a program may change it later.

    Returns:
        The object with its name. Keep it, or the object cannot be found.
    """
    name = f"{PREFIX}{digest_of(value)}"
    given = _HANDED_OVER.setdefault(name, Given(name, value, digest_of if changes else None))
    given.value = value  # an earlier object of this content may have another one now
    return given


def is_given(path: object) -> bool:
    """Return whether a path names an object."""
    return isinstance(path, str) and path.startswith(PREFIX)


def origin(path: str | None) -> str:
    """Return where a model comes from: its path, or what a module that was handed over says; "" if unknown."""
    if not is_given(path):
        return path or ""
    value = given(path).value
    base = value.get_base_model() if hasattr(value, "get_base_model") else value
    return str(getattr(base, "name_or_path", None) or "")


def unchanged(path: object) -> Any:
    """Return the object that a path names, with the content that it had when it was handed over.

    Raises:
        OptionError: If this program has not handed it over, or has changed it since.
    """
    found = given(path)
    if found.digest_of is not None and f"{PREFIX}{found.digest_of(found.value)}" != found.name:
        raise OptionError(
            f"the program has changed '{path}' since it handed it over, such as by training it in place; hand over a "
            "copy: copy.deepcopy(model)"
        )
    return found.value


def given(path: object) -> Given:
    """Return the object that a path names.

    Raises:
        OptionError: If this program has not handed it over.
    """
    found = _HANDED_OVER.get(str(path))
    if found is None:
        raise OptionError(
            f"the run needs '{path}', an object that this program has not handed over; hand over the model and the "
            "data with which the run began: partita.load_run(folder, model=..., data=...), or partita.fit with resume"
        )
    return found
