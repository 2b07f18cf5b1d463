"""The settings of runs, and the shell commands that repeat them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from partita.record.file_names import CONFIG
from partita.report.elements import Table
from partita.report.load import CODE, RunRecord, by_label, settings
from partita.storage.safe_text import label_folder

VALUES_LISTED = 4  # different values of a key of the environment


def settings_data(records: Sequence[RunRecord]) -> Mapping[str, Any]:
    """Return the config of each label."""
    groups = by_label(records)
    return {
        "configs": [
            {
                "label": label,
                "seeds": f"{'seeds' if len(runs) > 1 else 'seed'} {', '.join(str(run.seed) for run in runs)}",
                "config": runs[0].config_text,
                "code": runs[0].code,
            }
            for label, runs in groups.items()
        ],
    }


def reproduce_data(records: Sequence[RunRecord]) -> Mapping[str, Any]:
    """Return the commands that repeat the runs, and the environments in which they ran."""
    keys = dict.fromkeys(key for record in records for key in record.environment)
    body = [
        (key, _values([record.environment[key] for record in records if key in record.environment])) for key in keys
    ]
    return {
        "commands": commands(records),
        "notes": _not_repeated(records),
        "environment": Table("Environment", ("what", "value"), body) if body else None,
    }


def _values(values: Sequence[str]) -> str:
    """Return different values of an environment's key. Of many, such as times, the least and the greatest."""
    different = sorted(set(values))
    if len(different) > VALUES_LISTED:
        return f"{len(different)} values from {different[0]} to {different[-1]}"
    return "; ".join(dict.fromkeys(values))


def commands(records: Sequence[RunRecord]) -> str:
    """Return shell commands that write the configs and repeat the runs, each in a new folder.

    Runs of a label that differ only in the seed share a config file.
    """
    lines, folders = ["mkdir -p again"], set[str]()
    for label, runs in by_label(records).items():
        folder = label_folder(label)
        while folder in folders:  # different labels can have the same folder
            folder += "_"
        folders.add(folder)
        written: list[RunRecord] = []
        for run in runs:
            path = _config_path(folder, run, f"-{run.seed}" if written else "")
            if not written or settings(run) != settings(written[0]):
                lines += _write_config(path, run)
                written.append(run)
            else:
                path = _config_path(folder, run)
            out = f"again/{folder}/seed-{run.seed}"
            lines.append(f"partita run --config {shlex.quote(path)} --set seed={run.seed} --out {shlex.quote(out)}")
    return "\n".join(lines)


def _config_path(folder: str, run: RunRecord, number: str = "") -> str:
    """Return where to write a config. The user's own files lie next to it, so it then has a folder of its own."""
    return f"again/{folder}{number}-config/{CONFIG}" if run.code else f"again/{folder}{number}.toml"


def _write_config(path: str, run: RunRecord) -> list[str]:
    if not run.code:
        return _write_file(path, run.config_text)
    parent = path.rpartition("/")[0]
    lines = [f"mkdir -p {shlex.quote(f'{parent}/{CODE}')}", *_write_file(path, run.config_text)]
    for name, text in run.code.items():
        lines += _write_file(f"{parent}/{name}", text)
    return lines


def _write_file(path: str, text: str) -> list[str]:
    """Return the shell's lines that write a file. No line of the text may end it, because the text is untrusted."""
    end = "END"
    while end in text:
        end += "_"
    return [f"cat > {shlex.quote(path)} <<'{end}'", *text.rstrip("\n").split("\n"), end]


def _not_repeated(records: Sequence[RunRecord]) -> list[str]:
    return [
        f"{label}: a repeated run draws new noise from a secret of its own, so its results differ."
        for label, runs in by_label(records).items()
        if runs[0].privacy and not runs[0].privacy.get("repeatable")
    ]
