"""Play the arms of a private study whose encoder is frozen, on a CPU: its states are computed once for all runs.

    PYTHONPATH=src python studies/private/heads.py tune|run studies/private/ohsumed.toml head --states FILE \
        --set data.path=FOLDER --set model.path=FOLDER

`studies/play.py` plays the same runs, and computes the states again in each. The states of a text are those of the
engine's own cache (`engine.cache_frozen`); they differ from recomputed ones by rounding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))

from playing.choice import Asked, left_to_play, plan, read_runs
from playing.lines import append_line, only_writer
from playing.study import Planned, read_study
from playing.work import play

from partita import data
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import frozen_cache
from partita.privacy import spending
from partita.privacy.accountant import Accountant, PrivacyEvents


class KeptStates:
    """The states of texts by their tokens, (token, width) each, in memory and in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.states: dict[bytes, Tensor] = torch.load(file, weights_only=True) if file.exists() else {}
        self.saved = len(self.states)

    def install(self) -> None:
        """Let every cache of frozen layers take its states from here."""
        compute = frozen_cache.FrozenForward.__call__

        def kept(forward: frozen_cache.FrozenForward, inputs: Tensors) -> Tensor:
            masks = inputs["attention_mask"].bool()
            keys = [row[mask].numpy().tobytes() for row, mask in zip(inputs["input_ids"], masks, strict=True)]
            if new := [place for place, key in enumerate(keys) if key not in self.states]:
                found = compute(forward, {name: value[new] for name, value in inputs.items()})
                for place, states in zip(new, found, strict=True):
                    self.states[keys[place]] = states[masks[place]].clone()
            out = torch.zeros(*masks.shape, len(self.states[keys[0]][0]))
            for row, mask, key in zip(out, masks, keys, strict=True):
                row[mask] = self.states[key]
            return out

        frozen_cache.FrozenForward.__call__ = kept  # type: ignore[method-assign]

    def save(self) -> None:
        """Write the file if there is something new."""
        if len(self.states) > self.saved:
            torch.save(self.states, self.file)
            self.saved = len(self.states)


def keep_accounts() -> None:
    """Compute the epsilon of the same releases only once: it does not depend on the learning rate."""
    compute, known = spending.epsilon, dict[object, float]()

    def kept(bill: PrivacyEvents, delta: float, by: Accountant = "pld", of_clients: bool = False) -> float:
        key = frozenset(bill.items()), delta, by, of_clients
        if key not in known:
            known[key] = compute(bill, delta, by, of_clients)
        return known[key]

    spending.epsilon = kept  # type: ignore[assignment]


def keep_data() -> None:
    """Read the texts of a seed only once."""
    load, known = data.load, dict[object, data.Task]()

    def kept(name: str, key: Key, **options: Any) -> data.Task:
        found = name, key, repr(options)
        if found not in known:
            known.clear()
            known[found] = load(name, key, **options)
        return known[found]

    data.load = kept


def _line(run: Planned, work: Path) -> dict[str, Any]:
    """Play a run. An update so long that the server refuses it is a result: this rate does not train."""
    try:
        return play(run, work, 1, None)
    except RuntimeError as error:
        if "implausible" not in str(error):
            raise
        empty = {"bytes": {"up": [], "down": []}, "train_loss": [], "round_seconds": [], "seconds": 0.0}
        about = {"chosen": dict(run.chosen), "edge": list(run.edge), "digest": run.digest, "commit": None}
        return {**run.identity, **about, "device": "cpu", "score": run.score, "diverged": str(error), **empty}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("tune", "run"))
    parser.add_argument("study", type=Path)
    parser.add_argument("arm")
    parser.add_argument("--states", type=Path, required=True, help="file of the states; it is of one model and length")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    study, asked = read_study(given.study), Asked(tuple(given.overrides), [given.arm])
    kept = KeptStates(given.states)
    kept.install()
    keep_accounts()
    keep_data()
    runs = left_to_play(study, plan(study, given.kind, asked, read_runs(study, "tune")), read_runs(study, given.kind))
    with only_writer(study.file), tempfile.TemporaryDirectory() as work:
        for number, run in enumerate(runs, 1):
            line = _line(run, Path(work))
            append_line(study.output(given.kind), line)
            kept.save()
            part = line.get("validation" if given.kind == "tune" else "test")
            score = f"{part[study.score][-1]:.4f} in {line['seconds']} s" if part else line["diverged"]
            print(f"{number}/{len(runs)} {run.title}: {score}", flush=True)


if __name__ == "__main__":
    main()
