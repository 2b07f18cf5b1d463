"""The error of methods that cannot be built or run."""

from __future__ import annotations


class MethodError(ValueError):
    """The method cannot be built, composed or run with these settings."""
