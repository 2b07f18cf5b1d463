"""What each file of a run folder holds, and when it is written, for the reference."""

from __future__ import annotations

from typing import NamedTuple

from partita.core import own_code
from partita.privacy import secret
from partita.record import file_names
from partita.storage.checkpoint import BEST


class RunFile(NamedTuple):
    """A file of a run folder, or a folder in it."""

    contents: str
    written: str


RUN_FILES = {
    file_names.CONFIG: RunFile("the config with all its defaults", "before the first round"),
    file_names.ENVIRONMENT: RunFile("versions and device", "before the first round"),
    file_names.PLAN: RunFile("the plan", "before the first round"),
    file_names.PRIVACY: RunFile("the privacy guarantee; only in a private run", "before the first round"),
    str(secret.FILE): RunFile(
        "the secret of the noise, readable only by its owner; only in a private run",
        "before the first round",
    ),
    file_names.SPLIT: RunFile(
        "how many examples of which labels each of the first 1,000 clients holds; not in a private run, nor where the "
        "data is at remote sites",
        "before the first round",
    ),
    f"{own_code.FOLDER}/": RunFile("copies of your [own code](../guide/own-code.md)", "before the first round"),
    file_names.CHECKSUMS: RunFile("digests of the files above", "after them"),
    file_names.ROWS: RunFile("one row per round", "after each round"),
    f"{file_names.CHECKPOINTS}/": RunFile(
        "what differs from the initial server, after the last two checkpoints",
        "every `checkpoint.every` rounds, and after a round that is the best on [validation](../guide/rounds.md)",
    ),
    f"{file_names.CHECKPOINTS}/{BEST}/": RunFile(
        "the checkpoint of the best round on validation", "with that checkpoint"
    ),
    f"{file_names.CLIENTS}/": RunFile(
        "what each client keeps",
        'with the checkpoints, or after each client\'s round with `engine.client_state = "disk"`',
    ),
    file_names.SAMPLES: RunFile(
        "test examples with what the model says before and after training; only with `evaluate.samples`, and not in a "
        "private run",
        "after the last round",
    ),
    file_names.PROGRESS: RunFile(
        "the round, who was asked, replied or was lost so far, for [`partita watch`](../guide/watch.md)",
        "at most once a second; deleted after the last round",
    ),
    f"{file_names.TRACK}/": RunFile(
        "what [trackers](../guide/tracking.md) keep on this machine", "while the run goes on"
    ),
    file_names.RESULT: RunFile(
        "digest of the final state; why the run [stopped](../guide/rounds.md#early-stopping) before its last round; "
        "which round was best",
        "after the last round",
    ),
    file_names.AUDIT: RunFile("the findings of [`partita audit`](../guide/privacy.md#audits)", "by `partita audit`"),
    file_names.REPORT: RunFile("the [report](../guide/report.md)", "by `partita report` or `--report`"),
    file_names.EXTENSION: RunFile("the files that an extension to more rounds replaces", "only while it replaces them"),
    file_names.LOCK: RunFile("held by the process that uses the folder", "before the first round"),
    "export/, export-CLIENT/, export-clients/": RunFile(
        "what [`partita export`](../guide/results.md) wrote; no part of the run", "by `partita export`"
    ),
}
