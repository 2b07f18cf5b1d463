"""The model of a recorded run is the one whose scores were recorded, also where the server's never trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import partita
from partita.core.settings import RunError

WEIGHTS = "model.safetensors"


def config(method: str) -> dict[str, Any]:
    return {
        "rounds": 3,
        "data": {"name": "digits"},
        "split": {"name": "iid", "clients": 3},
        "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 4},
        "training": {"optimizer": "adamw", "lr": 3e-3, "steps": 60},
        "method": {"name": method},
    }


@pytest.mark.slow
def test_pooled_model_has_the_recorded_scores(tmp_path: Path) -> None:
    done = partita.run(config("centralized"), tmp_path / "run")
    assert done.scores["accuracy"] > 0.3, "untrained, all models are alike"
    assert done.evaluate(bootstrap=0)["scores"]["accuracy"]["value"] == done.scores["accuracy"]
    [client] = done.record.rows[-1]["cohort"]
    shared, own = done.export(tmp_path / "shared"), done.export(tmp_path / "own", client=client)
    assert (shared / WEIGHTS).read_bytes() == (own / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_untrained_server_model_is_refused(tmp_path: Path) -> None:
    done = partita.run(config("local-only"), tmp_path / "run")
    with pytest.raises(RunError, match=r"nothing travels with 'local-only'.*--client c0"):
        done.export(tmp_path / "export")
    with pytest.raises(RunError, match="the server's model is untrained"):
        done.functional()
    assert not (tmp_path / "export").exists()
    assert (done.export(tmp_path / "own", client="c1") / WEIGHTS).is_file()
