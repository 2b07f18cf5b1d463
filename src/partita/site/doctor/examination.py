"""The checks of a site, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partita.site.doctor.checks import Check, Examined, Finding, run_checks
from partita.site.doctor.experiment import check_data, check_experiment, check_policy, check_settings, check_versions
from partita.site.doctor.files import check_key, check_state
from partita.site.doctor.network import check_clock, check_server
from partita.site.doctor.rehearsal import check_rehearsal

NETWORK = ("server", "clock")
CHECKS = (
    Check("settings", (), check_settings),
    Check("versions", ("settings",), check_versions),
    Check("key", ("settings",), check_key),
    Check("state", ("settings",), check_state),
    Check("server", ("settings",), check_server),
    Check("clock", ("server",), check_clock),
    Check("experiment", ("settings",), check_experiment),
    Check("data", ("experiment",), check_data),
    Check("policy", ("data", "state"), check_policy),
    Check("rehearsal", ("data", "state"), check_rehearsal),
)


def examine(path: Path, offline: bool = False) -> Iterator[Finding]:
    """Examine a site and yield each finding as soon as it is known.

    Args:
        path: The file `site.toml`, or its folder.
        offline: Leave out the checks that connect to the server.
    """
    yield from run_checks((check for check in CHECKS if not offline or check.name not in NETWORK), Examined(path))
