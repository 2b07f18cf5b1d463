"""A rehearsal: one job with fake weights and a few of the site's examples, through the code that answers the server.

Nothing is sent, and nothing stays: the folder with the rehearsal's files is deleted.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from partita.core import memory
from partita.core.data import Batch, ClientData, Examples, text_lengths
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.tensors import Tensors
from partita.engines.availability import Availability
from partita.engines.flower import messages
from partita.engines.flower.client import train
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.site import Site
from partita.experiment.config import shared_digest
from partita.experiment.experiment import Experiment
from partita.site.config import SiteConfig
from partita.site.doctor.checks import Examined, Outcome, failed, ok

BATCHES = 2  # batches of the site's examples that the rehearsal trains on
SESSION = "rehearsal"


class FewExamples:
    """The first few of the examples."""

    def __init__(self, examples: Examples, count: int) -> None:
        self.examples, self.count = examples, min(count, len(examples))

    def __len__(self) -> int:
        return self.count

    def take(self, indices: torch.Tensor) -> Batch:
        return self.examples.take(indices)

    def lengths(self, indices: torch.Tensor) -> torch.Tensor | None:
        return text_lengths(self.examples, indices)


def check_rehearsal(examined: Examined) -> Outcome:
    """Play one round and report what it took and how much would leave the site."""
    experiment, site = examined.experiment, examined.site
    state = site.state_folder
    began = time.perf_counter()
    # In the state folder, because the files hold parameters trained on the site's data.
    with tempfile.TemporaryDirectory(prefix="rehearsal-", dir=state if state.is_dir() else None) as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reply = rehearse(experiment, site, Path(folder))
        stored = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    seconds = time.perf_counter() - began
    if (error := messages.decode_error(reply)) is not None:
        return failed(
            f"the job was refused: {error.reason}", "mend that; a job of the server's would fail in the same way"
        )
    blob = reply["tensors"].get("blob")
    leaves = 0 if blob is None else len(blob.data)  # type: ignore[union-attr]
    return ok(
        f"one job on {len(_few(experiment, site.name).train)} examples took {seconds:.1f} s and at most "
        f"{_peak(experiment)} of memory; {leaves:,} bytes would leave, and {memory.size(stored)} would be stored"
    )


def rehearse(experiment: Experiment, site: SiteConfig, folder: Path) -> messages.RecordDict:
    """Answer a job with fake weights and return the reply, which holds an update or an error."""
    name = site.name
    training = experiment.run.training
    steps = None if training.steps is None else min(training.steps, BATCHES)
    run = replace(experiment.run, training=replace(training, epochs=1, steps=steps))
    job, _ = make_job(run, experiment.model, initial_server(run, experiment.model), 0, name)
    params = fake_weights(job.params, Key(experiment.config.seed) / SESSION)
    job = replace(job, params=params, stale=frozenset(params))
    digest = shared_digest(experiment.config)
    content = messages.encode_job(job, Fingerprints()(params), SESSION, digest, experiment.base_digest, 0, 0)
    evaluator, base, data = experiment.evaluator, experiment.base_digest, _few(experiment, name)
    rehearsing = Site(
        *(run, experiment.model, name, data, folder, Availability(), experiment.device, evaluator, digest),
        lambda: base,
        make_engine=experiment.site_engine,
    )
    return train(rehearsing, content)


def fake_weights(params: Tensors, key: Key) -> Tensors:
    """Replace each tensor by values drawn at random from it: noise of the same type and scale, not a trained model."""
    fakes = {}
    for name, value in params.items():
        flat = value.cpu().flatten()
        drawn = torch.randint(max(1, len(flat)), flat.shape, generator=(key / name).generator())
        fakes[name] = flat[drawn].reshape(value.shape)
    return fakes


def _few(experiment: Experiment, client: str) -> ClientData:
    """Return the first examples of a client; all of them if a Trainer goes through them itself."""
    data, training = experiment.federation[client], experiment.run.training
    if experiment.make_engine is not None:
        return data
    count = BATCHES * training.batch_size * training.accumulate
    return ClientData(FewExamples(data.train, count), data.validation, data.test)


def _peak(experiment: Experiment) -> str:
    """Return the largest memory of this process so far, and of the GPU."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = memory.size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    if experiment.device.type != "cuda":
        return peak
    return f"{peak} (GPU: {memory.size(torch.cuda.max_memory_allocated())})"
