"""Checks of the settings, and of what the experiment needs: versions, data with the model, and the site's consent."""

from __future__ import annotations

import platform
import re
import warnings
from dataclasses import replace
from importlib.metadata import version

from partita.experiment.config import shared_digest
from partita.experiment.flower_app import site_experiment
from partita.site.answering import site_log
from partita.site.config import load_site
from partita.site.consent import History
from partita.site.description.record import CLASSES_FILE, read_classes
from partita.site.doctor.checks import Examined, Outcome, failed, ok
from partita.site.form import ConsentForm
from partita.site.own_experiment import load_approved
from partita.site.policy import load_policy
from partita.site.terms import Terms

# The versions that the group agreed on, as pip reads them: name==version. The first of these that exists counts.
LOCKS = ("image/requirements.lock", "image/requirements.txt")
PACKAGES = ("partita", "torch", "transformers", "flwr")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)


def check_settings(examined: Examined) -> Outcome:
    """Read `site.toml`."""
    examined.site = site = load_site(examined.path)
    return ok(f"site '{site.name}' of the server {site.server.address}")


def check_versions(examined: Examined) -> Outcome:
    """Compare the installed versions with those that the group agreed on. Builds, such as "+cpu", may differ."""
    here = {name: version(name) for name in PACKAGES}
    shown = ", ".join((f"Python {platform.python_version()}", *(f"{name} {found}" for name, found in here.items())))
    lock = next((name for name in LOCKS if (examined.site.folder / name).is_file()), None)
    if lock is None:
        return ok(f"{shown}; there is no {LOCKS[0]} to compare with")
    agreed = pinned((examined.site.folder / lock).read_text(encoding="utf-8"))
    for name, found in here.items():
        if found.partition("+")[0] != agreed.get(name, found).partition("+")[0]:
            return failed(
                f"{name} is {found} here, and the group agreed on {agreed[name]}",
                f"install what {lock} names: pip install -r {lock}",
            )
    return ok(f"{shown}, as in {lock}")


def pinned(lock: str) -> dict[str, str]:
    """Return the version of each package that a lock file pins, by its normalized name."""
    return {re.sub(r"[-_.]+", "-", name).lower(): found for name, found in _PIN.findall(lock)}


def check_experiment(examined: Examined) -> Outcome:
    """Read the experiment with the site's own settings."""
    examined.config = config = load_approved(examined.site)
    return ok(f"'{config.label}', digest {shared_digest(config)}, {config.rounds:,} rounds")


def check_data(examined: Examined) -> Outcome:
    """Load the data as a round would, build the model on its device, and compare the classes with the group's."""
    config, site = examined.config, examined.site
    # The rehearsal must not draw from the secret of real rounds.
    config = replace(config, engine=replace(config.engine, secret_file=None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning may quote data
        examined.experiment = experiment = site_experiment(site.name, config)
    rows, classes = len(experiment.federation[site.name].train), experiment.federation.task.classes
    if not rows:
        return failed("there are no rows to train on", "check data.path in [set] of site.toml")
    file = site.folder / CLASSES_FILE
    if file.exists() and classes != (agreed := read_classes(file)):
        here, there = (", ".join(f"'{name}'" for name in names) for names in (classes, agreed))
        return failed(
            f"the classes here are {here}; those of {CLASSES_FILE} are {there}",
            "rename the labels here, so that names and order are the same at all sites",
        )
    shown = f"{rows:,} rows to train on, {len(classes)} classes{f' as in {CLASSES_FILE}' * file.exists()}"
    return ok(f"{shown}; {experiment.model.name} on {experiment.device.type}")


def check_policy(examined: Examined) -> Outcome:
    """Check that the policy covers all lines of the consent form, and that the log is intact."""
    site, experiment = examined.site, examined.experiment
    terms, policy = Terms(experiment, shared_digest(experiment.config), site.name), load_policy(site.policy_file)
    if refusals := ConsentForm(site, policy, terms, History(site_log(site).lines())).refusals():
        return failed(refusals[0], "read all lines with: partita site plan")
    return ok(f"{site.policy_file.name} covers the experiment")
