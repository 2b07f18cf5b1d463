"""Checks of the site's folder: settings, experiment, node key, state."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from partita.experiment.config import Config, shared_digest
from partita.experiment.flower_app import as_one_site
from partita.site.config import SiteConfig, load_site
from partita.site.doctor.checks import Examined, Outcome, failed, ok, warning
from partita.site.own_experiment import own_settings
from partita.site.policy import load_policy


def check_settings(examined: Examined) -> Outcome:
    """Read `site.toml`."""
    examined.found_site = site = load_site(examined.path)
    return ok(f"site '{site.name}' of the server {site.server.address}")


def check_experiment(examined: Examined) -> Outcome:
    """Read the experiment with the site's own settings."""
    examined.found_config = config = load_approved(examined.site)
    return ok(f"'{config.label}', digest {shared_digest(config)}, {config.rounds:,} rounds")


def load_approved(site: SiteConfig) -> Config:
    """Load the experiment as this site would run it. Own code runs only if the site's policy approves it.

    Raises:
        CodeRefused: If the experiment names code that the policy does not approve. It is not run.
    """
    _, config = own_settings(site, load_policy(site.policy_file))
    return as_one_site(config)


def check_key(examined: Examined) -> Outcome:
    """Check the private key of the SuperNode: it is secret, Flower can use it, and the public half fits."""
    key = examined.site.node_key
    if not key.is_file():
        return failed(f"there is no key {key}", "make it here with: sh make-keys.sh")
    if key.stat().st_mode & 0o077:
        return failed(f"other users can read {key}", f"run: chmod 600 {key}")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    remedy = f"make a key without a passphrase: ssh-keygen -t ecdsa -b 384 -N '' -f {key}"
    try:
        private = load_ssh_private_key(key.read_bytes(), password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return failed(f"{key} is no private SSH key, or has a passphrase, which Flower cannot ask for", remedy)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        return failed(f"{key} is a key of another kind than ECDSA, which Flower needs", remedy)
    public = key.with_name(f"{key.name}.pub")
    again = f"write it again with: ssh-keygen -y -f {key} > {public}"
    if not public.is_file():
        return warning(f"there is no {public.name}, which the server's operator registers", again)
    try:
        half = load_ssh_public_key(public.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        return failed(f"{public} is no public SSH key", again)
    if half != private.public_key():
        return failed(
            f"{public.name} is not the public half of {key.name}, so the server would refuse this site",
            f"{again}, and have the server's operator register it",
        )
    return ok(f"{key.name} is secret and fits {public.name} ({private.curve.name})")


def check_state(examined: Examined) -> Outcome:
    """Check that the state folder can be written, and that other users cannot read it."""
    folder = examined.site.state_folder
    if not folder.exists():
        parent = _existing(folder)
        if not os.access(parent, os.W_OK | os.X_OK):
            return failed(f"{folder} does not exist, and {parent} cannot be written", f"run: mkdir -m 700 {folder}")
        return ok(f"{folder.name}/ does not exist yet; the first run makes it")
    if not folder.is_dir():
        return failed(f"{folder} is not a folder", "remove it, or name another 'state' in site.toml")
    mode = folder.stat().st_mode
    if mode & 0o007:
        return failed(f"every user of this machine can open {folder}", f"run: chmod 700 {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
    except OSError as error:
        return failed(
            f"{folder} cannot be written ({error.strerror})", f"give it to the user that runs the site: chown {folder}"
        )
    if mode & 0o070:
        return warning(f"users of its group can open {folder}", f"run: chmod 700 {folder}")
    return ok(f"{folder.name}/ can be written, and only by this user")


def _existing(folder: Path) -> Path:
    """Return the nearest folder above that exists."""
    return next(parent for parent in folder.parents if parent.exists())
