"""The experiment of a site, loaded from its own files. Own code that the policy does not list is never run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

from partita.core.options import format_value
from partita.engines.flower.site import Site
from partita.experiment.config import Config, apply_override, read_toml, shared_digest
from partita.experiment.config_code import anchored, code_digests
from partita.experiment.flower_app import as_one_site, open_site, site_experiment, site_settings
from partita.site.config import SiteConfig
from partita.site.policy import Policy, load_policy
from partita.site.terms import Terms


class CodeRefused(ValueError):
    """The experiment names own code that the policy does not list."""


def unapproved_code(site: SiteConfig, policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of own code that the policy does not list. Nothing is run to find it."""
    raw = anchored(read_toml(site.experiment_file), site.experiment_file.parent)
    for change in site.changes:
        apply_override(raw, change)
    for key, digest in code_digests(anchored(raw, Path())).items():
        if digest not in policy.code:
            yield key, digest


def own_settings(site: SiteConfig, policy: Policy) -> tuple[Config, Config]:
    """Load the experiment as all parties share it, and as it is at this site. This runs own code that it names.

    Raises:
        CodeRefused: If it names own code that the policy does not list.
    """
    for key, digest in unapproved_code(site, policy):
        raise CodeRefused(
            f"custom code {format_value(key)}: code in the policy does not list its digest, {digest}; read the file, "
            "and to approve it, run 'partita site approve'"
        )
    return site_settings(site.experiment_file, site.name, (), site.changes)


def load_approved(site: SiteConfig) -> Config:
    """Load the experiment as this site runs it, by the code that its policy approves.

    Raises:
        CodeRefused: If the experiment names code that the policy does not approve. It is not run.
    """
    return as_one_site(own_settings(site, load_policy(site.policy_file))[1])


def load_terms(site: SiteConfig, policy: Policy) -> Terms:
    """Build the experiment from the site's own files and data. Nothing is written.

    Raises:
        CodeRefused: If it names own code that the policy does not list.
    """
    with chdir(site.folder):  # paths in the experiment and in [set] are relative to the site's folder
        shared, own = own_settings(site, policy)
        return Terms(site_experiment(site.name, own), shared_digest(shared), site.name)


def open_own_site(site: SiteConfig, policy: Policy) -> tuple[Site, Terms]:
    """Build the site as Flower's messages need it, with its state.

    Raises:
        CodeRefused: If the experiment names own code that the policy does not list.
    """
    with chdir(site.folder):
        opened, experiment = open_site(site.name, site.state_folder, *own_settings(site, policy), site.node_key)
    return opened, Terms(experiment, opened.config, site.name)
