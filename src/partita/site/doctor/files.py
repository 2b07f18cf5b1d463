"""Checks of the site's key and of its state folder."""

from __future__ import annotations

import os

from partita.site.doctor.checks import Examined, Outcome, failed, ok


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

    try:
        private = load_ssh_private_key(key.read_bytes(), password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        return failed(
            f"{key} is no private SSH key of the kind ECDSA without a passphrase, which Flower needs",
            f"make one: ssh-keygen -t ecdsa -b 384 -N '' -f {key}",
        )
    public = key.with_name(f"{key.name}.pub")
    try:
        fits = load_ssh_public_key(public.read_bytes()) == private.public_key()
    except (OSError, ValueError, UnsupportedAlgorithm):
        fits = False
    if not fits:
        return failed(
            f"{public.name} is not the public half of {key.name}, so the server would refuse this site",
            f"write it with: ssh-keygen -y -f {key} > {public}, and have the server's operator register it",
        )
    return ok(f"{key.name} is secret and fits {public.name} ({private.curve.name})")


def check_state(examined: Examined) -> Outcome:
    """Check that the state folder can be written, and that other users cannot open it."""
    folder = examined.site.state_folder
    place = folder if folder.exists() else next(parent for parent in folder.parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return failed(f"{place} is no folder that can be written", f"give it to this user, or make {folder} there")
    if place == folder and folder.stat().st_mode & 0o077:
        return failed(f"other users of this machine can open {folder}", f"run: chmod 700 {folder}")
    return ok(f"{folder.name}/ can be written, and only by this user")
