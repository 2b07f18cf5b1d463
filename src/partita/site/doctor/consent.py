"""Checks of what the site allows: its policy covers the experiment, and its log is intact."""

from __future__ import annotations

from partita.experiment.config import shared_digest
from partita.site.answering import site_log
from partita.site.consent import History
from partita.site.doctor.checks import Examined, Outcome, failed, ok
from partita.site.form import ConsentForm
from partita.site.policy import load_policy
from partita.site.terms import Terms


def check_policy(examined: Examined) -> Outcome:
    """Check that the policy covers all lines of the consent form."""
    site, experiment = examined.site, examined.experiment
    terms = Terms(experiment, shared_digest(experiment.config), site.name)
    form = ConsentForm(site, load_policy(site.policy_file), terms, History(site_log(site).lines()))
    if refusals := form.refusals():
        return failed(refusals[0], "read all lines with: partita site plan")
    return ok(f"{site.policy_file.name} covers the experiment")


def check_log(examined: Examined) -> Outcome:
    """Check the chain of the site's log."""
    log = site_log(examined.site)
    return ok(log.verify()) if log.path.exists() else ok("nothing has left this site yet")
