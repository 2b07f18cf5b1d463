"""The checks of a site, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partita.site.doctor.checks import Check, Examined, Finding, run_checks
from partita.site.doctor.consent import check_log, check_policy
from partita.site.doctor.data import check_classes, check_data, check_lengths, check_model, check_rows
from partita.site.doctor.files import check_experiment, check_key, check_settings, check_state
from partita.site.doctor.machine import check_device, check_disk, check_memory, check_versions
from partita.site.doctor.network import check_certificate, check_clock, check_port
from partita.site.doctor.rehearsal import check_rehearsal

NETWORK = ("port", "certificate", "clock")
CHECKS = (
    Check("settings", (), check_settings),
    Check("experiment", ("settings",), check_experiment),
    Check("versions", ("settings",), check_versions),
    Check("key", ("settings",), check_key),
    Check("state", ("settings",), check_state),
    Check("port", ("settings",), check_port),
    Check("certificate", ("port",), check_certificate),
    Check("clock", ("certificate",), check_clock),
    Check("device", ("experiment",), check_device),
    Check("data", ("experiment",), check_data),
    Check("rows", ("data",), check_rows),
    Check("classes", ("data",), check_classes),
    Check("lengths", ("data",), check_lengths),
    Check("model", ("device", "data"), check_model),
    Check("policy", ("model",), check_policy),
    Check("log", ("state",), check_log),
    Check("disk", ("model",), check_disk),
    Check("memory", ("model",), check_memory),
    Check("rehearsal", ("rows", "state", "disk"), check_rehearsal),
)


def examine(path: Path, offline: bool = False) -> Iterator[Finding]:
    """Examine a site and yield each finding as soon as it is known.

    Args:
        path: The file `site.toml`, or its folder.
        offline: Leave out the checks that connect to the server.
    """
    yield from run_checks((check for check in CHECKS if not offline or check.name not in NETWORK), Examined(path))
