"""Write the encoder of a run as a folder of transformers, for another run to start from.

    PYTHONPATH=src python studies/private/warm_start.py RUN FOLDER

`partita export` writes heads too, and refuses one on the mean of all tokens, which transformers does not have. Here the
head is left out: it belongs to the classes of the other task.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from partita.experiment.recorded_model import load_recorded_model
from partita.models.functional import FunctionalModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    recorded = load_recorded_model(given.run)
    model = recorded.experiment.model
    assert isinstance(model, FunctionalModel)
    given.folder.mkdir(parents=True)  # an error if it exists
    encoder = model.module.base_model
    with model.installed(recorded.params()):
        encoder.save_pretrained(given.folder)
    model.save_processor(given.folder)
    print(f"wrote {given.folder}: the encoder after {recorded.saved.done} rounds")


if __name__ == "__main__":
    main()
