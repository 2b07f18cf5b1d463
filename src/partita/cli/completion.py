"""What the shell completes: names of methods. It completes files itself."""

from __future__ import annotations


def complete_method(incomplete: str) -> list[str]:
    """Return the methods whose names begin like this."""
    from partita.methods import INDEX

    return [name for name in INDEX if name.startswith(incomplete)]


def complete_methods(incomplete: str) -> list[str]:
    """Complete the last of several methods: "fedavg,fedp" to "fedavg,fedprox" and others."""
    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in complete_method(last)]
