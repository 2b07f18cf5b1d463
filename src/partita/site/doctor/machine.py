"""Checks of the machine: versions, device, disk and memory."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from partita.core import memory
from partita.core.plan import RoundInfo, plan_for
from partita.experiment.experiment import Experiment
from partita.site.doctor.checks import Examined, Outcome, failed, ok, warning

# The versions that the group agreed on, as pip reads them: name==version. The first of these that exists counts.
LOCKS = ("image/requirements.lock", "image/requirements.txt")
PACKAGES = ("partita", "torch", "transformers", "flwr")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)
STATES = 4  # files of a client's state: those that the last two checkpoints need, the newest, and one being written
COPIES = 2  # files of what the site was sent: one, and one being written
WIRE = 12  # bytes of memory for each byte of an update, over all processes of a site, as measured


def check_versions(examined: Examined) -> Outcome:
    """Compare the installed versions with those that the group agreed on."""
    here = {name: _installed(name) for name in PACKAGES}
    if absent := [name for name, found in here.items() if found is None]:
        return failed(f"{absent[0]} is not installed", "install it with: pip install 'partita[flower]'")
    shown = ", ".join(f"{name} {found}" for name, found in here.items())
    shown = f"Python {platform.python_version()}, {shown}"
    lock = next((name for name in LOCKS if (examined.site.folder / name).is_file()), None)
    if lock is None:
        return ok(f"{shown}; there is no {LOCKS[0]} to compare with")
    agreed = pinned((examined.site.folder / lock).read_text(encoding="utf-8"))
    for name, found in here.items():
        wanted = agreed.get(name)
        if wanted is not None and _public(str(found)) != _public(wanted):
            return failed(
                f"{name} is {found} here, and the group agreed on {wanted}",
                f"install what {lock} names: pip install -r {lock}",
            )
    return ok(f"{shown}, as in {lock}")


def pinned(lock: str) -> dict[str, str]:
    """Return the version of each package that a lock file pins, by its normalized name."""
    return {re.sub(r"[-_.]+", "-", name).lower(): found for name, found in _PIN.findall(lock)}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _public(text: str) -> str:
    """Return a version without its build, which differs between machines with and without a GPU."""
    return text.partition("+")[0]


def check_device(examined: Examined) -> Outcome:
    """Check that the device of `engine.device` exists and computes in the run's precision."""
    config = examined.config
    wanted = config.engine.device
    bf16 = "bfloat16" in (config.training.precision, config.model.get("dtype"))
    if wanted == "cpu" or not torch.cuda.is_available():
        if wanted == "cuda":
            return failed(
                "engine.device is 'cuda', but torch sees no GPU",
                "install a CUDA build of torch and the driver, give the container the GPU, or set engine.device",
            )
        slow = ", in bfloat16, which most CPUs compute slowly" if bf16 else ""
        return ok(f"trains on the CPU with {config.engine.threads or torch.get_num_threads()} threads{slow}")
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    if bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return failed(
            f"{name} cannot compute in bfloat16", "use another GPU, or agree on training.precision = 'float32'"
        )
    shown = f"{name} with {memory.size(free)} of {memory.size(total)} free"
    if free < total / 2:
        return warning(f"{shown}; other programs use it", "stop them, or choose another GPU by CUDA_VISIBLE_DEVICES")
    return ok(shown)


def check_disk(examined: Examined) -> Outcome:
    """Compare the free disk space with what a run stores at a site."""
    folder = examined.site.state_folder
    place = folder if folder.exists() else next(parent for parent in folder.parents if parent.exists())
    need, free = disk_needed(examined.experiment, examined.site.name), shutil.disk_usage(place).free
    shown = f"the run needs up to {memory.size(need)} in {folder.name}/, and {memory.size(free)} are free"
    if free < need:
        return failed(shown, f"free some space on the disk of {place}, or set 'state' in site.toml to another disk")
    if free < 2 * need:
        return warning(shown, "free some space: logs and other programs need some too")
    return ok(shown)


def disk_needed(experiment: Experiment, client: str) -> int:
    """Return an upper bound of the bytes of a site's files: copies of what it is sent, and its states."""
    run, initial = experiment.run, experiment.model.initial
    plans = [
        plan_for(run.method.plan, experiment.model, RoundInfo(number, run.rounds, client))
        for number in {0, run.rounds // 2, run.rounds - 1}
    ]
    down, keep, train = (
        _bytes(initial, {name for plan in plans for name in getattr(plan, part)}) for part in ("down", "keep", "train")
    )
    rules = sum(_bytes(part, part) for rule in run.method.client_rules for part in rule.memory(dict(initial)).values())
    transforms = train * sum(len(transform.slots) for transform in run.method.transforms)
    optimizer = 2 * train if run.method.carry_optimizer else 0
    return COPIES * down + STATES * (keep + rules + transforms + optimizer)


def check_memory(examined: Examined) -> Outcome:
    """Compare the free memory with an estimate of what a round needs."""
    experiment = examined.experiment
    run, model = experiment.run, experiment.model
    plan = plan_for(run.method.plan, model, RoundInfo(0, run.rounds, examined.site.name))
    every, trained = _bytes(model.initial, model.initial), _bytes(model.initial, plan.train)
    frozen = model.frozen_weights()
    on_gpu = experiment.device.type == "cuda"
    training = every + 3 * trained + _bytes(frozen, frozen)
    need = WIRE * max(_bytes(model.initial, plan.up), _bytes(model.initial, plan.down)) + (0 if on_gpu else training)
    free = memory.available()
    shown = f"a round needs about {memory.size(need)} and room for a batch, and {memory.size(free)} are free"
    if free < need:
        return warning(shown, "close other programs, or use a machine with more memory; the rehearsal measures it")
    return ok(shown)


def _bytes(values: Mapping[str, torch.Tensor], names: Iterable[str]) -> int:
    return sum(values[name].numel() * values[name].element_size() for name in names)
