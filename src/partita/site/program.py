"""`partita site run`: a SuperNode and the site's own executor, which runs no code that comes from the server."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import chdir
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from partita.engines.flower.local_deployment import QUIET, find_executable, free_ports, terminate
from partita.engines.flower.task_loop import answer_task, run_in_fork, serve_tasks
from partita.experiment.flower_app import modules_of
from partita.site.answering import answer, site_log
from partita.site.config import SiteConfig, check_files
from partita.site.consent import History
from partita.site.form import ConsentForm
from partita.site.own_experiment import load_terms, own_settings
from partita.site.policy import load_policy, policy_digest
from partita.site.toml_tables import SiteError
from partita.storage.processes import end_with_parent
from partita.storage.safe_text import printable

LOCK = "running.lock"
# Of the environment, the SuperNode and the executor keep these variables only.
KEPT = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HF_HOME",
    "HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy",
)  # fmt: skip
LOOPBACK = "127.0.0.1"
RECONNECT = 120.0  # seconds after the start in which a SuperNode that ends is started again
PAUSE = 10.0  # seconds before that


def restrict_environment(site: SiteConfig) -> None:
    """Drop all environment variables but a few, and turn off what Flower would send or install by itself.

    Call it before Flower is used: it reads some variables only once.
    """
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    # Flower's programs here talk to each other over the loopback interface; a proxy would see that.
    own = {"PATH": programs, "FLWR_HOME": str(site.state_folder / "flwr"), "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}
    os.environ.clear()
    os.environ.update({**kept, **QUIET, **own})


def run_site(site: SiteConfig) -> int:
    """Take part in the experiment until this process is asked to stop.

    Args:
        site: The site's settings.

    Returns:
        The exit status: 1 if the policy does not cover the experiment, or else that of the SuperNode.

    Raises:
        SiteError: If a file is missing, or the site runs already.
        LogError: If the log is damaged.
    """
    check_files(site)
    site.state_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with FileLock(site.state_folder / LOCK, blocking=False, fallback_to_soft=False):
            return _run_locked(site)
    except Timeout as error:
        raise SiteError(f"the site in {site.folder} runs already; stop that one first") from error


def _run_locked(site: SiteConfig) -> int:
    log = site_log(site)
    about = {"policy": policy_digest(site.policy_file), "server": site.server.address}
    log.append("started", **about, versions={name: version(name) for name in ("partita", "flwr", "torch")})
    # In a fork: a process that has used a GPU cannot fork for the messages later.
    if run_in_fork(lambda: _require_consent(site)):
        return 1
    prepare_forks(site)
    end = time.monotonic() + RECONNECT
    try:
        while (status := _serve(site)) and time.monotonic() < end:
            print(
                f"the SuperNode ended with {status}. If this site was killed a moment ago, the server still counts it "
                f"as connected; trying again in {PAUSE:g} s",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(PAUSE)
    finally:
        log.append("stopped")
    return status


def prepare_forks(site: SiteConfig) -> None:
    """Import what the experiment needs, and load its own code, so that forks for messages find it.

    Code that uses a GPU as it is loaded, such as a Trainer's, is loaded in each fork alone.
    """
    with tempfile.TemporaryDirectory(prefix="partita-site-") as folder:
        found = Path(folder, "modules")
        if run_in_fork(lambda: _find_modules(site, found)):
            raise SiteError("the experiment's own code cannot be loaded; the message above says why")
        uses_gpu, *modules = found.read_text().splitlines()
    for module in modules:
        import_module(module)
    if not uses_gpu:
        with chdir(site.folder):
            own_settings(site, load_policy(site.policy_file))


def _find_modules(site: SiteConfig, found: Path) -> None:
    """Write whether the experiment's own code uses a GPU as it is loaded, and the modules that it needs."""
    with chdir(site.folder):
        modules = modules_of(own_settings(site, load_policy(site.policy_file))[1])
    found.write_text("\n".join(["GPU" if torch.cuda.is_initialized() else "", *modules]))


def _serve(site: SiteConfig) -> int:
    """Answer messages until the SuperNode ends. Returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="partita-site-") as folder:  # only this user can read it
        secret = secrets.token_bytes(32)
        secret_file = Path(folder, "secret")
        secret_file.write_bytes(secret)
        [port] = free_ports(1)
        address = f"{LOOPBACK}:{port}"
        node = subprocess.Popen(
            supernode_command(site, port, secret_file, os.environ), process_group=0, preexec_fn=end_with_parent
        )
        try:
            serve_tasks(
                address,
                secret,
                lambda token, kind: answer_task(address, token, kind, lambda task: answer(site, task)),
                lambda: node.poll() is None,
            )
        finally:
            terminate([node])
    return node.returncode or 0


def supernode_command(site: SiteConfig, port: int, secret_file: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the command of the SuperNode.

    With the isolation "process" it starts no program itself, and gives tasks to the holder of the secret only.

    Args:
        site: The site's settings.
        port: The port on the loopback interface on which it gives tasks.
        secret_file: The file with the secret.
        environment: The environment in which the program is found.
    """
    return [
        find_executable("flower-supernode", environment),
        *("--superlink", site.server.address),
        *("--root-certificates", str(site.root_certificates)),
        *("--auth-supernode-private-key", str(site.node_key)),
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(secret_file)),
        *("--host", LOOPBACK, "--port", str(port)),
    ]


def consent_form(site: SiteConfig, all_names: bool = False) -> ConsentForm:
    """Build the site's experiment from its own files and data, and compare it with the policy.

    Args:
        site: The site's settings.
        all_names: Whether to name every parameter.
    """
    policy = load_policy(site.policy_file)
    return ConsentForm(site, policy, load_terms(site, policy), History(site_log(site).lines()), all_names)


def _require_consent(site: SiteConfig) -> None:
    """Print the consent form. Exit with 1 if the policy refuses a part of it."""
    try:
        form = consent_form(site)
        print(form.to_text(), flush=True)
        reasons = form.refusals()
    except (ValueError, OSError) as error:
        reasons = [printable(error)]
    if reasons:
        reason = f"the site does not start: {reasons[0]}"
        print(reason, file=sys.stderr)
        site_log(site).append("refused", reason=reason)
        sys.exit(1)
